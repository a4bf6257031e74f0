// Dispatch, steps 3 and 4 on blocks that do nothing else while others send: takes each row out of its slot to its final
// place as soon as its own flag is there, and clears the flag.
//
// No launch comes behind that could clear the status entries and turn the zone. One block does it when all blocks have
// begun: then each of them has seen all entries, or has none to see, and knows the zone. Two zones are enough for the
// reasons that inband_receive.h gives.
#pragma once

#include "begun_blocks.h"
#include "count_sums.h"
#include "inband_rows.h"
#include "row_flags.h"

namespace moe {

// Flags: where a row's flags are (row_flags.h, inband_rows.h).
template <typename Args, typename Flags>
class ReceiveRows : Kernel<Args> {
public:
    __aicore__ inline void Init(const Args& args, AscendC::TPipe* pipe, const Blocks& blocks = Blocks::OfLaunch()) {
        Kernel<Args>::Init(args, pipe, blocks);
        flags_.Init(&args_, pipe, &report_);
        order_.Init(args.num_local_experts, args.num_ranks);
        sums_.Init(pipe, MAX_ENTRIES, args.max_count);
        rows_.Init(pipe, MAX_ENTRIES);
        left_.Init(pipe, MAX_ENTRIES);
        const bool has_scales = args.out_scales != 0;
        loaded_bytes_ = flags_.LoadedBytes(has_scales ? args.scale_offset + args.scale_bytes : args.row_bytes);
        max_rows_ = flags_.MaxRows();
        is_scale_stamped_ = has_scales && args.scale_offset > args.stamp_offset;
        scale_at_ = is_scale_stamped_ ? loaded_bytes_ + UB_ALIGN : static_cast<uint32_t>(args.scale_offset);
        pipe->InitBuffer(slots_, 2, loaded_bytes_ + 2 * UB_ALIGN);
        begun_.Init(pipe, args.begun);
        if (blocks_.index == 0) {
            begun_.InitWait(pipe);
        }
    }

    __aicore__ inline void Process() {
        const Share places = flags_.Begin(blocks_);
        FinishEntries();
        if (places.first == places.last) {
            return;
        }
        flags_.Load(places);
        FindRows(places);
        deadline_.Start(report_.IsOld() ? 0 : args_.timeout_us);
        Receive(places);
        flags_.Store();
        report_.Write();
    }

    // Instead of `Process`, after entries have not come.
    __aicore__ inline void LeaveOut() {
        flags_.Begin(blocks_);
        FinishEntries();
    }

private:
    static constexpr int64_t MAX_ENTRIES = Flags::PLACES_PER_CHUNK;
    static constexpr int64_t MAX_PIECES = 64;
    static constexpr uint64_t WORD_BYTES = sizeof(int32_t);

    // Neighbouring slots of one entry, whose stamps are polled together with those of other pieces: a poll costs a
    // round trip, whatever it reads.
    struct Piece {
        int64_t place;
        int64_t row;  // the first
        int64_t first;  // of its stamps in UB
        int64_t count;
    };

    __aicore__ inline void FinishEntries() {
        begun_.Raise();
        if (blocks_.index == 0 && begun_.Wait(args_.timeout_us, args_.window)) {
            flags_.ClearEntries(args_.window + args_.status.At(args_.zone, 0, 0));
            KeepWord(args_.turned, 1 - args_.zone, blocks_);
        }
    }

