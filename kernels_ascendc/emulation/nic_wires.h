// What a NIC does with the items of its queues: when the bytes of each are put, and in which order.
//
// The promise of a queue: the pieces of a message arrive in any order, and only the first piece of the next message on
// the same queue comes after all of it; a queue may keep order inside messages as well. Where it is loose, messages
// overtake each other: only the first piece of one with flags comes after all without flags before it, and after all
// that write the same bytes. `TimedWires` keeps all order
// and takes the time that posts and a link take; `RandomWires` keeps no order but the promised one.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "clock.h"
#include "paced_link.h"
#include "post_ring.h"
#include "random.h"
#include "transport.h"

namespace moe {

struct NicPeer {
    std::unique_ptr<PostRing> ring;  // null: it has no queue
    bool is_inside = false;          // of this rank's server: its messages go over no link
    bool is_elsewhere = false;       // on another host
};

// Of a peer's window as the transport knows it: the address in items is one that nobody can use.
struct NicMemory {
    static constexpr uint32_t TOKEN_SHIFT = 48;
    static constexpr uint64_t NUM_TOKENS = 1024;  // the last rank's is 0 (moe_triton/core/reach.py)

    uint64_t out_begin;  // what may be posted
    uint64_t out_end;
    uint64_t in_bytes;  // of a peer's window, what may be written

    static uint64_t OffsetOf(const PostItem& item) { return item.remote & ((uint64_t{1} << TOKEN_SHIFT) - 1); }

    bool Holds(const PostItem& item) const {
        const uint64_t offset = OffsetOf(item);
        return item.remote >> TOKEN_SHIFT == (uint64_t{item.rank} + 1) % NUM_TOKENS && item.bytes > 0 &&
               item.local >= out_begin && item.local <= out_end && item.bytes <= out_end - item.local &&
               offset <= in_bytes && item.bytes <= in_bytes - offset;
    }
};

// When there is more to do: at once if that is not after now.
struct Due {
    static constexpr uint64_t NEVER = UINT64_MAX;

    uint64_t ns = NEVER;
    bool gathers = false;  // a message that somebody is told of may be due before

    // What is due of either.
    Due With(const Due& other) const { return {std::min(ns, other.ns), gathers || other.gathers}; }
};

// Queues to ranks whose windows are not in this machine.
class OtherHosts {
public:
    virtual ~OtherHosts() = default;

    // Before all others: the queues, and the doorbell of this rank's window.
    virtual void Begin(std::vector<NicPeer>& peers, emulation::Doorbell* bell, bool is_loose) = 0;
    virtual void Take(const RingEntry& entry) = 0;
    virtual Due Deliver(uint64_t now_ns) = 0;
    // Whether nothing is under way.
    virtual bool IsIdle() const = 0;
    // Has the thread that delivers let go of a rank, which writes nothing to this one's window once that `IsDropped`,
    // and to which nothing goes. From any thread.
    virtual void Drop(uint32_t rank) = 0;
    virtual bool IsDropped(uint32_t rank) const = 0;
    // Readable when there is more to deliver, once `MaySleep` has said so.
    virtual int Descriptor() const = 0;
    virtual bool MaySleep() = 0;
};

class Wires {
public:
    Wires(std::vector<NicPeer>& peers, Transport& transport) : peers_(peers), transport_(transport) {}
    virtual ~Wires() = default;

    virtual void Take(const RingEntry& entry) = 0;
    // Puts what is due.
    virtual Due Deliver(uint64_t now_ns) = 0;

protected:
    // Out of memory that has an item's bytes.
    void Put(const PostItem& item, const uint8_t* from, uint64_t first, uint64_t bytes) {
        transport_.Put(item.rank, NicMemory::OffsetOf(item) + first, from + first, bytes);
    }

    void End(const PostItem& item) {
        while (!transport_.Progress()) {
        }
        if (item.Flags() > 0) transport_.Flag(item.rank, item.Flags());
        peers_[item.rank].ring->Pop();
    }

