// How bytes move between UB and memory that peers use at the same time.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "row_copies.h"

namespace moe::emulation {

// A 32-byte block is what the hardware moves at once: a flag and all that is beside it arrive together. Here words of 8
// bytes do, and no copy tears them. They are read in the order opposite to that of writing, so that who finds a flag
// finds what it announces: a flag in the fourth word, as FLAG1 of A2's headers, all the others; one in the third, as a
// stamp's and an end's, the first and the second; one in the first word, as an entry's, the second. What lies beside a
// flag in its own word comes with it. Addresses are multiples of 8.
inline void CopyBlock(uint8_t* to, const uint8_t* from) {
    auto* source = reinterpret_cast<const uint64_t*>(from);
    auto* target = reinterpret_cast<uint64_t*>(to);
    const uint64_t fourth = __atomic_load_n(source + 3, __ATOMIC_ACQUIRE);
    const uint64_t third = __atomic_load_n(source + 2, __ATOMIC_ACQUIRE);
    const uint64_t first = __atomic_load_n(source, __ATOMIC_ACQUIRE);
    const uint64_t second = __atomic_load_n(source + 1, __ATOMIC_RELAXED);
    __atomic_store_n(target + 1, second, __ATOMIC_RELAXED);
    __atomic_store_n(target, first, __ATOMIC_RELEASE);
    __atomic_store_n(target + 2, third, __ATOMIC_RELEASE);
    __atomic_store_n(target + 3, fourth, __ATOMIC_RELEASE);
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
