// Direct dispatch: where this rank's rows begin in their receivers' outputs, from the counts of all ranks.
//
// An output is ordered by entry, then by source. So this rank's rows for entry n, of those that a receiver has, begin
// there at
//     the sum over its entries m < n and all sources s of count[s, m]
//     + the sum over the sources s < rank of count[s, n].
// Of a receiver with two entries, counts {{2, 1}, {3, 0}, {1, 4}} of three sources: rank 1's rows begin at 2
// for the first one, behind source 0's, and at 6 + 1 for the second one.
#pragma once

#include "silent_ranks.h"

namespace moe {

class DirectStarts {
public:
    static constexpr uint32_t SCRATCH_WORDS = 4096;

    __aicore__ inline void Init(const DirectSendArgs* args, AscendC::TPipe* pipe) {
        args_ = args;
        row_words_ = static_cast<int64_t>(args->counts.source_stride / sizeof(int32_t));
        rows_per_chunk_ = Larger<int64_t>(1, SCRATCH_WORDS / row_words_);
        const int64_t words = 2 * row_words_ + Larger<int64_t>(SCRATCH_WORDS, row_words_);
        earlier_ = NewTensor<int32_t>(pipe, words);
        totals_ = earlier_[static_cast<uint32_t>(row_words_)];
        rows_ = totals_[static_cast<uint32_t>(row_words_)];
        silent_.InitKnown(args->peers, args->num_ranks, args->known);
    }

    // Adds up the counts of all sources. They come from other ranks: none counts for more than it may be.
    __aicore__ inline void Sum() {
        AscendC::Duplicate(earlier_, 0, static_cast<int32_t>(2 * row_words_));
        silent_.Look();
        for (int64_t first = 0; first < args_->num_ranks; first += rows_per_chunk_) {
            const int64_t number = Smaller(rows_per_chunk_, args_->num_ranks - first);
            const int64_t own = Smaller(Larger<int64_t>(0, args_->rank - first), number);
            Load(first, number);
            AddRows(earlier_, 0, own);
            AddRows(totals_, own, number);
        }
        AscendC::Add(totals_, totals_, earlier_, static_cast<int32_t>(row_words_));
        Order<AscendC::HardEvent::V_S>();
    }

    // Where this rank's first row for an expert, of all ranks' experts of that rank, or for a shared rank belongs.
    __aicore__ inline int64_t Of(uint64_t rank, uint64_t expert) const {
        const uint64_t shared_ranks = static_cast<uint64_t>(args_->num_shared_ranks);
        if (rank < shared_ranks) {
            return earlier_.GetValue(static_cast<uint32_t>(rank));
        }
        const uint64_t first = shared_ranks + (rank - shared_ranks) * static_cast<uint64_t>(args_->num_local_experts);
        const uint32_t entry = static_cast<uint32_t>(first + expert);
        int32_t before = totals_.GetValue(entry);
        if (before >= 0) {
            SumEntries(static_cast<uint32_t>(first));
            before = totals_.GetValue(entry);
        }
        return earlier_.GetValue(entry) + int64_t{~before};
    }

    // As of the sums.
    __aicore__ inline const SilentRanks& Silent() const {
        return silent_;
    }

    // Room for others once `Sum` has ended: no pipe uses it any more.
    __aicore__ inline const AscendC::LocalTensor<int32_t>& Scratch() const {
        return rows_;
    }

private:
    // Rows of sources, a zone's lie one after the other.
    __aicore__ inline void Load(int64_t first, int64_t number) {
        const int32_t words = static_cast<int32_t>(number * row_words_);
        const uint64_t at = args_->counts.At(args_->zone, first, 0);
        Order<AscendC::HardEvent::V_MTE2>();
        AscendC::DataCopy(rows_, GlobalAt<int32_t>(args_->window + at), static_cast<uint32_t>(words));
        Order<AscendC::HardEvent::MTE2_V>();
        // What stands there for a rank that nothing is awaited from is of an earlier call, or comes too late.
        for (int64_t source = first; silent_.HasAny() && source < first + number; ++source) {
            if (silent_.Has(source)) {
                AscendC::Duplicate(rows_[static_cast<uint32_t>((source - first) * row_words_)], 0,
                                   static_cast<int32_t>(row_words_));
                AscendC::PipeBarrier<PIPE_V>();
            }
        }
        AscendC::Maxs(rows_, rows_, 0, words);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mins(rows_, rows_, static_cast<int32_t>(args_->max_count), words);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Halves of them to each other until one is left.
    __aicore__ inline void AddRows(const AscendC::LocalTensor<int32_t>& sums, int64_t first, int64_t end) {
        if (first == end) {
            return;
        }
        const AscendC::LocalTensor<int32_t> row = rows_[static_cast<uint32_t>(first * row_words_)];
        for (int64_t left = end - first; left > 1;) {
            const int64_t half = left / 2;
            left -= half;
            AscendC::Add(row, row, row[static_cast<uint32_t>(left * row_words_)],
                         static_cast<int32_t>(half * row_words_));
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Add(sums, sums, row, static_cast<int32_t>(row_words_));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // The rows of a receiver before each of its entries take the place of those of the entry, as complements: they are
    // negative, so that each receiver's are summed up once, when they are first asked for.
    __aicore__ inline void SumEntries(uint32_t first) const {
        const uint32_t end = first + static_cast<uint32_t>(args_->num_local_experts);
        int32_t before = 0;
        for (uint32_t entry = first; entry < end; ++entry) {
            const int32_t total = totals_.GetValue(entry);
            totals_.SetValue(entry, ~before);
            before += total;
        }
    }

    const DirectSendArgs* args_ = nullptr;
    SilentRanks silent_;
    AscendC::LocalTensor<int32_t> earlier_;  // of each entry, the rows of the sources before this one
    AscendC::LocalTensor<int32_t> totals_;   // of each entry, the rows of all sources, or see SumEntries
    AscendC::LocalTensor<int32_t> rows_;
    int64_t row_words_ = 0;
    int64_t rows_per_chunk_ = 1;
};

}  // namespace moe
