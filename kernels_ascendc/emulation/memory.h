// How bytes move between UB and memory that peers use at the same time.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "row_copies.h"

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

// Short copies are entries, which peers poll; rows are longer, and are not read before their flag is set.
constexpr uint64_t LONGEST_POLLED_BYTES = 2048;

inline void CopyBytes(uint8_t* to, const uint8_t* from, uint64_t bytes, RowCopy copy_row = CopyByLibrary) {
    constexpr uint64_t BLOCK = 32;
    const bool aligned = ((reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from)) & 7) == 0;
    if (aligned && bytes % BLOCK == 0 && bytes <= LONGEST_POLLED_BYTES) {
        for (uint64_t at = 0; at < bytes; at += BLOCK) {
            CopyBlock(to + at, from + at);
        }
    } else {
        copy_row(to, from, bytes);
    }
}

// Peers read and write the same memory: copies become visible in program order, which is all that "data before flag"
// needs.
inline void CopyInOrder(uint8_t* to, const uint8_t* from, uint64_t bytes, RowCopy copy_row = CopyByLibrary) {
    std::atomic_thread_fence(std::memory_order_acq_rel);
    CopyBytes(to, from, bytes, copy_row);
    std::atomic_thread_fence(std::memory_order_acq_rel);
}

// A block of memory that ends in a flag.
struct FlaggedBlock {
    uint32_t bytes;
    uint32_t data_bytes;
};

}  // namespace moe::emulation
