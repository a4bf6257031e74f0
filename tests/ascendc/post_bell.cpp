// One who posts and one who sleeps until it does, without any cap on a sleep: a
// wake that gets lost lasts until the test's deadline. A post is acknowledged
// before the next one, and threads pause at random behind a ring's count and
// before each system call, as a core that is given to somebody else would: that
// is when a wake can get lost.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

void Pause() {
    thread_local uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    for (volatile uint32_t left = (state >> 16) % 1500; left > 0; left = left - 1) {
    }
}

} // namespace

#define fetch_add(count) fetch_add(count), Pause()
#define syscall(...) (Pause(), ::syscall(__VA_ARGS__))
#include "post_ring.h"
#undef syscall
#undef fetch_add

using moe::PostBell;
using moe::Sleep;

int main(int, char** argv) {
    const uint64_t rounds = std::strtoull(argv[1], nullptr, 10);
    const auto depth = static_cast<Sleep>(std::strtoul(argv[2], nullptr, 10));
    const auto least = static_cast<Sleep>(std::strtoul(argv[3], nullptr, 10));
    static PostBell bell;
    static std::atomic<uint64_t> posted{0};
    static std::atomic<uint64_t> taken{0};
    std::thread sleeper([=] {
        while (taken < rounds) {
            const uint32_t rings = bell.Rings();
            if (const uint64_t there = posted.load(); taken != there) {
                taken = there;
                continue;
            }
            bell.SleepSince(rings, depth, nullptr);
        }
    });
    for (uint64_t round = 1; round <= rounds; ++round) {
        posted = round;
        bell.Ring(least);
        while (taken < round) {
        }
    }
    sleeper.join();
    std::printf("%llu\n", static_cast<unsigned long long>(taken));
}
