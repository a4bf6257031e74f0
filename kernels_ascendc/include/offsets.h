// Dispatch, between waiting and arranging: from the counts of all entries, where the rows of each end in the output,
// how many rows each expert has, and which slot each row is in. This block has seen all counts, or a SyncAll or an
// earlier launch is before it.
#pragma once

#include "count_sums.h"
#include "source_starts.h"

namespace moe {

// The table of slots: for each row of the output, which slot of the window it is in. A rank that keeps its own rows
// does not send them: such a row is in no slot, and has -1 instead.
//
// Of two sources and two experts, with slots for 4 rows of each: expert 0 has 2 rows from source 0, expert 1 has one
// from either. Then row_slots = {0, 1, 4, 12}: row i of an entry is in slot (source * 2 + expert) * 4 + i.
class RowSlots {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe, const DispatchOffsetsArgs& args) {
        args_ = args;
        rows_ = NewTensor<int32_t>(pipe, ROWS_PER_PIECE);
        steps_ = NewTensor<int32_t>(pipe, ROWS_PER_ADD);
        if (args.by_source != 0) {
            starts_.Init(pipe, args.num_ranks);
            starts_.Clear();
        }
    }

    // Where slots have one number for all experts: the rows for those before the first of these entries, which a
    // source has ahead of them. Any entries that follow one another, from the first one on, one by one or many.
    template <typename Counts>
    __aicore__ inline void AddBefore(const Counts& counts, const Share& entries) {
        if (args_.by_source != 0) {
            starts_.Add(counts, entries);
        }
    }

    // Before the first of some entries.
    __aicore__ inline void Begin(const Share& entries, int64_t source, int64_t expert, int64_t row) {
        entries_ = entries;
        entry_ = entries.first;
        source_ = source;
        expert_ = expert;
        first_row_ = row;
        entry_row_ = row;
    }

    // Writes the rows of these entries. Entry by entry `ends` has the first row behind it, which is at most so many
    // rows behind the one before as a rank can have slots for an expert; the last one is `end`.
    __aicore__ inline void Store(const AscendC::LocalTensor<int32_t>& ends, int64_t end) {
        ends_ = ends;
        for (int64_t first = first_row_; first < end; first += ROWS_PER_PIECE) {
            const Share piece = {first, Smaller(first + ROWS_PER_PIECE, end)};
            if (first > first_row_) {
                Order<AscendC::HardEvent::MTE3_S>();
            }
            Fill(piece);
            Order<AscendC::HardEvent::S_MTE3>();
            Order<AscendC::HardEvent::V_MTE3>();
            AscendC::DataCopyPad(GlobalAt<int32_t>(args_.row_slots)[piece.first], rows_,
                                 ExactWords(piece.last - piece.first));
        }
    }

private:
    static constexpr int64_t ROWS_PER_PIECE = 16 * 1024;
    static constexpr int64_t ROWS_PER_UNIT = UB_ALIGN / sizeof(int32_t);
    static constexpr int64_t ROWS_PER_ADD = 512;
    // From here on a vector instruction is quicker than an access to each row.
    static constexpr int64_t LONG_RUN = 32;
    static constexpr uint64_t NO_SLOT = UINT64_MAX;  // -1 in the table

    __aicore__ inline void Fill(const Share& piece) {
        for (int64_t row = piece.first; row < piece.last;) {
            const int64_t end = ends_.GetValue(entry_ - entries_.first);
            const int64_t last = Smaller(end, piece.last);
            const Share run = {row - piece.first, last - piece.first};
            if (source_ == args_.kept_rank) {
                FillOneByOne(NO_SLOT, 0, run);
            } else {
                FillRun(SlotOf(row - entry_row_), run);
            }
            row = last;
            if (row == end) {
                NextEntry(end);
            }
        }
    }

    // Of a row among those of its entry.
    __aicore__ inline uint64_t SlotOf(int64_t index) const {
        if (args_.by_source == 0) {
            return args_.slots.At(args_.zone, source_, expert_, index);
        }
        return args_.slots.At(args_.zone, source_, 0, starts_.Of(source_) + index);
    }

    // Rows in neighbouring slots, from the one of the first row on. No unit of 32 bytes is written by both pipes.
    __aicore__ inline void FillRun(uint64_t slot, const Share& run) {
        const uint64_t stride = args_.slots.index_stride;
        if (run.last - run.first < LONG_RUN) {
            FillOneByOne(slot, stride, run);
            return;
        }
        MakeSteps();
        const int64_t first = (run.first + ROWS_PER_UNIT - 1) / ROWS_PER_UNIT * ROWS_PER_UNIT;
        const int64_t last = run.last / ROWS_PER_UNIT * ROWS_PER_UNIT;
        FillOneByOne(slot, stride, {run.first, first});
        for (int64_t at = first; at < last; at += ROWS_PER_ADD) {
            AscendC::Adds(rows_[static_cast<uint32_t>(at)], steps_, SlotAfter(slot, at - run.first),
                          static_cast<int32_t>(Smaller(ROWS_PER_ADD, last - at)));
        }
        FillOneByOne(SlotAfter(slot, last - run.first), stride, {last, run.last});
    }

