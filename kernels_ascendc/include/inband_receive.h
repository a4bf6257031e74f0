// Dispatch with flags in band, steps 3 and 4: waits for each row's blocks, takes the row out of its slot
// to its final place, and clears the flags.
//
// Why two zones are enough although status entries are posted before the rows have landed: rank p ends
// dispatch i only after receiving and clearing every row sent to it (the counts say how many), and posts
// its entries of dispatch i+1 after that. Rank q ends dispatch i+1 only with p's entry, and writes rows of
// dispatch i+2, the next to use i's zone, after that. So whatever q writes for i+2 follows p's last access
// to i's zone, and nothing sent for i can land later: p has seen all of it. What a dispatch does for
// combines (docs/protocol.md, "Which programmes are safe") rests on the entries alone and holds as well. A
// dispatch that timed out or reported rows breaks the argument: the host rebuilds the communicator.
#pragma once

#include "inband_blocks.h"
#include "silent_ranks.h"
#include "waits.h"

namespace moe {

class InbandReceive : Kernel<InbandReceiveArgs> {
public:
    __aicore__ inline void Init(const InbandReceiveArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        num_blocks_ = NumBlocksOfSlot(args.stamp_offset);
        words_ = static_cast<uint32_t>(num_blocks_ * FLAG_WORDS);
        max_rows_ = Larger<int64_t>(1, Smaller<int64_t>(MAX_ROWS, MAX_FLAG_WORDS / words_));
        flags_.Init(pipe, static_cast<uint32_t>(max_rows_ * words_));
        zeros_ = NewTensor<float>(pipe, words_);
        piece_blocks_ = Smaller(NumBlocks(args.row_bytes), MAX_PIECE_BLOCKS);
        pipe->InitBuffer(pieces_, 2, static_cast<uint32_t>(piece_blocks_ * BLOCK_DATA_BYTES));
        const int64_t scale_stride = WholeUnits(args.scale_bytes);
        columns_ = NewTensor<uint8_t>(pipe, MAX_ROWS * (2 * static_cast<int64_t>(UB_ALIGN) + scale_stride));
        offsets_.Init(pipe, ENTRIES_PER_CHUNK + 1);
        if (args.places != 0) {
            places_.Init(pipe, MAX_ROWS);
        }
        waited_.Init(pipe, args.waited_us, ENTRIES_PER_CHUNK);
        silent_.Init(args.peers, args.num_ranks, args.changes);
    }

    __aicore__ inline void Process() {
        AscendC::Duplicate(zeros_, 0.0f, static_cast<int32_t>(words_));
        Order<AscendC::HardEvent::V_MTE3>();
        const Share share = blocks_.ShareOf(args_.num_entries);
        ClearEntries(share);
        deadline_.Start(report_.IsOld() ? 0 : args_.timeout_us);
        for (int64_t first = share.first; first < share.last; first += ENTRIES_PER_CHUNK) {
            ReceiveEntries(first, Smaller(first + ENTRIES_PER_CHUNK, share.last));
        }
        KeepWord(args_.turned, 1 - args_.zone);
        report_.Write();
    }

private:
    static constexpr int64_t ENTRIES_PER_CHUNK = 1024;
    static constexpr int64_t MAX_PIECE_BLOCKS = 96;
    static constexpr int64_t MAX_FLAG_WORDS = 8 * 1024;
    static constexpr int64_t MAX_ROWS = 32;
    static constexpr uint32_t SCALES = 2;  // the column behind origins and weights, the only one of several units

    // Status entries of the launch before, in which every block has seen them. They lie one behind the other, here in
    // the order of the window. A region without any has none to clear.
    __aicore__ inline void ClearEntries(const Share& share) {
        const int64_t most = static_cast<int64_t>(words_ / STATUS_ENTRY_WORDS);
        if (args_.status.source_extent == 0) {
            return;
        }
        const uint64_t entries = args_.window + args_.status.At(args_.zone, 0, 0);
        for (int64_t first = share.first; first < share.last; first += most) {
            const int64_t count = Smaller(most, share.last - first);
            AscendC::DataCopy(GlobalAt<float>(entries)[first * STATUS_ENTRY_WORDS], zeros_,
                              static_cast<uint32_t>(count * STATUS_ENTRY_WORDS));
        }
    }

