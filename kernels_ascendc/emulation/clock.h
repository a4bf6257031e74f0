// The clock that all ranks of a machine share.
#pragma once

#include <time.h>

#include <cstdint>

namespace moe {

// Of GetSystemCycle, which counts at 50 MHz.
constexpr uint64_t NS_PER_CYCLE = 20;

inline uint64_t MonotonicNs() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000U + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace moe