    __aicore__ inline int32_t SlotAfter(uint64_t slot, int64_t rows) const {
        return static_cast<int32_t>(slot + static_cast<uint64_t>(rows) * args_.slots.index_stride);
    }

    __aicore__ inline void FillOneByOne(uint64_t slot, uint64_t stride, const Share& run) {
        // In registers: a write to UB may be to members, for all that a compiler knows.
        const AscendC::LocalTensor<int32_t> rows = rows_;
        const int64_t last = run.last;
        for (int64_t at = run.first; at < last; ++at, slot += stride) {
            rows.SetValue(at, static_cast<int32_t>(slot));
        }
    }

    // How far each of some rows is behind the first one.
    __aicore__ inline void MakeSteps() {
        if (has_steps_) {
            return;
        }
        has_steps_ = true;
        AscendC::CreateVecIndex(steps_, 0, static_cast<uint32_t>(ROWS_PER_ADD));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(steps_, steps_, static_cast<int32_t>(args_.slots.index_stride),
                      static_cast<int32_t>(ROWS_PER_ADD));
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void NextEntry(int64_t row) {
        if (args_.by_source != 0) {
            starts_.AddTo(source_, row - entry_row_);
        }
        entry_row_ = row;
        ++entry_;
        if (++source_ == args_.num_ranks) {
            source_ = 0;
            ++expert_;
        }
    }

    DispatchOffsetsArgs args_;
    SourceStarts starts_;
    AscendC::LocalTensor<int32_t> rows_;
    AscendC::LocalTensor<int32_t> steps_;
    bool has_steps_ = false;
    AscendC::LocalTensor<int32_t> ends_;
    Share entries_ = {0, 0};
    int64_t first_row_ = 0;
    // Where filling goes on.
    int64_t entry_ = 0, entry_row_ = 0, source_ = 0, expert_ = 0;
};

// Entry n = expert * ranks + source. Blocks share the entries, as those of DispatchWait do; each sums the counts before
// its own by vector instructions, and walks its own one by one.
//
// Peers wrote the counts: each is clamped to [0, max_count] and the sums to `capacity`, so that nothing that goes by
// the sums can leave its buffers.
class DispatchOffsets : Kernel<DispatchOffsetsArgs> {
public:
    __aicore__ inline void Init(const DispatchOffsetsArgs& args, AscendC::TPipe* pipe,
                                const Blocks& blocks = Blocks::OfLaunch()) {
        Kernel::Init(args, pipe, blocks);
        if (args_.row_slots != 0) {
            slots_.Init(pipe, args_);
            args_.max_count = Smaller(args_.max_count, static_cast<int64_t>(args_.slots.index_extent));
        }
        counts_.Init(pipe, ENTRIES_PER_CHUNK, args_.max_count);
        ends_ = NewTensor<int32_t>(pipe, ENTRIES_PER_CHUNK);
        tokens_ = NewTensor<int64_t>(pipe, ENTRIES_PER_CHUNK);
        stats_ = NewTensor<int32_t>(pipe, ENTRIES_PER_CHUNK);
    }

    __aicore__ inline void Process() {
        const int64_t total = args_.num_local_experts * args_.num_ranks;
        share_ = blocks_.ShareOf(total);
        if (share_.first == share_.last) {
            return;
        }
        expert_ = share_.first / args_.num_ranks;
        source_ = share_.first % args_.num_ranks;
        for (int64_t first = 0; first < share_.last; first += ENTRIES_PER_CHUNK) {
            const Share chunk = {first, Smaller(first + ENTRIES_PER_CHUNK, share_.last)};
            const Share own = {Larger(chunk.first, share_.first), chunk.last};
            Load(chunk, own);
            AddBefore(chunk);
            if (own.first < own.last) {
                FinishEntries(own);
            }
        }
        if (share_.last == total) {
            StoreTrailer();
        }
    }

private:
    static constexpr int64_t ENTRIES_PER_CHUNK = 2048;

    // Of experts whose last entry is among these.
    __aicore__ inline Share ExpertsOf(const Share& entries) const {
        return {entries.first / args_.num_ranks, entries.last / args_.num_ranks};
    }

