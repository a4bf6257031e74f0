// Step 3 by blocks: until the block of each rank is there. FLAG1 says that its counts are; they say where FLAG2 is,
// which says that the rows are, too. Where queues keep no order inside a message, FLAG2 has a place of its own, and
// nothing else is looked at before it.
//
// Counts come from peers: one that is out of bounds names no place, and is reported at once.
#pragma once

#include "block_format.h"
#include "entry_order.h"
#include "silent_ranks.h"
#include "waits.h"

namespace moe {

class BlocksWait : Kernel<BlocksWaitArgs> {
public:
    __aicore__ inline void Init(const BlocksWaitArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        order_.Init(args.num_local_experts, args.num_ranks);
        flag_ = NewTensor<int32_t>(pipe, UNIT_WORDS);
        counts_.Init(pipe, static_cast<uint32_t>(args.header_words));
        units_ = NewTensor<int32_t>(pipe, args.num_local_experts * UNIT_WORDS);
        silent_.Init(args.peers, args.num_ranks, args.changes);
    }

    __aicore__ inline void Process() {
        number_ = RoundNumber(args_);
        // Kept by an earlier phase of this launch, with a SyncAll in between, or by an earlier launch.
        call_ = args_.dispatch_word == 0 ? static_cast<int32_t>(args_.call) : ReadFresh<int32_t>(args_.dispatch_word);
        KeepWord(args_.kept_zone, args_.zone);
        KeepNumber(args_, number_);
        deadline_.Start(report_.IsOld() ? 0 : args_.timeout_us);
        const Share ranks = blocks_.ShareOf(args_.num_ranks);
        for (int64_t rank = ranks.first; rank < ranks.last; ++rank) {
            Receive(rank, ranks.last - rank);
        }
        report_.Write();
    }

private:
    // `left` ranks are waited for, from this one on.
    __aicore__ inline void Receive(int64_t rank, int64_t left) {
        const uint64_t block = BlockIn(args_, args_.window, static_cast<uint64_t>(rank));
        waited_us_ = 0;
        const bool is_there = IsBlockThere(block, rank, left);
        // Of a rank that nothing is awaited from there are no rows.
        const int32_t missing = !is_there && silent_.Has(rank) ? 0 : -1;
        deadline_.TraceWait(rank, waited_us_);
        Order<AscendC::HardEvent::MTE3_S>();
        for (int64_t i = 0; i < args_.num_local_experts; ++i) {
            units_.SetValue(order_.UnitAt(i), is_there ? counts_.At(i) : missing);
        }
        Store(args_.recv_counts, rank);
        if (args_.waited_us != 0) {
            Order<AscendC::HardEvent::MTE3_S>();
            for (int64_t i = 0; i < args_.num_local_experts; ++i) {
                units_.SetValue(order_.UnitAt(i), waited_us_);
            }
            Store(args_.waited_us, rank);
        }
    }

    __aicore__ inline void Store(uint64_t table, int64_t rank) {
        Order<AscendC::HardEvent::S_MTE3>();
        order_.Store(table, units_, {rank * args_.num_local_experts, (rank + 1) * args_.num_local_experts});
    }

    // With its counts, which are in bounds, in `counts_`. False at once of a rank that nothing is awaited from.
    __aicore__ inline bool IsBlockThere(uint64_t block, int64_t rank, int64_t left) {
        if (args_.end_offset != 0) {
            const uint64_t end = block + static_cast<uint64_t>(args_.end_offset);
            return IsFlagThere<true>(end, rank, left) && IsHeaderRight(block, rank);
        }
        const int64_t unit = args_.flag_word / UNIT_WORDS * UNIT_WORDS;
        const uint64_t header = block + static_cast<uint64_t>(unit) * sizeof(int32_t);
        return IsFlagThere<false>(header, rank, left) && IsHeaderRight(block, rank) &&
               IsFlagThere<true>(block + EndOfRows(args_, rows_), rank, left);
    }

    __aicore__ inline bool IsHeaderRight(uint64_t block, int64_t rank) {
        counts_.Fetch(block, 0, args_.header_words);
        if (counts_.At(args_.call_word) != call_) {
            report_.AddMismatch(rank, call_, counts_.At(args_.call_word));
            return false;
        }
        if (counts_.At(args_.flag_word) != number_ || !AreCountsInBounds(rank)) {
            report_.Add(REPORT_BAD_ROW, rank);
            return false;
        }
        return true;
    }

    __aicore__ inline bool AreCountsInBounds(int64_t rank) {
        rows_ = 0;
        for (int64_t i = 0; i < args_.num_local_experts; ++i) {
            const int64_t count = counts_.At(i);
            if (count < 0 || count > args_.max_count) {
                return false;
            }
            rows_ += count;
        }
        return rows_ <= args_.max_rows &&
               (args_.expected_rows == 0 || rows_ == ReadFresh<int32_t>(args_.expected_rows, rank));
    }

    // The unit of FLAG2, or that of FLAG1.
    template <bool IS_END>
    __aicore__ inline bool IsFlagThere(uint64_t at, int64_t rank, int64_t left) {
        for (PollLoop poll(deadline_, args_.window, rank, left); poll.Next();) {
            if (silent_.Look() && silent_.Has(rank)) {
                return false;
            }
            Order<AscendC::HardEvent::S_MTE2>();
            AscendC::DataCopy(flag_, GlobalAt<int32_t>(at), UNIT_WORDS);
            Order<AscendC::HardEvent::MTE2_S>();
            const uint32_t word = static_cast<uint32_t>(args_.flag_word) % UNIT_WORDS;
            if (IS_END ? IsEndFlag() : flag_.GetValue(word) == number_) {
                waited_us_ = Larger(waited_us_, poll.WaitedUs());
                return true;
            }
            poll.Miss(1);
        }
        waited_us_ = deadline_.WaitedUs();
        report_.Add(REPORT_TIMEOUT, rank);
        return false;
    }

    __aicore__ inline bool IsEndFlag() const {
        for (uint32_t i = 0; i < UNIT_WORDS; ++i) {
            if (flag_.GetValue(i) != EndFlagWord(number_, i)) {
                return false;
            }
        }
        return true;
    }

    EntryOrder order_;
    SilentRanks silent_;
    AscendC::LocalTensor<int32_t> flag_;
    Table counts_;
    AscendC::LocalTensor<int32_t> units_;
    Deadline deadline_;
    int32_t number_ = 0;
    int32_t call_ = 0;
    int64_t rows_ = 0;
    int32_t waited_us_ = 0;
};

}  // namespace moe
