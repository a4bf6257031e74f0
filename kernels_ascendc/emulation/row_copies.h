// Ways to copy a row. Which is fastest depends on the processor, so that a machine times them (host/row_copies.cpp).
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace moe::emulation {

using RowCopy = void (*)(uint8_t* to, const uint8_t* from, uint64_t bytes);

// It chooses by the processor as well, once.
inline void CopyByLibrary(uint8_t* to, const uint8_t* from, uint64_t bytes) { std::memcpy(to, from, bytes); }

constexpr uint64_t LINE_BYTES = 64;
constexpr uint64_t AHEAD_BYTES = 1024;  // distances from 512 to 2048 are within 3%

#if defined(__x86_64__)
#define MOE_TARGET(...) __attribute__((target(__VA_ARGS__)))
#else
#define MOE_TARGET(...)
#endif

MOE_TARGET("prfchw")  // means nothing to a processor without it
inline void AskFor(uint8_t* to, const uint8_t* from, uint64_t begin, uint64_t end) {
    for (uint64_t line = begin; line < end; line += LINE_BYTES) {
        __builtin_prefetch(from + line, 0, 2);
        __builtin_prefetch(to + line, 1, 3);
    }
}

// Asks ahead for the lines of its source and its target, up to the end of the row: the hardware's own prefetchers stop
// at the end of a page, and some do not prefetch for writing.
MOE_TARGET("prfchw")
inline void CopyAhead(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    constexpr uint64_t PIECE_BYTES = 256;
    uint64_t at = 0;
    if (bytes >= AHEAD_BYTES + PIECE_BYTES) AskFor(to, from, 0, AHEAD_BYTES);
    for (; at + AHEAD_BYTES + PIECE_BYTES <= bytes; at += PIECE_BYTES) {
        AskFor(to, from, at + AHEAD_BYTES, at + AHEAD_BYTES + PIECE_BYTES);
        std::memcpy(to + at, from + at, PIECE_BYTES);
    }
    std::memcpy(to + at, from + at, bytes - at);
}

struct NamedRowCopy {
    const char* name;
    RowCopy copy;
};

// Through the caches. The first one serves launches without settings.
inline constexpr NamedRowCopy ROW_COPIES[] = {{"library", CopyByLibrary}, {"ahead", CopyAhead}};

#if defined(__x86_64__)
// Past the caches: data that is not read again soon would only evict data that is, and a store into an uncached line
// reads the line first. These stores are unordered until `OrderStreamed`.
MOE_TARGET("avx512f")
inline void StreamLines512(uint8_t* to, const uint8_t* from, uint64_t bytes) {
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

// Asked of the processor: __builtin_cpu_supports asks the compiler's run-time library, and with it zig's would link
// a memcpy of its own, which is slower than the C library's (docs/wheels.md).
inline bool HasAvx512() {
    constexpr uint32_t REGISTERS = 0xE6;  // those of SSE, AVX and AVX-512, which the system has to keep
    uint32_t a = 0, b = 0, c = 0, d = 0, kept = 0, rest = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0) return false;
    asm("xgetbv" : "=a"(kept), "=d"(rest) : "c"(0));
    if ((kept & REGISTERS) != REGISTERS) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & bit_AVX512F) != 0;
}

inline void StreamBytes(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    static const bool has_avx512 = HasAvx512();
    const uint64_t head = (LINE_BYTES - reinterpret_cast<uint64_t>(to) % LINE_BYTES) % LINE_BYTES;
    if (bytes < head + LINE_BYTES) {
        std::memcpy(to, from, bytes);
        return;
    }
    const uint64_t lines = (bytes - head) / LINE_BYTES * LINE_BYTES;
    std::memcpy(to, from, head);
    (has_avx512 ? StreamLines512 : StreamLines128)(to + head, from + head, lines);
    std::memcpy(to + head + lines, from + head + lines, bytes - head - lines);
}

// What was streamed is there before anything that is written after this. It waits for all of it, which takes about as
// long as half a row: once before flags, not once a row.
inline void OrderStreamed() { _mm_sfence(); }
constexpr bool HAS_STREAMS = true;
#else
inline void StreamBytes(uint8_t* to, const uint8_t* from, uint64_t bytes) { std::memcpy(to, from, bytes); }
inline void OrderStreamed() { std::atomic_thread_fence(std::memory_order_release); }
constexpr bool HAS_STREAMS = false;
#endif

}  // namespace moe::emulation
