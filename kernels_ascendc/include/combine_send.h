// Combine, steps 1 and 2: every result back to its token's slot, its flag right after it; or no flags,
// where the receivers wait for whole ranks and a post_status follows.
#ifndef MOE_COMBINE_SEND_H
#define MOE_COMBINE_SEND_H

#include "row_copy.h"

namespace moe {

class CombineSend {
public:
    __aicore__ inline void Init(const CombineSendArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        FindZone(args_);
        peers_.Init(args.peers, args.num_ranks);
        rows_.Init(pipe, args.row_bytes);
        pipe->InitBuffer(flag_buffer_, STATUS_ENTRY_BYTES);
        flag_ = flag_buffer_.Get<float>();
        kept_.Init(pipe);
        origins_.Init(pipe, ORIGINS_PER_CHUNK * ORIGIN_WORDS);
        report_.Init(pipe, args.report, args_.zone);
    }

    __aicore__ inline void Process() {
        TraceStep(args_.flag_rows != 0 ? TRACE_WRITE_AND_FLAG : TRACE_WRITE);
        kept_.Keep(args_.combine_kind, static_cast<int32_t>(args_.kind));
        AscendC::Duplicate(flag_, 1.0f, static_cast<int32_t>(STATUS_ENTRY_WORDS));
        Order<AscendC::HardEvent::V_MTE3>();
        const Share share = SplitEvenly(NumRows(), AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        for (int64_t first = share.first; first < share.last; first += ORIGINS_PER_CHUNK) {
            const int64_t last = Smaller(first + ORIGINS_PER_CHUNK, share.last);
            LoadOrigins(first, last);
            for (int64_t row = first; row < last; ++row) {
                SendRow(row);
            }
        }
        report_.Write();
    }

private:
    static constexpr int64_t ORIGINS_PER_CHUNK = 512;

    // The prefix sums came from memory that peers write: they cannot make us read past our own rows.
    __aicore__ inline int64_t NumRows() {
        if (args_.num_entries <= 0) {
            return 0;
        }
        const int64_t rows = ReadFresh<int32_t>(args_.recv_offsets, args_.num_entries - 1);
        if (rows >= 0 && rows <= args_.capacity) {
            return rows;
        }
        if (AscendC::GetBlockIdx() == 0) {
            report_.Add(REPORT_BAD_ROW, rows < 0 ? 0 : args_.capacity, rows < 0 ? 1 : rows - args_.capacity);
        }
        return rows < 0 ? 0 : args_.capacity;
    }

    __aicore__ inline void LoadOrigins(int64_t first, int64_t last) {
        Order<AscendC::HardEvent::S_MTE2>();
        origins_.Load(args_.origins, first * ORIGIN_WORDS, (last - first) * ORIGIN_WORDS);
        Order<AscendC::HardEvent::MTE2_S>();
    }

    // A negative word becomes a huge unsigned number, which no extent holds.
    __aicore__ inline uint64_t OriginOf(int64_t row, uint32_t word) const {
        return static_cast<uint64_t>(static_cast<int64_t>(origins_.At(row * ORIGIN_WORDS + word)));
    }

    __aicore__ inline void SendRow(int64_t row) {
        const uint64_t rank = OriginOf(row, Origin::SOURCE);
        const uint64_t token = OriginOf(row, Origin::TOKEN);
        const uint64_t k = OriginOf(row, Origin::K);
        const uint64_t zone = args_.zone;
        const bool is_flagged = args_.flag_rows != 0;
        if (rank >= static_cast<uint64_t>(args_.num_ranks) || !args_.slots.Contains(zone, token, k) ||
            (is_flagged && !args_.status.Contains(zone, token, k))) {
            report_.Add(REPORT_BAD_ROW, row);
            return;
        }
        const uint64_t window = peers_.WindowOf(rank);
        const uint64_t slot = window + args_.slots.At(zone, token, k);
        if (static_cast<int64_t>(rank) != args_.kept_rank) {
            rows_.Copy(args_.rows + row * args_.row_bytes, &slot, 1);
        }
        if (is_flagged) {
            FinishRow();
            RaiseFlags(GlobalAt<float>(window + args_.status.At(zone, token, k)), flag_, STATUS_ENTRY_WORDS, 1);
        }
    }

    // MTE3 starts copies in order and may end them in another: the flag starts when the row has ended.
    __aicore__ inline void FinishRow() {
        AscendC::PipeBarrier<PIPE_MTE3>();
    }

    CombineSendArgs args_;
    Peers peers_;
    RowCopy rows_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> flag_buffer_;
    AscendC::LocalTensor<float> flag_;
    KeptWord kept_;
    Table origins_;
    Report report_;
};

}  // namespace moe

#endif  // MOE_COMBINE_SEND_H