    bool IsInside(const PostItem& item) const { return peers_[item.rank].is_inside; }

private:
    std::vector<NicPeer>& peers_;
    Transport& transport_;
};

// In the order of posting. Each post takes its time, one after the other; then the link does.
class TimedWires final : public Wires {
public:
    TimedWires(std::vector<NicPeer>& peers, Transport& transport, uint64_t post_ns, PacedLink* link, LinkLog* log)
        : Wires(peers, transport), post_ns_(post_ns), link_(link), log_(log) {}

    void Take(const RingEntry& entry) override {
        const PostItem& item = entry.item;
        posted_ns_ = std::max(posted_ns_, entry.posted_ns) + post_ns_;
        const bool is_paced = link_ != nullptr && !IsInside(item);
        const uint64_t step = is_paced ? std::max(PIECE_BYTES, link_->bucket_bytes) : item.bytes;
        LinkSpan carried{UINT64_MAX, 0, entry.call, item.rank};
        for (uint64_t first = 0; first < item.bytes; first += step) {
            const uint64_t bytes = std::min(step, item.bytes - first);
            uint64_t due = posted_ns_;
            if (is_paced) {
                const PacedLink::Turn turn = link_->Take(bytes, posted_ns_);
                due = turn.arrived_ns + link_->latency_ns;
                carried.begin_ns = std::min(carried.begin_ns, turn.begun_ns);
                carried.end_ns = turn.arrived_ns;
            }
            (is_paced ? between_ : inside_).push_back({item, first, bytes, due});
        }
        if (is_paced && log_ != nullptr) log_->Add(carried);
    }

    Due Deliver(uint64_t now_ns) override {
        PutUntil(between_, now_ns);
        PutUntil(inside_, now_ns);
        return NextBetween().With({NextOf(inside_, PIECE_BYTES).ns});
    }

private:
    static constexpr uint64_t PIECE_BYTES = 1 << 16;
    static constexpr uint64_t GATHERED_NS = 100'000;  // of a link's time
    static constexpr uint64_t LATEST_NS = 500'000;   // behind its time

    struct Flight {
        PostItem item;
        uint64_t first;
        uint64_t bytes;
        uint64_t due_ns;

        bool IsLast() const { return first + bytes == item.bytes; }
        bool IsTold() const { return IsLast() && item.Flags() > 0; }
    };

    void PutUntil(std::deque<Flight>& flights, uint64_t now_ns) {
        for (; !flights.empty() && flights.front().due_ns <= now_ns; flights.pop_front()) {
            const Flight& flight = flights.front();
            Put(flight.item, flight.item.Bytes(), flight.first, flight.bytes);
            if (flight.IsLast()) End(flight.item);
        }
    }

    // Nobody is told of a message without flags: it is put with those behind it, as long as they are small and soon.
    // Those that a link carries may still be posted: each time that the NIC wakes costs some core 20 us and more.
    Due NextBetween() const {
        if (between_.empty()) return {};
        const uint64_t gathered = std::max(PIECE_BYTES, link_->bytes_per_second * GATHERED_NS / PacedLink::NS_PER_S);
        const Due due = NextOf(between_, gathered);
        if (!due.gathers) return due;
        const uint64_t gathered_ns = gathered * PacedLink::NS_PER_S / link_->bytes_per_second;
        return {between_.front().due_ns + std::min(LATEST_NS, gathered_ns), true};
    }

    // Gathers where all flights together are less than that, and nobody is told of any.
    static Due NextOf(const std::deque<Flight>& flights, uint64_t gathered) {
        Due due;
        uint64_t bytes = 0;
        for (const Flight& flight : flights) {
            if (due.gathers && flight.due_ns > flights.front().due_ns + LATEST_NS) return {due.ns};
            bytes += flight.bytes;
            due = {flight.due_ns, true};
            if (bytes >= gathered || flight.IsTold()) return {due.ns};
        }
        return due;
    }

