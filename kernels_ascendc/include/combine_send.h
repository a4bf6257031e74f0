// Combine, steps 1 and 2: each expert output back to its token's slot, its flag right behind it.
//
// Row and flag go through the same pipe of the same core, but a pipe may finish a later copy first:
// hence PipeBarrier<PIPE_MTE3> between the two.
#ifndef MOE_COMBINE_SEND_H
#define MOE_COMBINE_SEND_H

#include "platform.h"

namespace moe {

class CombineSend {
public:
    __aicore__ inline explicit CombineSend(const CombineSendArgs& args)
        : args_(args),
          rows_(Global<uint8_t>(args.rows)),
          triples_(Global<int32_t>(args.triples)),
          peers_(Global<uint64_t>(args.peers)),
          report_(args.report) {
        pipe_.InitBuffer(row_queue_, 2, static_cast<uint32_t>(args.row_bytes));
        pipe_.InitBuffer(flag_, STATUS_ENTRY_BYTES);
        pipe_.InitBuffer(triple_buffer_, ROWS_AT_ONCE * TRIPLE_WORDS * sizeof(int32_t));
    }

    __aicore__ inline void Process() {
        AscendC::Duplicate(flag_.Get<float>(), 1.0f, static_cast<int32_t>(WORDS_PER_ENTRY));
        Synchronize<HardEvent::V_MTE3>();
        const Range range = Share(NumRows(), static_cast<uint64_t>(AscendC::GetBlockIdx()),
                                  static_cast<uint64_t>(AscendC::GetBlockNum()));
        for (uint64_t first = range.begin; first < range.end; first += ROWS_AT_ONCE) {
            const uint64_t last = first + ROWS_AT_ONCE < range.end ? first + ROWS_AT_ONCE : range.end;
            LoadTriples(first, last - first);
            for (uint64_t row = first; row < last; ++row) {
                SendRow(row, static_cast<uint32_t>((row - first) * TRIPLE_WORDS));
            }
        }
    }

private:
    static constexpr uint32_t TRIPLE_WORDS = 3;
    static constexpr uint32_t ROWS_AT_ONCE = 256;

    // As many as dispatch delivered, but never beyond what there is.
    __aicore__ inline uint64_t NumRows() const {
        const int32_t total = Global<int32_t>(args_.recv_offsets).GetValue(static_cast<uint64_t>(args_.num_entries) - 1);
        if (total < 0 || total > args_.capacity) {
            return 0;
        }
        return static_cast<uint64_t>(total);
    }

    __aicore__ inline void LoadTriples(uint64_t first, uint64_t count) {
        AscendC::DataCopyPad(triple_buffer_.Get<int32_t>(), triples_[first * TRIPLE_WORDS],
                             {1, static_cast<uint32_t>(count * TRIPLE_WORDS * sizeof(int32_t)), 0, 0, 0},
                             {false, 0, 0, 0});
        Synchronize<HardEvent::MTE2_S>();
    }

    __aicore__ inline void SendRow(uint64_t row, uint32_t triple_at) {
        const LocalTensor<int32_t> triples = triple_buffer_.Get<int32_t>();
        // Negative numbers become huge ones, which lie in no extent.
        const auto rank = static_cast<uint64_t>(static_cast<int64_t>(triples.GetValue(triple_at)));
        const auto token = static_cast<uint64_t>(static_cast<int64_t>(triples.GetValue(triple_at + 1)));
        const auto k = static_cast<uint64_t>(static_cast<int64_t>(triples.GetValue(triple_at + 2)));
        const auto zone = static_cast<uint64_t>(args_.zone);
        if (rank >= static_cast<uint64_t>(args_.num_ranks) || !args_.slots.Contains(zone, token, k)) {
            report_.Write(REPORT_BAD_ROW, row, 1);
            return;
        }
        const auto row_bytes = static_cast<uint32_t>(args_.row_bytes);
        const uint64_t peer = peers_.GetValue(rank);
        LocalTensor<uint8_t> buffer = row_queue_.AllocTensor<uint8_t>();
        AscendC::DataCopy(buffer, rows_[row * row_bytes], row_bytes);
        row_queue_.EnQue(buffer);
        buffer = row_queue_.DeQue<uint8_t>();
        AscendC::DataCopy(Global<uint8_t>(peer + args_.slots.At(zone, token, k)), buffer, row_bytes);
        row_queue_.FreeTensor(buffer);
        AscendC::PipeBarrier<PIPE_MTE3>();
        AscendC::DataCopy(Global<float>(peer + args_.status.At(zone, token, k)), flag_.Get<float>(), WORDS_PER_ENTRY);
    }

    const CombineSendArgs args_;
    GlobalTensor<uint8_t> rows_;
    GlobalTensor<int32_t> triples_;
    GlobalTensor<uint64_t> peers_;
    Report report_;
    AscendC::TPipe pipe_;
    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> row_queue_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> flag_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> triple_buffer_;
};

}  // namespace moe

#endif  // MOE_COMBINE_SEND_H
