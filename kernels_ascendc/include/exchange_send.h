// Consecutive rows, with their scales, to one peer's slots, and a header of words that go along. No flags:
// a post_status follows.
#pragma once

#include "row_copy.h"

namespace moe {

class ExchangeSend : Kernel<ExchangeSendArgs> {
public:
    __aicore__ inline void Init(const ExchangeSendArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        window_ = ReadFresh<uint64_t>(args.peers, args.peer);
        rows_.Init(pipe, args.row_bytes);
        scale_stride_ = WholeUnits(Larger<int64_t>(1, args.scale_bytes));
        rows_per_chunk_ = Larger<int64_t>(1, SCALES_PER_CHUNK_BYTES / scale_stride_);
        scales_ = NewTensor<uint8_t>(pipe, rows_per_chunk_ * scale_stride_).ReinterpretCast<float>();
        pipe->InitBuffer(words_, 2, static_cast<uint32_t>(WORDS_PER_PIECE * sizeof(int32_t)));
    }

    __aicore__ inline void Process() {
        if (AscendC::GetBlockIdx() == 0 && args_.header != 0) {
            SendHeader();
        }
        const Share rows = RowsToSend();
        const Share share = blocks_.ShareOf(rows.last - rows.first);
        for (int64_t first = share.first; first < share.last; first += rows_per_chunk_) {
            SendRows(rows.first, first, Smaller(first + rows_per_chunk_, share.last));
        }
        report_.Write();
    }

private:
    static constexpr int64_t SCALES_PER_CHUNK_BYTES = 16 * 1024;
    static constexpr int64_t WORDS_PER_PIECE = 1024;

    // Both numbers depend on what peers sent: they cannot make us read past our rows or write past the slots.
    __aicore__ inline Share RowsToSend() {
        const int64_t first = args_.first_row == 0 ? 0 : ReadFresh<int32_t>(args_.first_row);
        const int64_t number = ReadFresh<int32_t>(args_.num_rows);
        if (first < 0 || first > args_.capacity || number < 0) {
            ReportBadRows(0, 1);
            return {0, 0};
        }
        const int64_t most = Smaller(args_.capacity - first, static_cast<int64_t>(args_.slots.index_extent));
        if (number > most) {
            ReportBadRows(most, number - most);
        }
        return {first, first + Smaller(number, most)};
    }

    __aicore__ inline void ReportBadRows(int64_t index, int64_t number) {
        if (AscendC::GetBlockIdx() == 0) {
            report_.Add(REPORT_BAD_ROW, index, number);
        }
    }

    // The rows for slots [first, last); `first_row` is the row for slot 0.
    __aicore__ inline void SendRows(int64_t first_row, int64_t first, int64_t last) {
        if (args_.scales != 0) {
            LoadScales(first_row + first, last - first);
        }
        for (int64_t i = first; i < last; ++i) {
            const uint64_t slot = window_ + args_.slots.At(args_.zone, i);
            rows_.Copy(args_.rows + (first_row + i) * args_.row_bytes, &slot, 1);
            if (args_.scales != 0) {
                const int64_t words = scale_stride_ / static_cast<int64_t>(sizeof(float));
                AscendC::DataCopy(GlobalAt<float>(slot + args_.scale_offset), scales_[(i - first) * words],
                                  static_cast<uint32_t>(words));
            }
        }
    }

    // Every row's scales to 32-byte units of their own, as they lie in a slot.
    __aicore__ inline void LoadScales(int64_t row, int64_t count) {
        const uint32_t bytes = static_cast<uint32_t>(args_.scale_bytes);
        const AscendC::DataCopyExtParams each{static_cast<uint16_t>(count), bytes, 0, 0, 0};
        Order<AscendC::HardEvent::MTE3_MTE2>();
        AscendC::DataCopyPad(scales_, GlobalAt<float>(args_.scales + row * bytes), each, NoPadding<float>());
        Order<AscendC::HardEvent::MTE2_MTE3>();
    }

    __aicore__ inline void SendHeader() {
        const uint64_t zone = args_.zone;
        for (int64_t word = 0; word < args_.header_words; word += WORDS_PER_PIECE) {
            const uint64_t at = word;
            const AscendC::DataCopyExtParams bytes = ExactWords(Smaller(WORDS_PER_PIECE, args_.header_words - word));
            AscendC::LocalTensor<int32_t> in = words_.AllocTensor<int32_t>();
            AscendC::DataCopyPad(in, GlobalAt<int32_t>(args_.header)[at], bytes, NoPadding<int32_t>());
            words_.EnQue(in);
            AscendC::LocalTensor<int32_t> out = words_.DeQue<int32_t>();
            AscendC::DataCopyPad(GlobalAt<int32_t>(window_ + args_.headers.At(zone, at)), out, bytes);
            words_.FreeTensor(out);
        }
    }

    RowCopy rows_;
    AscendC::LocalTensor<float> scales_;
    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> words_;
    uint64_t window_ = 0;
    int64_t scale_stride_ = 0;
    int64_t rows_per_chunk_ = 1;
};

}  // namespace moe
