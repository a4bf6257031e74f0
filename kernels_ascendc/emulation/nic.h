// The NIC of a rank: a thread that carries out what cores post to queues, asleep while there is nothing to do.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "clock.h"
#include "meeting.h"
#include "nic_wires.h"

namespace moe {

// How Python describes one.
struct NicDescription {
    uint64_t num_ranks;
    uint64_t rank;           // this one: its queues are looked at in turn, from the one behind it on
    const uint64_t* windows;  // of each rank, where this process has it; 0: that rank has no queue
    const uint64_t* inside;   // whether it is of this rank's server
    uint64_t own;             // this rank's window
    uint64_t in_bytes;        // of every window, the part that peers write
    uint64_t window_bytes;
    uint64_t has_doorbells;  // whether one lies behind each window
    uint64_t ring_items;
    uint64_t post_ns;
    PacedLink* link;
    uint64_t seed;         // 0: everything in order
    uint64_t keeps_order;  // inside messages
    int64_t cpu;           // that it runs on; -1: any
    LinkLog* log;          // of what the link carries; null: it is not traced
    OtherHosts* others;    // null: all ranks are of this host
    const uint64_t* elsewhere;  // whether a queue leads to a rank of another one
    uint64_t is_loose;          // whether messages of a queue may overtake each other (nic_wires.h)
};

class Nic {
public:
    static constexpr uint64_t LONGEST_END_NS = 5'000'000'000;
    static constexpr uint32_t MOST_POLLS = 5;  // of queues to other hosts, before it sleeps

