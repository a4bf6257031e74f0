// Doorbells: sleeping until flags arrive, and waking sleepers in other processes, through the windows' memory.
//
// A writer counts a flag after writing it. A sleeper reads the count before it polls its flags, publishes the count at
// which to wake it, and reads the count once more before it sleeps. All of this is sequentially consistent, so either
// the sleeper sees the last count or the writer sees the request.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "launch_settings.h"

namespace moe::emulation {

struct Doorbell {
    static constexpr uint64_t BYTES = 4096;  // a page of its own behind each window
    static constexpr uint64_t ALIGN = 64;
    static constexpr uint64_t NOBODY = 0;
    static constexpr long LONGEST_NAP_NS = 2 * 1000 * 1000;

    std::atomic<uint64_t> count;
    std::atomic<uint64_t> wake_at;
    std::atomic<uint32_t> wakes;

    // After flags were written.
    void Ring(uint64_t flags) {
        const uint64_t now = count.fetch_add(flags) + flags;
        uint64_t wanted = wake_at.load();
        if (wanted == NOBODY || now < wanted) return;
        if (wake_at.exchange(NOBODY) == NOBODY) return;
        wakes.fetch_add(1);
        // Shared, because the sleeper is another process.
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&wakes), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    // Until `wanted` flags have been counted, or for a short time at most: deadlines must be checked, and nothing that
    // a peer writes here may keep a rank asleep.
    void SleepUntil(uint64_t wanted, timespec longest = {0, LONGEST_NAP_NS}) {
        const uint32_t seen = wakes.load();
        // Several threads may sleep: the earliest request wakes all of them.
        for (uint64_t other = wake_at.load(); other == NOBODY || wanted < other;) {
            if (wake_at.compare_exchange_weak(other, wanted)) break;
        }
        if (count.load() >= wanted) return;
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&wakes), FUTEX_WAIT, seen, &longest, nullptr, 0);
    }
};

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain word");
static_assert(sizeof(Doorbell) <= Doorbell::BYTES, "it has a page");

inline Doorbell* DoorbellBehind(uint64_t window, uint64_t bytes) {
    return reinterpret_cast<Doorbell*>((window + bytes + Doorbell::ALIGN - 1) / Doorbell::ALIGN * Doorbell::ALIGN);
}

// The doorbell of the window that contains an address; null for other addresses.
inline Doorbell* DoorbellOf(const LaunchSettings& settings, const void* pointer) {
    const auto [group, window] = WindowOf(settings, pointer);
    return group == nullptr ? nullptr : DoorbellBehind(window, group->window_bytes);
}

}  // namespace moe::emulation
