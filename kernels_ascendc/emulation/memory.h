// How bytes move between UB and memory that peers use at the same time.
#ifndef MOE_EMULATION_MEMORY_H
#define MOE_EMULATION_MEMORY_H

#include <cstdint>
#include <cstring>

namespace moe::emulation {

// A 32-byte block is what the hardware moves at once: a flag and the count beside it arrive together.
// They share a word here, and words do not tear.
inline void CopyBlock(uint8_t* to, const uint8_t* from) {
    const auto* source = reinterpret_cast<const uint64_t*>(from);
    auto* target = reinterpret_cast<uint64_t*>(to);
    for (int word = 0; word < 4; ++word) {
        __atomic_store_n(target + word, __atomic_load_n(source + word, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
    }
}

inline void CopyBytes(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    constexpr uint64_t BLOCK = 32;
    constexpr uint64_t FEW_BLOCKS = 64;
    const bool aligned = ((reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from)) & 7) == 0;
    // Entries are polled by the dozen; rows are longer, and nobody reads one before its flag.
    if (aligned && bytes % BLOCK == 0 && bytes <= FEW_BLOCKS * BLOCK) {
        for (uint64_t at = 0; at < bytes; at += BLOCK) {
            CopyBlock(to + at, from + at);
        }
    } else {
        std::memcpy(to, from, bytes);
    }
}

}  // namespace moe::emulation

#endif  // MOE_EMULATION_MEMORY_H
