// How bytes move between UB and memory that peers use at the same time.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moe::emulation {

// A 32-byte block is what the hardware moves at once: a flag and the count beside it arrive together.
// They share an aligned word of 8 bytes, which a copy of a fixed size, moved by whole registers, does not
// tear. A call of memcpy may move byte by byte. A flag in the second half, a stamp's, is not there before the first:
// that half is read first and written last. One register for both halves promises no order where a block lies across
// two cache lines, and is no faster.
inline void CopyBlock(uint8_t* to, const uint8_t* from) {
    struct Half {
        uint64_t words[2];
    };
    Half first;
    Half second;
    std::memcpy(&second, from + sizeof(Half), sizeof(Half));
    std::atomic_thread_fence(std::memory_order_acquire);
    std::memcpy(&first, from, sizeof(Half));
    std::memcpy(to, &first, sizeof(Half));
    std::atomic_thread_fence(std::memory_order_release);
    std::memcpy(to + sizeof(Half), &second, sizeof(Half));
}

// The pieces that a row is copied in, and the prefetch distance of both its source and its target. The hardware's
// own prefetchers stop at the end of a page and do not prefetch for writing: for uncached rows of 14 KB, on two cores
// at once, this has 1.45 times the bandwidth of memcpy (distances from 512 to 2048 are within 3%).
constexpr uint64_t PIECE_BYTES = 256;
constexpr uint64_t AHEAD_BYTES = 1024;
constexpr uint64_t LINE_BYTES = 64;

#if defined(__x86_64__)
#define MOE_ASKS_FOR_LINES __attribute__((target("prfchw"))) /* means nothing to a processor without it */
#else
#define MOE_ASKS_FOR_LINES
#endif

MOE_ASKS_FOR_LINES inline void AskFor(uint8_t* to, const uint8_t* from, uint64_t begin, uint64_t end) {
    for (uint64_t line = begin; line < end; line += LINE_BYTES) {
        __builtin_prefetch(from + line, 0, 2);
        __builtin_prefetch(to + line, 1, 3);
    }
}

MOE_ASKS_FOR_LINES inline void CopyAhead(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    uint64_t at = 0;
    if (bytes >= AHEAD_BYTES + PIECE_BYTES) AskFor(to, from, 0, AHEAD_BYTES);
    for (; at + AHEAD_BYTES + PIECE_BYTES <= bytes; at += PIECE_BYTES) {
        AskFor(to, from, at + AHEAD_BYTES, at + AHEAD_BYTES + PIECE_BYTES);
        std::memcpy(to + at, from + at, PIECE_BYTES);
    }
    std::memcpy(to + at, from + at, bytes - at);
}

#undef MOE_ASKS_FOR_LINES

#if defined(__x86_64__)
// Past the caches: data that is not read again soon would only evict data that is, and a store into an uncached line
// reads the line first. The fence orders these stores, which are unordered, before a later flag.
__attribute__((target("avx512f"))) inline void StreamLines512(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += LINE_BYTES) {
        _mm_prefetch(reinterpret_cast<const char*>(from + at + AHEAD_BYTES), _MM_HINT_T1);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
    }
}

inline void StreamLines128(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += 16) {
        const auto word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), word);
    }
}

inline void StreamBytes(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    static const bool has_avx512 = __builtin_cpu_supports("avx512f");
    const uint64_t head = (LINE_BYTES - reinterpret_cast<uint64_t>(to) % LINE_BYTES) % LINE_BYTES;
    if (bytes < head + LINE_BYTES) {
        std::memcpy(to, from, bytes);
        return;
    }
    const uint64_t lines = (bytes - head) / LINE_BYTES * LINE_BYTES;
    std::memcpy(to, from, head);
    (has_avx512 ? StreamLines512 : StreamLines128)(to + head, from + head, lines);
    std::memcpy(to + head + lines, from + head + lines, bytes - head - lines);
    _mm_sfence();
}
#else
inline void StreamBytes(uint8_t* to, const uint8_t* from, uint64_t bytes) { std::memcpy(to, from, bytes); }
#endif

// Short copies are entries, which peers poll; rows are longer, and are not read before their flag is set.
constexpr uint64_t LONGEST_POLLED_BYTES = 2048;

inline void CopyBytes(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    constexpr uint64_t BLOCK = 32;
    const bool aligned = ((reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from)) & 7) == 0;
    if (aligned && bytes % BLOCK == 0 && bytes <= LONGEST_POLLED_BYTES) {
        for (uint64_t at = 0; at < bytes; at += BLOCK) {
            CopyBlock(to + at, from + at);
        }
    } else {
        CopyAhead(to, from, bytes);
    }
}

// Peers read and write the same memory: copies become visible in program order, which is all that "data before flag"
// needs.
inline void CopyInOrder(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    std::atomic_thread_fence(std::memory_order_acq_rel);
    CopyBytes(to, from, bytes);
    std::atomic_thread_fence(std::memory_order_acq_rel);
}

// A block of memory that ends in a flag.
struct FlaggedBlock {
    uint32_t bytes;
    uint32_t data_bytes;
};

}  // namespace moe::emulation