    // For each place the row of the output that its first row goes to. Peers wrote the counts: no row is behind the
    // last one that there is room for.
    __aicore__ inline void FindRows(const Share& places) {
        const int64_t total = args_.num_local_experts * args_.num_ranks;
        Order<AscendC::HardEvent::S_MTE2>();
        sums_.Load(args_.all_counts, 0, total);
        Order<AscendC::HardEvent::MTE2_S>();
        sums_.Clamp(total);
        rows_.Begin(places.first);
        left_.Begin(places.first);
        for (int64_t place = places.first; place < places.last; ++place) {
            const int64_t before = order_.NumberAt(place);
            const int64_t row = before == 0 ? 0 : Smaller(sums_.SumFirst(before), args_.capacity);
            const int64_t count = flags_.CheckedRowsOf(place);
            const int64_t room = args_.capacity - row;
            if (count > room) {
                report_.Add(REPORT_BAD_ROW, before, count - room);
            }
            rows_.Set(place, static_cast<int32_t>(row));
            left_.Set(place, static_cast<int32_t>(Smaller(count, room)));
        }
    }

    __aicore__ inline void Receive(const Share& places) {
        for (PollLoop poll(deadline_, args_.window, places.first); poll.Next();) {
            const int64_t missing = TakeWhatIsThere(places, poll.WaitedUs());
            if (missing == 0 || LeaveOutSilent(places) == missing) {
                return;
            }
            poll.AwaitFrom(first_missing_, 1);
            poll.Miss(missing);
        }
        for (int64_t place = places.first; place < places.last; ++place) {
            if (left_.At(place) > 0) {
                flags_.GiveUp(place, deadline_);
            }
        }
    }

    // Behind a look that has found rows missing: those that nothing is awaited from are missing no more. Returns how
    // many these are.
    __aicore__ inline int64_t LeaveOutSilent(const Share& places) {
        int64_t rows = 0;
        for (int64_t place = places.first; flags_.HasSilent() && place < places.last; ++place) {
            if (flags_.IsSilent(place)) {
                rows += left_.At(place);
                left_.Set(place, 0);
            }
        }
        return rows;
    }

    // Returns how many rows are still missing.
    __aicore__ inline int64_t TakeWhatIsThere(const Share& places, int32_t us) {
        for (int64_t place = places.first; place < places.last; ++place) {
            if (left_.At(place) > 0) {
                AddStamps(place, us);
            }
        }
        TakeRows(us);
        int64_t missing = 0;
        for (int64_t place = places.last - 1; place >= places.first; --place) {
            const int64_t left = left_.At(place);
            missing += left;
            first_missing_ = left > 0 ? place : first_missing_;
        }
        return missing;
    }

    // Those of an entry's rows, of all of them where that costs no more: the flags of rows that have been taken are
    // zero.
    __aicore__ inline void AddStamps(int64_t place, int32_t us) {
        const int64_t count = Smaller(flags_.RowsOf(place), args_.capacity - rows_.At(place));
        for (Share rows = flags_.MissingOf(place, {0, count}); rows.first < rows.last;) {
            if (num_pieces_ == MAX_PIECES || num_stamps_ == max_rows_) {
                TakeRows(us);
            }
            const int64_t more = Smaller(rows.last - rows.first, max_rows_ - num_stamps_);
            pieces_[num_pieces_++] = {place, rows.first, num_stamps_, more};
            num_stamps_ += more;
            rows.first += more;
            if (rows.first == rows.last) {
                rows = flags_.MissingOf(place, {rows.last, count});
            }
        }
    }

    __aicore__ inline void TakeRows(int32_t us) {
        if (num_pieces_ == 0) {
            return;
        }
        // Origins have left for their table, and flags are cleared.
        Order<AscendC::HardEvent::MTE3_V>();
        Order<AscendC::HardEvent::MTE3_MTE2>();
        Order<AscendC::HardEvent::S_MTE2>();
        flags_.Prepare(num_stamps_);
        for (int64_t i = 0; i < num_pieces_; ++i) {
            const Piece& piece = pieces_[i];
            flags_.LoadStamps(flags_.StampOf(piece.place, piece.row), piece.first, piece.count);
        }
        flags_.LookForSilent();  // while they come
        if (flags_.CountSet(num_stamps_) > 0) {
            for (int64_t i = 0; i < num_pieces_; ++i) {
                TakeRowsOf(pieces_[i], us);
            }
        }
        num_pieces_ = 0;
        num_stamps_ = 0;
    }

