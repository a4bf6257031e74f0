// Status entries {1.0f, count, call word, 0...}: made in UB, written to the ranks that wait for them.
#ifndef MOE_STATUS_ENTRIES_H
#define MOE_STATUS_ENTRIES_H

#include "flags.h"

namespace moe {

class StatusEntries {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe, int64_t max_entries) {
        max_entries_ = max_entries;
        pipe->InitBuffer(buffer_, static_cast<uint32_t>(max_entries * STATUS_ENTRY_BYTES));
        entries_ = buffer_.Get<int32_t>();
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

    __aicore__ inline void Send(int64_t i, uint64_t address) {
        RaiseFlags(GlobalAt<int32_t>(address), entries_[WordOf(i)], STATUS_ENTRY_WORDS, 1);
    }

private:
    __aicore__ inline uint32_t WordOf(int64_t i) const {
        return static_cast<uint32_t>(i * STATUS_ENTRY_WORDS);
    }

    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
    AscendC::LocalTensor<int32_t> entries_;
    int64_t max_entries_ = 0;
};

// The word that a dispatch posts: its call word and the kind of the combine before it. It is kept for the wait, which
// may come after the next combine has begun.
template <typename Args>
__aicore__ inline int32_t WordOfDispatch(const Args& args, KeptWord& kept) {
    const int32_t before = args.combine_kind == 0 ? 0 : ReadFresh<int32_t>(args.combine_kind);
    const int32_t word = static_cast<int32_t>(args.call) | before;
    kept.Keep(args.dispatch_word, word);
    return word;
}

// A dispatch's entries: one per shared rank, then one per routed expert; also for counts of 0, since every rank waits
// for an entry from every rank.
template <typename Args>
class DispatchStatusPost {
public:
    __aicore__ inline void Init(const Args* args, AscendC::TPipe* pipe) {
        args_ = args;
        peers_.Init(args->peers, static_cast<int64_t>(args->status.source_extent));
        entries_.Init(pipe, ENTRIES_PER_CHUNK);
        kept_.Init(pipe);
        counts_.Init(pipe, ENTRIES_PER_CHUNK);
    }

    // Each block its share.
    __aicore__ inline void Post() {
        TraceStep(TRACE_FLAG);
        const int64_t shared = args_->num_shared_ranks;
        const Share share = SplitEvenly(shared + args_->num_experts, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        call_ = WordOfDispatch(*args_, kept_);
        entries_.Clear();
        for (int64_t first = share.first; first < share.last;) {
            const int64_t end = first < shared ? Smaller(shared, share.last) : share.last;
            const int64_t last = Smaller(first + ENTRIES_PER_CHUNK, end);
            if (first < shared) {
                LoadCounts(args_->shared_counts, first, last - first);
            } else {
                LoadCounts(args_->counts, first - shared, last - first);
            }
            PostEntries(first, last);
            first = last;
        }
    }

private:
    static constexpr int64_t ENTRIES_PER_CHUNK = 512;

    __aicore__ inline void LoadCounts(uint64_t table, int64_t first, int64_t count) {
        first_count_ = first;
        Order<AscendC::HardEvent::S_MTE2>();
        counts_.Load(table, first, count);
        Order<AscendC::HardEvent::MTE2_S>();
    }

    __aicore__ inline void PostEntries(int64_t first, int64_t last) {
        Order<AscendC::HardEvent::MTE3_S>();
        for (int64_t i = 0; i < last - first; ++i) {
            entries_.Set(i, counts_.At(first_count_ + i), call_);
        }
        Order<AscendC::HardEvent::S_MTE3>();
        for (int64_t i = 0; i < last - first; ++i) {
            entries_.Send(i, EntryAddress(first + i));
        }
    }

    __aicore__ inline uint64_t EntryAddress(int64_t entry) const {
        const int64_t local_experts = static_cast<int64_t>(args_->slots.expert_extent);
        const int64_t routed = entry - args_->num_shared_ranks;
        const int64_t rank = routed < 0 ? entry : args_->num_shared_ranks + routed / local_experts;
        const int64_t expert = routed < 0 ? 0 : routed % local_experts;
        return peers_.WindowOf(rank) + args_->status.At(args_->zone, expert, args_->rank);
    }

    const Args* args_ = nullptr;
    Peers peers_;
    StatusEntries entries_;
    KeptWord kept_;
    Table counts_;
    int64_t first_count_ = 0;
    int32_t call_ = 0;
};

}  // namespace moe

#endif  // MOE_STATUS_ENTRIES_H
