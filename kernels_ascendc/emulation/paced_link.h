// A slow link between this rank and its peers: bytes per second, a latency, and who sends sleeps meanwhile.
//
// Windows in shared memory are written at the speed of the core that writes, so nothing else can use that core until
// the bytes are there. Over a link a device sends while it computes. A sleeping sender leaves the core in the same way.
#pragma once

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "clock.h"

namespace moe {

// A token bucket that all threads of a rank share: the bytes that senders may be ahead of the wire. Whoever takes first
// passes first, so nobody starves. It is kept as the time at which the link will have carried all bytes that were
// taken: N bytes that are taken from now on arrive no sooner than N / rate from now, and their senders have passed no
// sooner than (N - bucket) / rate from now, however late sleepers wake.
struct PacedLink {
    static constexpr uint64_t NS_PER_S = 1'000'000'000;

    uint64_t bytes_per_second;  // at least 1
    uint64_t latency_ns;
    uint64_t bucket_bytes;
    std::atomic<uint64_t> idle_at_ns;
    std::atomic<uint64_t> taken_bytes;

    // Of some bytes: when the link begins to carry them, and when it has; when their sender may go on; and until when
    // it is to sleep if that is still to come: until seven eighths of the bucket are full again, the rest being for
    // waking late. Naps are as few and as long as the bucket allows, because each costs the core 20 to 40 us in which
    // nobody computes: the timer is set, it interrupts whoever computes, and threads change twice.
    struct Turn {
        uint64_t begun_ns, arrived_ns, passed_ns, wake_ns;
    };

    // How long the link takes for what senders may be ahead of it.
    uint64_t AheadNs() const { return bucket_bytes * NS_PER_S / bytes_per_second; }

    // Sleeping is the caller's part.
    Turn Take(uint64_t bytes, uint64_t now_ns) {
        taken_bytes.fetch_add(bytes, std::memory_order_relaxed);
        const uint64_t takes_ns = (bytes * NS_PER_S + bytes_per_second - 1) / bytes_per_second;
        uint64_t before = idle_at_ns.load(std::memory_order_relaxed);
        uint64_t after = 0;
        do {
            after = std::max(before, now_ns) + takes_ns;
        } while (!idle_at_ns.compare_exchange_weak(before, after, std::memory_order_relaxed));
        const uint64_t ahead_ns = AheadNs();
        return {after - takes_ns, after, after - std::min(after, ahead_ns), after - std::min(after, ahead_ns / 8)};
    }
};

// When a rank's link to other servers carried a message, for traces.
struct LinkSpan {
    uint64_t begin_ns;
    uint64_t end_ns;
    uint64_t call;  // in which the message was posted
    uint64_t peer;
};

// A ring, which keeps the newest. The NIC adds at any time; a reader takes what is older than `num_spans`, and leaves
// out what that says, when it looks again, has been overwritten meanwhile. It has a fence between all of these steps.
struct LinkLog {
    LinkSpan* spans;
    uint64_t max_spans;
    uint64_t num_spans;  // that were ever added
    const uint64_t* call;  // the number of the call that runs

    void Add(const LinkSpan& span) {
        // Who reads any of this finds, when it looks again, at least the number that there is now.
        std::atomic_thread_fence(std::memory_order_release);
        spans[num_spans % max_spans] = span;
        __atomic_store_n(&num_spans, num_spans + 1, __ATOMIC_RELEASE);
    }
};

static_assert(sizeof(std::atomic<uint64_t>) == sizeof(uint64_t), "Python allocates it as plain words");

// Sleeps until a time of `MonotonicNs`; a signal may end it early. The usual slack of 50 us would be most of a nap.
inline void NapUntil(uint64_t ns) {
    constexpr unsigned long SLACK_NS = 1000;
    constexpr unsigned long USUAL = 0;
    const timespec until{static_cast<time_t>(ns / PacedLink::NS_PER_S), static_cast<long>(ns % PacedLink::NS_PER_S)};
    prctl(PR_SET_TIMERSLACK, SLACK_NS);
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
    prctl(PR_SET_TIMERSLACK, USUAL);
}

}  // namespace moe
