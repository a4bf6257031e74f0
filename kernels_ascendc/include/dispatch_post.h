// Dispatch, steps 1 and 2 where only queues lead to a peer: posts the rows that dispatch_send left in the out part, all
// of an expert's in one message, then the peer's entries. They are written here: entries that announce rows come behind
// them.
//
// A message carries what is empty between its rows and their stamps, too. Where that is much, and messages cost little,
// each row and each stamp has one of its own.
//
// A receiver looks at no row before all entries of all sources are there. The first piece of the entries' message comes
// behind all rows, so rows are complete by then, in whatever order pieces of messages arrive. A flag that a row brings
// along says nothing here that the entries have not said.
//
// Two zones of the out part are enough, too: a peer's entries of dispatch i + 1 say that it has received dispatch i.
#pragma once

#include "posts.h"
#include "status_entries.h"

namespace moe {

class DispatchPost : Kernel<DispatchPostArgs> {
public:
    __aicore__ inline void Init(const DispatchPostArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        peers_.Init(args.peers, NumRanks());
        poster_.Init(pipe, &peers_, &report_, args.traffic, args.timeout_us);
        entries_.Init(pipe, ENTRIES_PER_CHUNK);
        counts_.Init(pipe, ENTRIES_PER_CHUNK);
    }

    __aicore__ inline void Process() {
        TraceStep(TRACE_POST);
        entries_.Clear();
        call_ = WordOfDispatch(args_);
        for (int64_t i = 0; i < NumRanks(); ++i) {
            const int64_t rank = RankAt(i, args_.rank, NumRanks());
            if (Poster::IsOwner(rank) && peers_.IsQueued(rank) && !PostTo(rank)) {
                break;
            }
        }
        poster_.WriteTraffic(args_.adds_traffic != 0);
        report_.Write();
    }

private:
    static constexpr int64_t ENTRIES_PER_CHUNK = 512;

    __aicore__ inline int64_t NumRanks() const {
        return static_cast<int64_t>(args_.slots.source_extent);
    }

    // False after the deadline.
    __aicore__ inline bool PostTo(int64_t rank) {
        const int64_t routed = rank - args_.num_shared_ranks;
        const int64_t experts = routed < 0 ? 1 : static_cast<int64_t>(args_.slots.expert_extent);
        const Place place = peers_.PlaceFor(args_, rank);
        const uint64_t entries = place.window + EntryAt(args_, place.source, experts);
        for (int64_t first = 0; first < experts; first += ENTRIES_PER_CHUNK) {
            const int64_t count = Smaller(ENTRIES_PER_CHUNK, experts - first);
            const uint64_t counts = routed < 0 ? args_.shared_counts : args_.counts;
            counts_.Fetch(counts, routed < 0 ? rank : routed * experts + first, count);
            counts_.Begin(0);
            for (int64_t i = 0; i < count; ++i) {
                if (!PostRows(rank, place, first + i, counts_.At(i))) {
                    return false;
                }
            }
            for (int64_t i = 0; i < count; ++i) {
                entries_.Set(i, counts_.At(i), call_);
            }
            Order<AscendC::HardEvent::S_MTE3>();
            entries_.Leave(0, entries + first * STATUS_ENTRY_BYTES, count);
        }
        const uint64_t to = peers_.WindowOf(rank) + EntryAt(args_, args_.rank, experts);
        const int64_t bytes = experts * static_cast<int64_t>(STATUS_ENTRY_BYTES);
        return poster_.Put(rank, {entries, to, 0, bytes, static_cast<uint32_t>(experts)});
    }

    // For one expert: neighbouring slots, as far into the out part as into the receiver's window. Nobody is to be woken
    // for them.
    __aicore__ inline bool PostRows(int64_t rank, const Place& place, uint64_t expert, int64_t count) {
        if (count == 0) {
            return true;
        }
        // A negative count becomes a huge unsigned index, which no extent holds.
        if (!args_.slots.Contains(args_.zone, place.source, expert, static_cast<uint64_t>(count - 1))) {
            report_.Add(REPORT_BAD_ROW, static_cast<int64_t>(expert), count);
            return false;
        }
        const uint64_t at = args_.slots.AtOn(rank, args_.zone, args_.rank, expert, 0);
        const uint64_t local = place.window + at;
        const uint64_t remote = peers_.WindowOf(rank) + at;
        if (args_.front_bytes > 0) {
            return PostApart(rank, local, remote, count);
        }
        const int64_t bytes = (count - 1) * static_cast<int64_t>(args_.slots.index_stride) + args_.slot_bytes;
        const int64_t payload = count * args_.row_bytes;
        return poster_.Put(rank, {local, remote, payload, bytes - payload, 0});
    }

    // Of each slot the row with its scales, and the stamp behind what is empty.
    __aicore__ inline bool PostApart(int64_t rank, uint64_t local, uint64_t remote, int64_t count) {
        constexpr int64_t STAMP = STAMP_BYTES;
        const int64_t row = args_.row_bytes;
        const uint64_t stamp = static_cast<uint64_t>(args_.slot_bytes - STAMP);
        for (int64_t i = 0; i < count; ++i) {
            const uint64_t slot = static_cast<uint64_t>(i) * args_.slots.index_stride;
            if (!poster_.Put(rank, {local + slot, remote + slot, row, args_.front_bytes - row, 0}) ||
                !poster_.Put(rank, {local + slot + stamp, remote + slot + stamp, 0, STAMP, 0})) {
                return false;
            }
        }
        return true;
    }

    Peers peers_;
    Poster poster_;
    StatusEntries entries_;
    Table counts_;
    int32_t call_ = 0;
};

}  // namespace moe