    __aicore__ inline void TakeRowsOf(const Piece& piece, int32_t us) {
        int32_t left = left_.At(piece.place);
        const int32_t before = left;
        for (int64_t i = 0; i < piece.count && left > 0; ++i) {
            if (flags_.IsSet(piece.first + i)) {
                TakeRow(piece.place, piece.row + i, piece.first + i);
                --left;
            }
        }
        left_.Set(piece.place, left);
        if (left == 0 && before > 0 && us > 0 && flags_.IsTimed()) {
            flags_.NoteWait(piece.place, deadline_, us);
        }
    }

    // Row and scales come in one copy. What leaves for a table begins a unit of UB: the origin does, a weight and a
    // scale in the stamp get one of their own.
    __aicore__ inline void TakeRow(int64_t place, int64_t i, int64_t stamp_at) {
        const uint64_t stamp = flags_.StampOf(place, i);
        const uint64_t row = static_cast<uint64_t>(rows_.At(place) + i);
        AscendC::LocalTensor<uint8_t> in = slots_.AllocTensor<uint8_t>();
        flags_.LoadRow(in, stamp, loaded_bytes_);
        if (args_.out_weights != 0) {
            LoadWord(in[loaded_bytes_], stamp + Stamp::WEIGHT * WORD_BYTES);
        }
        if (is_scale_stamped_) {
            LoadWord(in[scale_at_], stamp + Stamp::SCALE * WORD_BYTES);
        }
        slots_.EnQue(in);
        AscendC::LocalTensor<uint8_t> out = slots_.DeQue<uint8_t>();
        Store(args_.out_rows, row, args_.row_bytes, out);
        Store(args_.out_scales, row, args_.scale_bytes, out[scale_at_]);
        Store(args_.out_weights, row, WORD_BYTES, out[loaded_bytes_]);
        Store(args_.out_origins, row, ORIGIN_BYTES, flags_.OriginOf(out, stamp_at));
        slots_.FreeTensor(out);
        flags_.Clear(stamp, 1);
        flags_.NoteTaken(place, i);
    }

    __aicore__ inline void LoadWord(const AscendC::LocalTensor<uint8_t>& to, uint64_t from) const {
        AscendC::DataCopyPad(to, GlobalAt<uint8_t>(from), ExactBytes(WORD_BYTES), NoPadding<uint8_t>());
    }

    __aicore__ inline void Store(uint64_t table, uint64_t row, int64_t bytes,
                                 const AscendC::LocalTensor<uint8_t>& from) const {
        if (table != 0) {
            const uint64_t at = table + row * static_cast<uint64_t>(bytes);
            AscendC::DataCopyPad(GlobalAt<uint8_t>(at), from, ExactBytes(bytes));
        }
    }

    using Kernel<Args>::args_;
    using Kernel<Args>::report_;
    using Kernel<Args>::blocks_;

    Flags flags_;
    EntryOrder order_;
    CountSums sums_;
    Table rows_;
    Table left_;  // of the rows of each place, those that have not been taken
    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> slots_;
    BegunBlocks begun_;
    Deadline deadline_;
    uint32_t loaded_bytes_ = 0;  // in a slot's buffer; a weight is behind them
    uint32_t scale_at_ = 0;  // where its scales are there
    bool is_scale_stamped_ = false;
    int64_t max_rows_ = 1;
    Piece pieces_[MAX_PIECES];
    int64_t num_pieces_ = 0;
    int64_t num_stamps_ = 0;
    int64_t first_missing_ = 0;
};

class DispatchReceive : public ReceiveRows<DispatchReceiveArgs, RowFlags<DispatchReceiveArgs>> {};
class InbandCollect : public ReceiveRows<InbandCollectArgs, InbandRows<InbandCollectArgs>> {};

}  // namespace moe
