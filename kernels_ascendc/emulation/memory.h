// How bytes move between UB and memory that peers use at the same time.
#ifndef MOE_EMULATION_MEMORY_H
#define MOE_EMULATION_MEMORY_H

#include <cstdint>
#include <cstring>

namespace moe::emulation {

// A 32-byte block is what the hardware moves at once: a flag and the count beside it arrive together.
// They share an aligned word of 8 bytes, which a copy of a fixed size, moved by whole registers, does not
// tear. A call of memcpy may move byte by byte.
inline void CopyBlock(uint8_t* to, const uint8_t* from) {
    struct Half {
        uint64_t words[2];
    };
    Half first;
    Half second;
    std::memcpy(&first, from, sizeof(Half));
    std::memcpy(&second, from + sizeof(Half), sizeof(Half));
    std::memcpy(to, &first, sizeof(Half));
    std::memcpy(to + sizeof(Half), &second, sizeof(Half));
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

// A block of memory that ends in a flag.
struct FlaggedBlock {
    uint32_t bytes;
    uint32_t data_bytes;
};

}  // namespace moe::emulation

#endif  // MOE_EMULATION_MEMORY_H
