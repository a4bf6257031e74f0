// Threads that send over one paced link. Prints the nanoseconds that all of
// them took, the bytes that the link counted, and the writes that the slowest
// thread had sent when the first one was done.
#include "paced_link.h"

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

int main(int, char** argv) {
    const uint64_t bytes_per_second = std::strtoull(argv[1], nullptr, 10);
    const uint64_t bucket_bytes = std::strtoull(argv[2], nullptr, 10);
    const uint64_t threads = std::strtoull(argv[3], nullptr, 10);
    const uint64_t writes = std::strtoull(argv[4], nullptr, 10);
    const uint64_t bytes = std::strtoull(argv[5], nullptr, 10);
    static moe::PacedLink link{bytes_per_second, 0, bucket_bytes, {0}, {0}};
    static std::vector<std::atomic<uint64_t>> sent(threads);
    static std::atomic<uint64_t> fewest{UINT64_MAX};
    const uint64_t begin = moe::MonotonicNs();
    std::vector<std::thread> senders;
    for (uint64_t t = 0; t < threads; ++t) {
        senders.emplace_back([=] {
            for (uint64_t i = 0; i < writes; ++i) {
                const uint64_t now = moe::MonotonicNs();
                const moe::PacedLink::Turn turn = link.Take(bytes, now);
                while (turn.passed_ns > now && moe::MonotonicNs() < turn.wake_ns) moe::NapUntil(turn.wake_ns);
                sent[t].fetch_add(1);
            }
            uint64_t least = writes;
            for (const auto& other : sent) least = std::min(least, other.load());
            uint64_t none = UINT64_MAX;
            fewest.compare_exchange_strong(none, least);
        });
    }
    for (auto& sender : senders) sender.join();
    std::printf("%llu %llu %llu\n", static_cast<unsigned long long>(moe::MonotonicNs() - begin),
                static_cast<unsigned long long>(link.taken_bytes), static_cast<unsigned long long>(fewest));
}
