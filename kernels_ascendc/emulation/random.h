// SplitMix64: as good as needed here, and quick to seed for every block of every launch.
#pragma once

#include <cstdint>

namespace moe::emulation {

class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t operator()() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15ULL;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
        return z ^ (z >> 31);
    }

    bool OneIn(uint64_t n) { return (*this)() % n == 0; }

private:
    uint64_t state_;
};

}  // namespace moe::emulation
