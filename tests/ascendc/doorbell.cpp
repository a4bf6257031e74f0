// Sleepers and ringers without the usual cap on a nap: a wake that gets lost lasts until the test's deadline.
#include "doorbell.h"

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

using moe::emulation::Doorbell;

namespace {

constexpr timespec FOR_EVER{1000, 0};

// As a waiting kernel does: the count first, then the flags, then sleep for as many as were missing.
void AwaitFlags(Doorbell& bell, const std::atomic<uint64_t>& flags, uint64_t wanted) {
    for (;;) {
        const uint64_t count = bell.count.load();
        const uint64_t there = flags.load(std::memory_order_acquire);
        if (there >= wanted) return;
        // What could get lost comes here: between the look and the wish to be woken.
        for (volatile uint64_t pause = (count * 2654435761u >> 7) % 2000; pause > 0; pause = pause - 1) {
        }
        bell.SleepUntil(count + (wanted - there), FOR_EVER);
    }
}

void Raise(Doorbell& bell, std::atomic<uint64_t>& flags) {
    flags.fetch_add(1, std::memory_order_release);
    bell.Ring(1);
}

}  // namespace

int main(int, char** argv) {
    const uint64_t rounds = std::strtoull(argv[1], nullptr, 10);
    const uint64_t ringers = std::strtoull(argv[2], nullptr, 10);
    const uint64_t sleepers = std::strtoull(argv[3], nullptr, 10);
    static Doorbell there{};  // rung by ringers, slept on by sleepers
    static Doorbell back{};   // the other way round
    static std::atomic<uint64_t> raised{0};
    static std::atomic<uint64_t> answered{0};
    std::vector<std::thread> threads;
    for (uint64_t r = 0; r < ringers; ++r) {
        threads.emplace_back([=] {
            for (uint64_t round = 1; round <= rounds; ++round) {
                Raise(there, raised);
                AwaitFlags(back, answered, round * sleepers);
            }
        });
    }
    for (uint64_t s = 0; s < sleepers; ++s) {
        threads.emplace_back([=] {
            for (uint64_t round = 1; round <= rounds; ++round) {
                AwaitFlags(there, raised, round * ringers);
                Raise(back, answered);
            }
        });
    }
    for (auto& thread : threads) thread.join();
    std::printf("%llu %llu\n", static_cast<unsigned long long>(raised), static_cast<unsigned long long>(answered));
}