    __aicore__ inline void Load(const Share& chunk, const Share& own) {
        // The chunk before has left the buffers.
        Order<AscendC::HardEvent::MTE3_S>();
        Order<AscendC::HardEvent::S_MTE2>();
        counts_.Load(args_.recv_counts, chunk.first, chunk.last - chunk.first);
        if (args_.recv_stats != 0 && own.first < own.last) {
            const Share experts = ExpertsOf(own);
            if (experts.first < experts.last) {
                AscendC::DataCopyPad(stats_, GlobalAt<int32_t>(args_.recv_stats)[experts.first],
                                     ExactWords(experts.last - experts.first), NoPadding<int32_t>());
            }
        }
        Order<AscendC::HardEvent::MTE2_S>();
    }

    // The counts before the share, and before the first expert that has entries in it.
    __aicore__ inline void AddBefore(const Share& chunk) {
        const int64_t before = Smaller(chunk.last, share_.first) - chunk.first;
        if (before <= 0) {
            return;
        }
        const int64_t before_expert = Smaller(chunk.last, share_.first - source_) - chunk.first;
        counts_.Clamp(before);
        if (args_.row_slots != 0) {
            slots_.AddBefore(counts_, {chunk.first, chunk.first + before});
        }
        const int64_t sum = counts_.SumFirst(before);
        row_ = Capped(row_ + sum);
        if (before_expert > 0) {
            expert_row_ = Capped(expert_row_ + (before_expert == before ? sum : counts_.SumFirst(before_expert)));
        }
    }

    __aicore__ inline int64_t Capped(int64_t rows) const {
        return Smaller(rows, args_.capacity);
    }

    __aicore__ inline void FinishEntries(const Share& own) {
        const Share experts = ExpertsOf(own);
        const int64_t first_row = row_;
        slots_.Begin(own, source_, expert_, first_row);
        for (int64_t entry = own.first; entry < own.last;) {
            const int64_t last = Smaller(entry + args_.num_ranks - source_, own.last);
            AddEntries({entry, last}, entry - own.first);
            source_ += last - entry;
            entry = last;
            if (source_ == args_.num_ranks) {
                FinishExpert(expert_ - experts.first);
                source_ = 0;
                ++expert_;
            }
        }
        StoreSums(own, experts);
        if (args_.row_slots != 0) {
            slots_.Store(ends_, row_);
        }
    }

    // Of one expert.
    __aicore__ inline void AddEntries(const Share& entries, int64_t at) {
        const AscendC::LocalTensor<int32_t> ends = ends_;
        int64_t row = row_;
        for (int64_t entry = entries.first; entry < entries.last; ++entry, ++at) {
            row = Capped(row + counts_.ClampedAt(entry));
            ends.SetValue(at, static_cast<int32_t>(row));
        }
        row_ = row;
    }

    __aicore__ inline void FinishExpert(int64_t i) {
        const int64_t rows = row_ - expert_row_;
        tokens_.SetValue(i, args_.cumulative != 0 ? row_ : rows);
        if (args_.recv_stats != 0) {
            stats_.SetValue(i, stats_.GetValue(i) + static_cast<int32_t>(rows));
        }
        expert_row_ = row_;
    }

    __aicore__ inline void StoreSums(const Share& own, const Share& experts) {
        Order<AscendC::HardEvent::S_MTE3>();
        AscendC::DataCopyPad(GlobalAt<int32_t>(args_.recv_offsets)[own.first], ends_, ExactWords(own.last - own.first));
        const int64_t num_experts = experts.last - experts.first;
        if (num_experts == 0) {
            return;
        }
        constexpr int64_t TOKENS_BYTES = sizeof(int64_t);
        AscendC::DataCopyPad(GlobalAt<uint8_t>(args_.tokens_per_expert + experts.first * TOKENS_BYTES),
                             tokens_.template ReinterpretCast<uint8_t>(), ExactBytes(num_experts * TOKENS_BYTES));
        if (args_.recv_stats != 0) {
            AscendC::DataCopyPad(GlobalAt<int32_t>(args_.recv_stats)[experts.first], stats_, ExactWords(num_experts));
        }
    }

    __aicore__ inline void StoreTrailer() {
        const AscendC::LocalTensor<int32_t> words = NewTensor<int32_t>(GetTPipePtr(), TRAILER_WORDS);
        words.SetValue(Trailer::MARK, TRAILER_MARK);
        words.SetValue(Trailer::NUM_ROWS, static_cast<int32_t>(row_));
        Order<AscendC::HardEvent::S_MTE3>();
        AscendC::DataCopyPad(GlobalAt<int32_t>(args_.trailer), words, ExactBytes(TRAILER_BYTES));
    }

    CountSums counts_;
    RowSlots slots_;
    AscendC::LocalTensor<int32_t> ends_;
    AscendC::LocalTensor<int64_t> tokens_;
    AscendC::LocalTensor<int32_t> stats_;
    Share share_ = {0, 0};
    // The next entry, and the rows before it and before the first entry of its expert.
    int64_t expert_ = 0, source_ = 0, row_ = 0, expert_row_ = 0;
};

}  // namespace moe
