// A block's writes to peers' windows over a paced link.
//
// A block that is too far ahead of the link sleeps. What peers poll is held back until the link has carried it and the
// latency is over, in the order of its writing, while the block goes on; longer copies are not read before a later
// flag (`CopyBytes`), so they need no holding. Before a block meets others, polls or ends, all that it wrote arrives.
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

#include "doorbell.h"
#include "launch_settings.h"
#include "meeting.h"
#include "memory.h"
#include "paced_link.h"

namespace moe::emulation {

class PacedWrites {
public:
    PacedWrites(const LaunchSettings& settings, const Meeting& meeting) : settings_(settings), meeting_(meeting) {}

    // Before a write: returns when the block may go on, at once for memory that is no peer's. True if the write is to
    // be given to `Hold` should peers poll it.
    bool Pace(const void* to, uint64_t bytes) {
        if (!IsOfPeer(to)) return false;
        const uint64_t now = MonotonicNs();
        const PacedLink::Turn turn = settings_.link->Take(bytes, now);
        if (turn.passed_ns > now) {
            SleepUntil(turn.wake_ns);
        } else {
            Release(now);
        }
        due_ns_ = turn.arrived_ns + settings_.link->latency_ns;
        if (!IsStopped()) return true;
        Release(UINT64_MAX);  // before what is not held any more
        return false;
    }

    void Hold(uint8_t* to, const uint8_t* from, uint64_t bytes) {
        held_.push_back({to, due_ns_, {from, from + bytes}, 0});
    }

    // Whether these flags are held back, and their doorbell with them.
    bool HoldsRing(const void* flags, uint64_t number) {
        if (held_.empty() || !IsOfPeer(flags)) return false;
        auto* const at = static_cast<uint8_t*>(const_cast<void*>(flags));
        held_.push_back({at, held_.back().due_ns, {}, number});
        return true;
    }

    // Returns when all has arrived.
    void Drain() {
        if (due_ns_ == 0) return;
        SleepUntil(due_ns_);
        Release(UINT64_MAX);
        due_ns_ = 0;
    }

private:
    struct Held {
        uint8_t* to;
        uint64_t due_ns;
        std::vector<uint8_t> bytes;
        uint64_t flags;  // to ring for
    };

    // Signals, stops and the failures of other blocks are seen this often.
    static constexpr uint64_t LONGEST_NAP_NS = 2'000'000;
    // What is held back may come later by this or by what the bucket lasts, rather than wake the block for each flag.
    static constexpr uint64_t SHORTEST_NAP_NS = 50'000;

    bool IsOfPeer(const void* pointer) const {
        const auto [group, window] = WindowOf(settings_, pointer);
        return group != nullptr && window != group->own;
    }

    bool IsStopped() const { return settings_.control != nullptr && settings_.control->IsStopped(); }

    void SleepUntil(uint64_t until_ns) {
        for (;;) {
            const uint64_t now = MonotonicNs();
            Release(now);
            if (now >= until_ns || IsStopped()) return;
            meeting_.ThrowIfFailed();
            const uint64_t soonest = now + std::max(SHORTEST_NAP_NS, settings_.link->AheadNs());
            const uint64_t due = held_.empty() ? until_ns : std::max(held_.front().due_ns, soonest);
            NapUntil(std::min({until_ns, due, now + LONGEST_NAP_NS}));
            // Blocks on other threads must not enter Python.
            if (settings_.control != nullptr && ThreadSettings() == &settings_) LookUpFromWait(*settings_.control);
        }
    }

    void Release(uint64_t now_ns) {
        for (; !held_.empty() && held_.front().due_ns <= now_ns; held_.pop_front()) {
            const Held& first = held_.front();
            CopyInOrder(first.to, first.bytes.data(), first.bytes.size());
            if (first.flags == 0) continue;
            if (Doorbell* const bell = DoorbellOf(settings_, first.to)) bell->Ring(first.flags);
        }
    }

    const LaunchSettings& settings_;
    const Meeting& meeting_;
    std::deque<Held> held_;
    uint64_t due_ns_ = 0;  // when the last write arrives; 0 if nothing was written since the last `Drain`
};

}  // namespace moe::emulation