    explicit Nic(const NicDescription& given)
        : memory_{given.own + given.in_bytes, given.own + given.window_bytes, given.in_bytes},
          first_(given.rank + 1),
          peers_(given.num_ranks),
          taken_(given.num_ranks),
          is_in_turn_(given.seed == 0),
          log_(given.log),
          others_(given.others),
          transport_(given.num_ranks) {
        for (uint32_t rank = 0; rank < given.num_ranks; ++rank) {
            peers_[rank].is_elsewhere = given.others != nullptr && given.elsewhere[rank] != 0;
            if (given.windows[rank] == 0 && !peers_[rank].is_elsewhere) continue;
            peers_[rank].ring = std::make_unique<PostRing>(given.ring_items);
            peers_[rank].is_inside = given.inside[rank] != 0;
            if (peers_[rank].is_elsewhere) continue;
            emulation::Doorbell* const bell = emulation::DoorbellBehind(given.windows[rank], given.window_bytes);
            transport_.Register(rank, given.windows[rank], given.has_doorbells != 0 ? bell : nullptr);
        }
        if (given.seed != 0) {
            const auto order = given.is_loose != 0 ? RandomWires::Order::LOOSE : RandomWires::Order::POSTED;
            wires_ = std::make_unique<RandomWires>(peers_, transport_, given.seed, given.keeps_order != 0, order);
        } else {
            wires_ = std::make_unique<TimedWires>(peers_, transport_, given.post_ns, given.link, given.log);
        }
        if (others_ != nullptr) {
            event_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
            if (event_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
            bell_.WakeBy(event_);
            const bool has_bell = given.has_doorbells != 0;
            others_->Begin(peers_, has_bell ? emulation::DoorbellBehind(given.own, given.window_bytes) : nullptr,
                           given.is_loose != 0);
        }
        try {
            Start(given.cpu);
        } catch (...) {
            if (event_ >= 0) close(event_);
            throw;
        }
    }

    // What was posted is still delivered: peers wait for it.
    ~Nic() {
        stop_at_ns_.store(MonotonicNs() + LONGEST_END_NS);
        bell_.Ring(Sleep::UNTIL_DUE);
        thread_.join();
        if (event_ >= 0) close(event_);
    }

    bool HasQueue(uint32_t rank) const { return rank < peers_.size() && peers_[rank].ring != nullptr; }

    // Whether an item is of this rank's out part and a peer's in part.
    bool Holds(const PostItem& item) const { return HasQueue(item.rank) && memory_.Holds(item); }

    bool Claim(uint32_t rank, uint64_t launch, uint32_t block) { return peers_[rank].ring->Claim(launch, block); }

    // Of an item that it `Holds`. False while the ring is full. Hardware may read the bytes at any time from the post
    // on; where nothing is in turn, this says whether they are read at once, before what the core does next.
    bool Post(const PostItem& item, bool reads_at_once = false) {
        const uint64_t call = log_ != nullptr ? *log_->call : 0;
        RingEntry entry{item, MonotonicNs(), call, nullptr};
        if (reads_at_once && !is_in_turn_) {
            entry.read = std::make_shared<std::vector<uint8_t>>(item.Bytes(), item.Bytes() + item.bytes);
        }
        if (!peers_[item.rank].ring->Push(std::move(entry))) return false;
        bell_.Ring(Wakes(item));
        return true;
    }

    // How many messages to a rank are delivered, and their memory free again; they are in the order of posting.
    uint64_t Posted(uint32_t rank) const { return HasQueue(rank) ? peers_[rank].ring->Posted() : 0; }
    uint64_t Delivered(uint32_t rank) const { return HasQueue(rank) ? peers_[rank].ring->Delivered() : 0; }

    // See `OtherHosts::Drop`.
    void Drop(uint32_t rank) {
        others_->Drop(rank);
        bell_.Ring(Sleep::UNTIL_DUE);
    }

    bool IsDropped(uint32_t rank) const { return others_->IsDropped(rank); }

private:
    // Messages to other servers come one after the other: none is due before those that were posted first.
    Sleep Wakes(const PostItem& item) const {
        if (!is_in_turn_ || peers_[item.rank].is_inside) return Sleep::UNTIL_DUE;
        return item.Flags() > 0 ? Sleep::GATHERING : Sleep::UNTIL_POSTED;
    }

    // Signals are for the threads that know what to do with them.
    void Start(int64_t cpu) {
        sigset_t all;
        sigset_t before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        thread_ = std::thread([this] { Serve(); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        pthread_setname_np(thread_.native_handle(), "moe-nic");
        if (cpu < 0) return;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(static_cast<size_t>(cpu), &one);
        pthread_setaffinity_np(thread_.native_handle(), sizeof(one), &one);
    }

    void Serve() {
        // The usual slack of 50 us would be most of what a post takes.
        constexpr unsigned long SLACK_NS = 1000;
        prctl(PR_SET_TIMERSLACK, SLACK_NS);
        uint32_t polls = 0;
        for (;;) {
            const uint32_t rings = bell_.Rings();
            const uint64_t now = MonotonicNs();
            TakeAll();
            Due due = wires_->Deliver(now);
            if (others_ != nullptr) due = due.With(others_->Deliver(now));
            const uint64_t stop_at = stop_at_ns_.load();
            const bool is_idle = due.ns == Due::NEVER && (others_ == nullptr || others_->IsIdle());
            if (now >= stop_at || (stop_at != Due::NEVER && is_idle && AllTaken())) return;
            if (others_ != nullptr) {
                // What is under way may end in a moment, and a sleep costs a waker.
                if (!is_idle && ++polls < MOST_POLLS) {
                    sched_yield();
                    continue;
                }
                polls = 0;
                if (others_->MaySleep()) SleepBeside(rings, std::min(due.ns, stop_at));
            } else if (due.ns == Due::NEVER) {
                if (stop_at == Due::NEVER) bell_.SleepSince(rings, Sleep::UNTIL_POSTED, nullptr);
            } else if (const uint64_t then = MonotonicNs(); due.ns > then) {
                const timespec nap{static_cast<time_t>((due.ns - then) / PacedLink::NS_PER_S),
                                   static_cast<long>((due.ns - then) % PacedLink::NS_PER_S)};
                bell_.SleepSince(rings, due.gathers ? Sleep::GATHERING : Sleep::UNTIL_DUE, &nap);
            }
        }
    }

    // Until something is posted or comes from another host.
    void SleepBeside(uint32_t rings, uint64_t until_ns) {
        const uint64_t then = MonotonicNs();
        if (until_ns <= then) return;
        const uint64_t ns = until_ns - then;
        const timespec nap{static_cast<time_t>(ns / PacedLink::NS_PER_S), static_cast<long>(ns % PacedLink::NS_PER_S)};
        bell_.SleepSince(rings, Sleep::UNTIL_POSTED, until_ns == Due::NEVER ? nullptr : &nap, others_->Descriptor());
    }

    bool AllTaken() const {
        for (size_t rank = 0; rank < peers_.size(); ++rank) {
            if (peers_[rank].ring != nullptr && taken_[rank] != peers_[rank].ring->Posted()) return false;
        }
        return true;
    }

    void TakeAll() {
        for (size_t i = 0; i < peers_.size(); ++i) {
            const size_t rank = (first_ + i) % peers_.size();
            if (peers_[rank].ring == nullptr) continue;
            for (const uint64_t posted = peers_[rank].ring->Posted(); taken_[rank] != posted; ++taken_[rank]) {
                const RingEntry& entry = peers_[rank].ring->At(taken_[rank]);
                if (peers_[rank].is_elsewhere) {
                    others_->Take(entry);
                } else {
                    wires_->Take(entry);
                }
            }
        }
    }

    const NicMemory memory_;
    const size_t first_;
    std::vector<NicPeer> peers_;
    std::vector<uint64_t> taken_;  // of each ring, how many
    const bool is_in_turn_;
    const LinkLog* const log_;
    OtherHosts* const others_;
    int event_ = -1;
    SharedMemory transport_;
    std::unique_ptr<Wires> wires_;
    PostBell bell_;
    std::atomic<uint64_t> stop_at_ns_{Due::NEVER};
    std::thread thread_;
};

namespace emulation {

// A core's post to the NIC of its rank. False while the ring is full. See `Nic::Post`.
inline bool PostTo(Nic* nic, const Meeting& meeting, uint32_t block, const PostItem& item, bool reads_at_once = false) {
    if (nic == nullptr || !nic->HasQueue(item.rank)) throw CheckFailed("Post: that rank is not reached by a queue");
    if (!nic->Holds(item)) throw CheckFailed("Post: from outside of the out part, or to outside of a peer's in part");
    if (!nic->Claim(item.rank, meeting.launch, block)) throw CheckFailed("Post: two cores of a launch on one queue");
    return nic->Post(item, reads_at_once);
}

}  // namespace emulation

}  // namespace moe