    const uint64_t post_ns_;
    PacedLink* const link_;
    LinkLog* const log_;
    uint64_t posted_ns_ = 0;
    std::deque<Flight> between_;
    std::deque<Flight> inside_;
};

// For tests: what may overtake does, under a seed, and arrives late.
class RandomWires final : public Wires {
public:
    enum class Order : uint8_t { POSTED, LOOSE };

    RandomWires(std::vector<NicPeer>& peers, Transport& transport, uint64_t seed, bool keeps_order, Order order)
        : Wires(peers, transport), queues_(peers.size()), random_(seed), keeps_order_(keeps_order), order_(order) {}

    void Take(const RingEntry& entry) override {
        const PostItem& item = entry.item;
        Message message{entry, {}};
        const uint64_t blocks = (item.bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
        for (uint64_t first = 0; first < item.bytes;) {
            const uint64_t length = (random_() % (blocks / 2 + 1) + 1) * BLOCK_BYTES;
            message.pieces.push_back({first, std::min(length, item.bytes - first)});
            first += length;
        }
        queues_[item.rank].push_back(std::move(message));
        // Others may come meanwhile, to overtake it.
        if (random_.OneIn(2)) waits_until_ns_ = std::max(waits_until_ns_, MonotonicNs() + LATE_NS);
    }

    Due Deliver(uint64_t now_ns) override {
        for (;;) {
            std::vector<Candidate> found;
            for (size_t queue = 0; queue < queues_.size(); ++queue) Candidates(queue, found);
            if (found.empty()) return {};
            if (waits_until_ns_ > now_ns) return {waits_until_ns_};
            Step(found[random_() % found.size()]);
            if (random_.OneIn(8)) waits_until_ns_ = now_ns + LATE_NS;
        }
    }

private:
    static constexpr uint64_t BLOCK_BYTES = 32;
    static constexpr uint64_t LATE_NS = 300'000;

    struct Piece {
        uint64_t first;
        uint64_t bytes;
    };

    // The pieces that are still to be put; the first one of all comes first while it is among them.
    struct Message {
        RingEntry entry;
        std::vector<Piece> pieces;
    };

    struct Candidate {
        size_t queue, message, piece;
    };

    void Candidates(size_t queue, std::vector<Candidate>& found) const {
        const std::deque<Message>& messages = queues_[queue];
        for (size_t message = 0; message < messages.size(); ++message) {
            if (keeps_order_ && message > 0 && order_ == Order::POSTED) return;
            const std::vector<Piece>& pieces = messages[message].pieces;
            for (size_t piece = 0; piece < pieces.size(); ++piece) {
                if (keeps_order_ && piece > 0) break;
                const bool waits = keeps_order_ ? piece == 0 : pieces[piece].first == 0;
                if (!waits || MayBegin(messages, message)) found.push_back({queue, message, piece});
            }
        }
    }

    bool MayBegin(const std::deque<Message>& messages, size_t number) const {
        if (order_ == Order::POSTED) return number == 0;
        const PostItem& item = messages[number].entry.item;
        for (size_t before = 0; before < number; ++before) {
            const PostItem& other = messages[before].entry.item;
            const bool waits = item.Meets(other) || (item.Flags() > 0 && other.Flags() == 0);
            if (waits && !messages[before].pieces.empty()) return false;
        }
        return true;
    }

    void Step(const Candidate& chosen) {
        std::deque<Message>& messages = queues_[chosen.queue];
        Message& message = messages[chosen.message];
        const Piece piece = message.pieces[chosen.piece];
        const PostItem& item = message.entry.item;
        const auto& read = message.entry.read;
        Put(item, read != nullptr ? read->data() : item.Bytes(), piece.first, piece.bytes);
        message.pieces.erase(message.pieces.begin() + static_cast<std::ptrdiff_t>(chosen.piece));
        // Its memory is free when those before it are there as well.
        for (; !messages.empty() && messages.front().pieces.empty(); messages.pop_front()) {
            End(messages.front().entry.item);
        }
    }

    std::vector<std::deque<Message>> queues_;
    emulation::Random random_;
    const bool keeps_order_;
    const Order order_;
    uint64_t waits_until_ns_ = 0;
};

}  // namespace moe