    __aicore__ inline void ReceiveEntries(int64_t first, int64_t last) {
        const int64_t before = first > 0 ? first - 1 : 0;
        offsets_.Fetch(args_.recv_offsets, before, last - before);
        first_entry_ = first;
        waited_.Load(first, last - first);
        for (int64_t entry = first; entry < last; ++entry) {
            const Share rows = RowsOfEntry(entry);
            for (int64_t row = rows.first; row < rows.last; ++row) {
                AddRow(entry, row, row - rows.first);
            }
        }
        FinishRows();
        waited_.Store(first, last - first);
    }

    // The sums are of counts that peers wrote: they cannot make us read past the slots or write past `out_rows`.
    __aicore__ inline Share RowsOfEntry(int64_t entry) {
        const int64_t first = entry > 0 ? offsets_.At(entry - 1) : 0;
        const int64_t last = offsets_.At(entry);
        if (first < 0 || last < first) {
            report_.Add(REPORT_BAD_ROW, entry);
            return {0, 0};
        }
        const int64_t room = Larger<int64_t>(0, args_.capacity - first);
        const int64_t most = Smaller(room, static_cast<int64_t>(args_.slots.index_extent));
        if (last - first > most) {
            report_.Add(REPORT_BAD_ROW, entry, last - first - most);
        }
        return {first, first + Smaller(last - first, most)};
    }

    // Neighbouring rows are polled and taken out together: a poll costs a round trip, whatever it reads.
    __aicore__ inline void AddRow(int64_t entry, int64_t row, int64_t index) {
        if (num_rows_ == max_rows_ || row != first_row_ + num_rows_) {
            FinishRows();
        }
        if (entry == missing_entry_) {
            return;
        }
        if (num_rows_ == 0) {
            first_row_ = row;
        }
        const uint64_t source = entry % args_.num_ranks;
        const uint64_t expert = entry / args_.num_ranks;
        slots_[num_rows_] = args_.window + args_.slots.At(args_.zone, source, expert, index);
        entries_[num_rows_] = entry;
        ++num_rows_;
    }

    __aicore__ inline void FinishRows() {
        if (num_rows_ > 0 && WaitForRows()) {
            TakeRows(0, num_rows_);
        } else {
            TakeCompleteRows();
        }
        num_rows_ = 0;
    }

    __aicore__ inline bool WaitForRows() {
        seen_rows_ = 0;
        int64_t noted = -1;
        for (PollLoop poll(deadline_, args_.window, first_row_, num_rows_); poll.Next();) {
            silent_.Look();
            const int64_t seen = LookAtRows(0, num_rows_);
            if (waited_.IsWanted() && seen != noted) {
                NoteArrivals(poll.WaitedUs(), seen);
                noted = seen;
            }
            if (seen == num_rows_ * static_cast<int64_t>(words_)) {
                return true;
            }
            poll.Miss((num_rows_ * static_cast<int64_t>(words_) - seen) / static_cast<int64_t>(FLAG_WORDS));
        }
        return false;
    }

    // Flags only, and data once all of them are there: a copy of both may see old data beside a new flag.
    __aicore__ inline int64_t LookAtRows(int64_t first, int64_t count) {
        const AscendC::DataCopyExtParams gather{static_cast<uint16_t>(num_blocks_), UB_ALIGN, BLOCK_DATA_BYTES, 0, 0};
        for (int64_t i = 0; i < count; ++i) {
            AscendC::DataCopyPad(flags_.Entries()[static_cast<uint32_t>(i) * words_],
                                 GlobalAt<float>(slots_[first + i] + BLOCK_DATA_BYTES), gather, NoPadding<float>());
        }
        if (silent_.HasAny()) {
            StandIn(first, count);
        }
        return flags_.SumWords(0, static_cast<uint32_t>(count) * words_);
    }

