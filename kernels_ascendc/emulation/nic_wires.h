// What a NIC does with the items of its queues: when the bytes of each are put, and in which order.
//
// The promise of a queue: the pieces of a message arrive in any order, and only the first piece of the next message on
// the same queue comes after all of it; a queue may keep order inside messages as well. `TimedWires` keeps all order
// and takes the time that posts and a link take; `RandomWires` keeps no order but the promised one.
#ifndef MOE_EMULATION_NIC_WIRES_H
#define MOE_EMULATION_NIC_WIRES_H

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "clock.h"
#include "link_log.h"
#include "paced_link.h"
#include "post_ring.h"
#include "random.h"
#include "transport.h"

namespace moe {

struct NicPeer {
    std::unique_ptr<PostRing> ring;  // null: it has no queue
    bool is_inside = false;          // of this rank's server: its messages go over no link
};

// Of a peer's window as the transport knows it: the address in items is one that nobody can use.
struct NicMemory {
    static constexpr uint32_t TOKEN_SHIFT = 48;

    uint64_t out_begin;  // what may be posted
    uint64_t out_end;
    uint64_t in_bytes;  // of a peer's window, what may be written

    static uint64_t OffsetOf(const PostItem& item) { return item.remote & ((uint64_t{1} << TOKEN_SHIFT) - 1); }

    bool Holds(const PostItem& item) const {
        const uint64_t offset = OffsetOf(item);
        return item.remote >> TOKEN_SHIFT == uint64_t{item.rank} + 1 && item.bytes > 0 && item.local >= out_begin &&
               item.local <= out_end && item.bytes <= out_end - item.local && offset <= in_bytes &&
               item.bytes <= in_bytes - offset;
    }
};

class Wires {
public:
    Wires(std::vector<NicPeer>& peers, Transport& transport) : peers_(peers), transport_(transport) {}
    Wires(const Wires&) = delete;
    Wires& operator=(const Wires&) = delete;
    virtual ~Wires() = default;

    virtual void Take(const RingEntry& entry) = 0;
    // Puts what is due. Returns when there is more to do: at once if that is not after `now_ns`; never: UINT64_MAX.
    virtual uint64_t Deliver(uint64_t now_ns) = 0;

protected:
    void Put(const PostItem& item, uint64_t first, uint64_t bytes) {
        transport_.Put(item.rank, NicMemory::OffsetOf(item) + first,
                       reinterpret_cast<const uint8_t*>(item.local) + first, bytes);
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

    uint64_t Deliver(uint64_t now_ns) override {
        return std::min(DeliverFrom(between_, now_ns), DeliverFrom(inside_, now_ns));
    }

private:
    static constexpr uint64_t PIECE_BYTES = 1 << 16;
    static constexpr uint64_t LATEST_NS = 500'000;  // behind its time

    struct Flight {
        PostItem item;
        uint64_t first;
        uint64_t bytes;
        uint64_t due_ns;

        bool IsLast() const { return first + bytes == item.bytes; }
    };

    uint64_t DeliverFrom(std::deque<Flight>& flights, uint64_t now_ns) {
        for (; !flights.empty() && flights.front().due_ns <= now_ns; flights.pop_front()) {
            const Flight& flight = flights.front();
            Put(flight.item, flight.first, flight.bytes);
            if (flight.IsLast()) End(flight.item);
        }
        return NextDue(flights);
    }

    // Nobody is told of a message without flags: it is put with those behind it, as long as they are small and soon.
    static uint64_t NextDue(const std::deque<Flight>& flights) {
        if (flights.empty()) return UINT64_MAX;
        const uint64_t latest = flights.front().due_ns + LATEST_NS;
        uint64_t bytes = 0;
        uint64_t due = 0;
        for (const Flight& flight : flights) {
            if (flight.due_ns > latest) break;
            due = flight.due_ns;
            bytes += flight.bytes;
            if (bytes >= PIECE_BYTES || (flight.IsLast() && flight.item.Flags() > 0)) break;
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
    RandomWires(std::vector<NicPeer>& peers, Transport& transport, uint64_t seed, bool keeps_order)
        : Wires(peers, transport), queues_(peers.size()), random_(seed), keeps_order_(keeps_order) {}

    void Take(const RingEntry& entry) override {
        const PostItem& item = entry.item;
        Message message{item, {}};
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

    uint64_t Deliver(uint64_t now_ns) override {
        for (;;) {
            std::vector<Candidate> found;
            for (size_t queue = 0; queue < queues_.size(); ++queue) Candidates(queue, found);
            if (found.empty()) return UINT64_MAX;
            if (waits_until_ns_ > now_ns) return waits_until_ns_;
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
        PostItem item;
        std::vector<Piece> pieces;
    };

    struct Candidate {
        size_t queue;
        size_t message;
        size_t piece;
    };

    void Candidates(size_t queue, std::vector<Candidate>& found) const {
        const std::deque<Message>& messages = queues_[queue];
        for (size_t message = 0; message < messages.size(); ++message) {
            if (keeps_order_ && message > 0) return;
            const std::vector<Piece>& pieces = messages[message].pieces;
            for (size_t piece = 0; piece < pieces.size(); ++piece) {
                if (keeps_order_ && piece > 0) break;
                const bool is_first = pieces[piece].first == 0;
                if (!is_first || message == 0) found.push_back({queue, message, piece});
            }
        }
    }

    void Step(const Candidate& chosen) {
        std::deque<Message>& messages = queues_[chosen.queue];
        Message& message = messages[chosen.message];
        const Piece piece = message.pieces[chosen.piece];
        Put(message.item, piece.first, piece.bytes);
        message.pieces.erase(message.pieces.begin() + static_cast<std::ptrdiff_t>(chosen.piece));
        if (!message.pieces.empty()) return;
        // The oldest: its first piece has waited for those before.
        End(message.item);
        messages.pop_front();
    }

    std::vector<std::deque<Message>> queues_;
    emulation::Random random_;
    const bool keeps_order_;
    uint64_t waits_until_ns_ = 0;
};

}  // namespace moe

#endif  // MOE_EMULATION_NIC_WIRES_H
