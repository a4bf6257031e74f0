// Status entries {1.0f, count, call word, 0...}: made in UB, written to the ranks that wait for them.
#pragma once

#include "flags.h"

namespace moe {

class StatusEntries {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe, int64_t max_entries) {
        max_entries_ = max_entries;
        entries_ = NewTensor<int32_t>(pipe, max_entries * STATUS_ENTRY_WORDS);
    }

    __aicore__ inline void Clear() {
        AscendC::Duplicate(entries_, 0, static_cast<int32_t>(max_entries_ * STATUS_ENTRY_WORDS));
        Order<AscendC::HardEvent::V_S>();
    }

    __aicore__ inline void Set(int64_t i, int32_t count, int32_t call) {
        entries_.SetValue(WordOf(i) + StatusEntry::FLAG, FLAG_BITS);
        entries_.SetValue(WordOf(i) + StatusEntry::COUNT, count);
        entries_.SetValue(WordOf(i) + StatusEntry::CALL, call);
    }

    // The one with this number, and those behind it.
    __aicore__ inline void Send(int64_t i, uint64_t address, int64_t number = 1) {
        const uint32_t words = static_cast<uint32_t>(number * STATUS_ENTRY_WORDS);
        RaiseFlags(GlobalAt<int32_t>(address), entries_[WordOf(i)], words, static_cast<uint32_t>(number));
    }

    // To where nobody looks for it: it is posted from there. When this returns it is there.
    __aicore__ inline void Leave(int64_t i, uint64_t address, int64_t number = 1) {
        AscendC::DataCopy(GlobalAt<int32_t>(address), entries_[WordOf(i)],
                          static_cast<uint32_t>(number * STATUS_ENTRY_WORDS));
        Order<AscendC::HardEvent::MTE3_S>();
    }

private:
    __aicore__ inline uint32_t WordOf(int64_t i) const {
        return static_cast<uint32_t>(i * STATUS_ENTRY_WORDS);
    }

    AscendC::LocalTensor<int32_t> entries_;
    int64_t max_entries_ = 0;
};

// The word that a dispatch posts: its call word and the kind of the combine before it.
template <typename Args>
__aicore__ inline int32_t WordOfDispatch(const Args& args) {
    const int32_t before = args.combine_kind == 0 ? 0 : ReadFresh<int32_t>(args.combine_kind);
    return static_cast<int32_t>(args.call) | before;
}

// Where the entries of a source begin, in a window or its mirror, for a receiver with so many experts: a shared rank
// has one.
template <typename Args>
__aicore__ inline uint64_t EntryAt(const Args& args, uint64_t source, int64_t num_experts) {
    return args.status.At(args.zone, 0, 0) + source * static_cast<uint64_t>(num_experts) * STATUS_ENTRY_BYTES;
}

// A dispatch's entries: one per shared rank, then one per routed expert; also for counts of 0, since every rank waits
// for an entry from every rank. Those of one receiver are neighbours in its window, and go in one copy: each copy is a
// trip of its own. A receiver looks at each entry by itself, so that the order in which they arrive does not matter.
// Those of queued receivers are posted behind their rows (dispatch_post.h).
template <typename Args>
class DispatchStatusPost {
public:
    __aicore__ inline void Init(const Args* args, AscendC::TPipe* pipe, const Blocks& blocks) {
        args_ = args;
        blocks_ = blocks;
        peers_.Init(args->peers, static_cast<int64_t>(args->status.source_extent));
        entries_.Init(pipe, ENTRIES_PER_CHUNK);
        counts_.Init(pipe, ENTRIES_PER_CHUNK);
    }

    // Each block those of its share of ranks, in the order of `RankAt`.
    __aicore__ inline void Post() {
        TraceStep(TRACE_FLAG);
        const int64_t shared = args_->num_shared_ranks;
        const int64_t ranks = shared + args_->num_experts / LocalExperts();
        const Share share = blocks_.ShareOf(ranks);
        call_ = WordOfDispatch(*args_);
        // For a wait that may come after the next combine has begun.
        KeepWord(args_->dispatch_word, call_, blocks_);
        entries_.Clear();
        for (int64_t i = share.first; i < share.last;) {
            const int64_t rank = RankAt(i, args_->rank, ranks);
            const int64_t alike = rank < shared ? shared : ranks;  // up to here ranks have as many entries each
            const int64_t number = Smaller(alike - rank, share.last - i);
            PostTo({rank, rank + number});
            i += number;
        }
    }

private:
    static constexpr int64_t ENTRIES_PER_CHUNK = 512;
    static constexpr int64_t ENTRIES_PER_COPY = MAX_POLLED_BYTES / STATUS_ENTRY_BYTES;

    __aicore__ inline int64_t LocalExperts() const {
        return static_cast<int64_t>(args_->slots.expert_extent);
    }

    __aicore__ inline int64_t FirstEntryOf(int64_t rank) const {
        const int64_t routed = rank - args_->num_shared_ranks;
        return routed <= 0 ? rank : args_->num_shared_ranks + routed * LocalExperts();
    }

    // Ranks of one kind.
    __aicore__ inline void PostTo(const Share& ranks) {
        const int64_t shared = args_->num_shared_ranks;
        const bool is_shared = ranks.first < shared;
        const int64_t end = FirstEntryOf(ranks.last);
        for (int64_t first = FirstEntryOf(ranks.first); first < end;) {
            const int64_t last = Smaller(first + ENTRIES_PER_CHUNK, end);
            const uint64_t counts = is_shared ? args_->shared_counts : args_->counts;
            counts_.Fetch(counts, is_shared ? first : first - shared, last - first);
            counts_.Begin(0);
            PostEntries(first, last);
            first = last;
        }
    }

    __aicore__ inline void PostEntries(int64_t first, int64_t last) {
        Order<AscendC::HardEvent::MTE3_S>();
        for (int64_t i = 0; i < last - first; ++i) {
            entries_.Set(i, counts_.At(i), call_);
        }
        Order<AscendC::HardEvent::S_MTE3>();
        for (int64_t entry = first; entry < last;) {
            const int64_t routed = entry - args_->num_shared_ranks;
            const int64_t experts = routed < 0 ? 1 : LocalExperts();  // of the receiver
            const int64_t expert = routed < 0 ? 0 : routed % experts;
            const int64_t rank = routed < 0 ? entry : args_->num_shared_ranks + routed / experts;
            const int64_t number = Smaller(Smaller(experts - expert, last - entry), ENTRIES_PER_COPY);
            if (!peers_.IsMasked(rank) && (args_->out_offset == 0 || !peers_.IsQueued(rank))) {
                const uint64_t to = peers_.WindowOf(rank) + EntryAt(*args_, args_->rank, experts);
                entries_.Send(entry - first, to + expert * STATUS_ENTRY_BYTES, number);
            }
            entry += number;
        }
    }

    const Args* args_ = nullptr;
    Blocks blocks_ = Blocks::OfLaunch();
    Peers peers_;
    StatusEntries entries_;
    Table counts_;
    int32_t call_ = 0;
};

}  // namespace moe