    // Rows that are not waited for are as if they were there: who finds that ranks were masked meanwhile takes them
    // out.
    __aicore__ inline void StandIn(int64_t first, int64_t count) {
        Order<AscendC::HardEvent::MTE2_V>();
        for (int64_t i = 0; i < count; ++i) {
            if (silent_.Has(entries_[first + i] % args_.num_ranks)) {
                AscendC::Duplicate(flags_.Entries()[static_cast<uint32_t>(i) * words_], 1.0f,
                                   static_cast<int32_t>(words_));
            }
        }
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void NoteArrivals(int32_t us, int64_t seen) {
        // All were there at once, as most often: to find out about each would cost as much as the poll itself.
        if (us == 0 && seen == num_rows_ * static_cast<int64_t>(words_)) {
            return;
        }
        for (int64_t i = 0; i < num_rows_; ++i) {
            const uint32_t bit = 1U << i;
            const uint32_t first_word = static_cast<uint32_t>(i) * words_;
            if ((seen_rows_ & bit) == 0 && flags_.SumWords(first_word, words_) == static_cast<int64_t>(words_)) {
                seen_rows_ |= bit;
                NoteWait(entries_[i], us);
            }
        }
    }

    // After the deadline: an entry with a row missing stays as it is from that row on; others are complete.
    __aicore__ inline void TakeCompleteRows() {
        for (int64_t i = 0; i < num_rows_; ++i) {
            if (entries_[i] == missing_entry_) {
                continue;
            }
            if (LookAtRows(i, 1) == static_cast<int64_t>(words_)) {
                TakeRows(i, 1);
                continue;
            }
            missing_entry_ = entries_[i];
            report_.Add(REPORT_TIMEOUT, missing_entry_);
            NoteWait(missing_entry_, deadline_.WaitedUs());
        }
    }

    __aicore__ inline void NoteWait(int64_t entry, int32_t us) {
        waited_.Raise(entry - first_entry_, us);
        deadline_.TraceWait(entry % args_.num_ranks, us);
    }

    __aicore__ inline void TakeRows(int64_t first, int64_t count) {
        if (args_.places != 0) {
            places_.Fetch(args_.places, first_row_ + first, count);
        }
        for (int64_t i = first; i < first + count; ++i) {
            const int64_t place = PlaceOf(i);
            if (place >= 0) {
                CopyRow(slots_[i], args_.out_rows + static_cast<uint64_t>(place) * args_.row_bytes);
            }
        }
        CopyScalesAndStamps(first, count);
        for (int64_t i = first; i < first + count; ++i) {
            ClearFlags(slots_[i]);
        }
    }

    __aicore__ inline void CopyRow(uint64_t slot, uint64_t to) {
        const int64_t piece_bytes = piece_blocks_ * static_cast<int64_t>(BLOCK_DATA_BYTES);
        for (int64_t done = 0; done < args_.row_bytes; done += piece_bytes) {
            const int64_t bytes = Smaller(piece_bytes, args_.row_bytes - done);
            const AscendC::DataCopyExtParams gather{static_cast<uint16_t>(NumBlocks(bytes)), BLOCK_DATA_BYTES, UB_ALIGN,
                                                    0, 0};
            AscendC::LocalTensor<uint8_t> in = pieces_.AllocTensor<uint8_t>();
            AscendC::DataCopyPad(in, GlobalAt<uint8_t>(slot + PlaceInBlocks(done)), gather, NoPadding<uint8_t>());
            pieces_.EnQue(in);
            AscendC::LocalTensor<uint8_t> out = pieces_.DeQue<uint8_t>();
            AscendC::DataCopyPad(GlobalAt<uint8_t>(to + done), out, ExactBytes(bytes));
            pieces_.FreeTensor(out);
        }
    }

    __aicore__ inline void CopyScalesAndStamps(int64_t first, int64_t count) {
        Order<AscendC::HardEvent::MTE3_MTE2>();
        const int64_t stamp = args_.stamp_offset;
        LoadEach(SCALES, args_.out_scales, args_.scale_offset, args_.scale_bytes, first, count);
        LoadEach(0, args_.out_origins, stamp + Stamp::SOURCE * WORD_BYTES, ORIGIN_BYTES, first, count);
        LoadEach(1, args_.out_weights, stamp + Stamp::WEIGHT * WORD_BYTES, WORD_BYTES, first, count);
        Order<AscendC::HardEvent::MTE2_MTE3>();
        StorePlaced(SCALES, args_.out_scales, static_cast<uint32_t>(args_.scale_bytes), first, count);
        StoreEach(0, args_.out_origins, ORIGIN_BYTES, first, count);
        StorePlaced(1, args_.out_weights, WORD_BYTES, first, count);
    }

    // From each row's slot the bytes from `offset` on, to 32-byte units of their own in UB, as many as they need: a
    // piece out of each block.
    __aicore__ inline void LoadEach(uint32_t column, uint64_t wanted, int64_t offset, int64_t bytes, int64_t first,
                                    int64_t count) {
        constexpr int64_t DATA_BYTES = BLOCK_DATA_BYTES;
        for (int64_t i = 0; wanted != 0 && i < count; ++i) {
            for (int64_t done = 0; done < bytes;) {
                const int64_t at = offset + done;
                const int64_t piece = Smaller(DATA_BYTES - at % DATA_BYTES, bytes - done);
                AscendC::DataCopyPad(Column(column)[static_cast<uint32_t>(i * WholeUnits(bytes) + done)],
                                     GlobalAt<uint8_t>(slots_[first + i] + PlaceInBlocks(at)), ExactBytes(piece),
                                     NoPadding<uint8_t>());
                done += piece;
            }
        }
    }

    __aicore__ inline void StoreEach(uint32_t column, uint64_t to, uint32_t bytes, int64_t first, int64_t count) {
        if (to != 0) {
            const AscendC::DataCopyExtParams pack{static_cast<uint16_t>(count), bytes, 0, 0, 0};
            const uint64_t row = first_row_ + first;
            AscendC::DataCopyPad(GlobalAt<uint8_t>(to + row * bytes), Column(column), pack);
        }
    }

    // Each to its row's place.
    __aicore__ inline void StorePlaced(uint32_t column, uint64_t to, uint32_t bytes, int64_t first, int64_t count) {
        if (args_.places == 0) {
            StoreEach(column, to, bytes, first, count);
            return;
        }
        for (int64_t i = 0; to != 0 && i < count; ++i) {
            const int64_t place = PlaceOf(first + i);
            if (place >= 0) {
                const uint32_t unit = static_cast<uint32_t>(i * WholeUnits(bytes));
                AscendC::DataCopyPad(GlobalAt<uint8_t>(to + static_cast<uint64_t>(place) * bytes), Column(column)[unit],
                                     ExactBytes(bytes));
            }
        }
    }

    // Of one of the rows that are taken now.
    __aicore__ inline int64_t PlaceOf(int64_t i) const {
        return args_.places == 0 ? first_row_ + i : places_.At(first_row_ + i);
    }

    __aicore__ inline AscendC::LocalTensor<uint8_t> Column(uint32_t column) const {
        return columns_[column * MAX_ROWS * UB_ALIGN];
    }

    __aicore__ inline void ClearFlags(uint64_t slot) {
        const AscendC::DataCopyExtParams scatter{static_cast<uint16_t>(num_blocks_), UB_ALIGN, 0, BLOCK_DATA_BYTES, 0};
        AscendC::DataCopyPad(GlobalAt<float>(slot + BLOCK_DATA_BYTES), zeros_, scatter);
    }

    static constexpr int64_t WORD_BYTES = sizeof(int32_t);

    FlagCounter flags_;
    SilentRanks silent_;
    AscendC::LocalTensor<float> zeros_;
    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> pieces_;
    AscendC::LocalTensor<uint8_t> columns_;
    Table offsets_;
    Table places_;
    WaitedTimes waited_;
    Deadline deadline_;
    int64_t num_blocks_ = 0;
    int64_t piece_blocks_ = 1;
    int64_t max_rows_ = 1;
    uint32_t words_ = 0;
    int64_t first_entry_ = 0;
    int64_t missing_entry_ = -1;
    // Rows first_row_, first_row_ + 1, ... whose slots and entries these are.
    int64_t first_row_ = 0;
    int64_t num_rows_ = 0;
    uint64_t slots_[MAX_ROWS];
    int64_t entries_[MAX_ROWS];
    uint32_t seen_rows_ = 0;
};

}  // namespace moe
