// Flags in band of a dispatch's rows: where they are, and zeros in their places.
#pragma once

#include "inband_blocks.h"
#include "row_flags.h"

namespace moe {

// A row is there when each of its blocks is. What goes by stamps elsewhere goes by all blocks' flags here; a row is
// still named by its stamp's address, and a row's flags lie in UB where its stamp would.
template <typename Args>
class InbandRows : public RowFlags<Args> {
public:
    using Base = RowFlags<Args>;

    __aicore__ inline void Init(const Args* args, AscendC::TPipe* pipe, Report* report) {
        Base::Init(args, pipe, report);
        num_blocks_ = NumBlocksOfSlot(args->stamp_offset);
        words_of_row_ = static_cast<uint32_t>(num_blocks_ * FLAG_WORDS);
        stamp_place_ = PlaceInBlocks(args->stamp_offset);
        first_numbers_.Init(pipe, static_cast<uint32_t>(Base::PLACES_PER_CHUNK));
        taken_ = NewTensor<int32_t>(pipe, MAX_NOTED / WORD_BITS);
    }

    __aicore__ inline void Load(const Share& places) {
        Base::Load(places);
        AscendC::Duplicate(taken_, 0, static_cast<int32_t>(MAX_NOTED / WORD_BITS));
        Order<AscendC::HardEvent::V_S>();
        first_numbers_.Begin(places.first);
        int64_t number = 0;
        for (int64_t place = places.first; place < places.last; ++place) {
            first_numbers_.Set(place, static_cast<int32_t>(Smaller(number, MAX_NOTED)));
            number += Base::RowsOf(place);
        }
    }

    // Of an entry's rows from the first of these on, the next ones that have not been taken. Each look costs what it
    // loads: near the end, when the last rows come, it loads little.
    __aicore__ inline Share MissingOf(int64_t place, const Share& rows) const {
        const int64_t number = first_numbers_.At(place);
        const int64_t first = EndOfRun(number, rows.first, rows.last, true);
        return {first, EndOfRun(number, first, rows.last, false)};
    }

    __aicore__ inline void NoteTaken(int64_t place, int64_t row) {
        const int64_t number = first_numbers_.At(place) + row;
        if (number < MAX_NOTED) {
            const uint32_t word = static_cast<uint32_t>(number / WORD_BITS);
            const uint32_t bits = static_cast<uint32_t>(taken_.GetValue(word)) | BitOf(number);
            taken_.SetValue(word, static_cast<int32_t>(bits));
        }
    }

    __aicore__ inline uint64_t StampOf(int64_t place, int64_t row) const {
        return Base::SlotOf(place, row) + stamp_place_;
    }

    __aicore__ inline int64_t MaxRows() const {
        return Larger<int64_t>(1, Base::MAX_STAMPS / num_blocks_);
    }

    // Whole blocks, and with them the stamp.
    __aicore__ inline uint32_t LoadedBytes(int64_t /*row_bytes*/) const {
        return static_cast<uint32_t>(num_blocks_) * BLOCK_DATA_BYTES;
    }

    // Flags only, and data once all of them are there: a copy of both may see old data beside a new flag.
    __aicore__ inline void LoadStamps(uint64_t stamp, int64_t at, int64_t count) {
        const AscendC::DataCopyExtParams gather{static_cast<uint16_t>(num_blocks_), UB_ALIGN, BLOCK_DATA_BYTES, 0, 0};
        for (int64_t i = 0; i < count; ++i) {
            const uint64_t of_row = stamp + static_cast<uint64_t>(i) * Base::args_->slots.index_stride;
            AscendC::DataCopyPad(Base::stamps_.Entries()[static_cast<uint32_t>(at + i) * words_of_row_],
                                 GlobalAt<float>(FirstFlagOf(of_row)), gather, NoPadding<float>());
        }
    }

    // Their words need no padding.
    __aicore__ inline void Prepare(int64_t /*count*/) {}

    // How many blocks of so many rows are there.
    __aicore__ inline int64_t CountSet(int64_t count) {
        const uint32_t words = static_cast<uint32_t>(count) * words_of_row_;
        const int64_t set = Base::stamps_.SumWords(0, words);
        all_set_ = set == static_cast<int64_t>(words);
        return set / static_cast<int64_t>(FLAG_WORDS);
    }

    // Nearly always all of them are, or the vector unit says of each.
    __aicore__ inline bool IsSet(int64_t at) {
        return all_set_ || Base::stamps_.SumWords(static_cast<uint32_t>(at) * words_of_row_, words_of_row_) ==
                               static_cast<int64_t>(words_of_row_);
    }

    __aicore__ inline void LoadRow(const AscendC::LocalTensor<uint8_t>& to, uint64_t stamp, uint32_t /*bytes*/) const {
        const AscendC::DataCopyExtParams gather{static_cast<uint16_t>(num_blocks_), BLOCK_DATA_BYTES, UB_ALIGN, 0, 0};
        AscendC::DataCopyPad(to, GlobalAt<uint8_t>(stamp - stamp_place_), gather, NoPadding<uint8_t>());
    }

    __aicore__ inline AscendC::LocalTensor<uint8_t> OriginOf(const AscendC::LocalTensor<uint8_t>& row,
                                                             int64_t /*at*/) const {
        return row[static_cast<uint32_t>(Base::args_->stamp_offset)];
    }

    // A sum of flags came before, and with it the vector unit's zeros.
    __aicore__ inline void Clear(uint64_t stamp, int64_t count) {
        const AscendC::DataCopyExtParams scatter{static_cast<uint16_t>(num_blocks_), UB_ALIGN, 0, BLOCK_DATA_BYTES, 0};
        for (int64_t i = 0; i < count; ++i) {
            const uint64_t of_row = stamp + static_cast<uint64_t>(i) * Base::args_->slots.index_stride;
            AscendC::DataCopyPad(GlobalAt<int32_t>(FirstFlagOf(of_row)), Base::zeros_, scatter);
        }
    }

private:
    // Rows of a block that it notes to have taken. It looks at the others again, and finds no flags.
    static constexpr int64_t MAX_NOTED = 2048;
    static constexpr int64_t WORD_BITS = 32;

    __aicore__ static inline uint32_t BitOf(int64_t number) {
        return 1U << static_cast<uint32_t>(number % WORD_BITS);
    }

    // The first row from `first` on that has not been taken, or has been, of an entry whose rows have numbers from
    // this one on.
    __aicore__ inline int64_t EndOfRun(int64_t number, int64_t first, int64_t last, bool is_taken) const {
        uint32_t bits = 0;
        for (int64_t row = first; row < last; ++row) {
            const int64_t at = number + row;
            if (at >= MAX_NOTED) {
                return is_taken ? row : last;
            }
            if (row == first || at % WORD_BITS == 0) {
                bits = static_cast<uint32_t>(taken_.GetValue(static_cast<uint32_t>(at / WORD_BITS)));
            }
            if (((bits & BitOf(at)) != 0) != is_taken) {
                return row;
            }
        }
        return last;
    }

    __aicore__ inline uint64_t FirstFlagOf(uint64_t stamp) const {
        return stamp - stamp_place_ + BLOCK_DATA_BYTES;
    }

    Table first_numbers_;
    AscendC::LocalTensor<int32_t> taken_;
    int64_t num_blocks_ = 1;
    uint32_t words_of_row_ = FLAG_WORDS;
    uint64_t stamp_place_ = 0;
    bool all_set_ = false;  // of those that were counted last
};

}  // namespace moe
