// Dispatch, steps 1 and 2: each row, with a stamp, to every place that it goes to. In a slot of its own the stamp is
// the row's flag as well.
#pragma once

#include "row_copy.h"
#include "send_plan.h"

namespace moe {

template <typename Args>
class SendRows {
public:
    __aicore__ inline void Init(const Args* args, AscendC::TPipe* pipe, Report* report, const Blocks& blocks,
                                const Destination<Args>& to = {}) {
        rows_.Init(pipe, args->row_bytes);
        if constexpr (Destination<Args>::HAS_SCALES) {
            scale_offset_ = args->scale_offset;
            scale_bytes_ = args->scale_bytes;
            if (scale_bytes_ > 0) {
                scales_.Init(pipe, scale_bytes_);
            }
        }
        stamps_ = NewTensor<int32_t>(pipe, int64_t{2} * MAX_VISIT * STAMP_WORDS);
        double_buffer_.Init(pipe);
        plan_.Init(args, pipe, report, blocks, to);
    }

    __aicore__ inline void Process() {
        Begin();
        SendAll();
        Finish();
    }

    __aicore__ inline void Begin() {
        AscendC::Duplicate(stamps_, 0, static_cast<int32_t>(2 * MAX_VISIT * STAMP_WORDS));
        Order<AscendC::HardEvent::V_S>();
    }

    // This block's share, or what of it has its turn.
    __aicore__ inline void SendAll() {
        TraceStep(IS_FLAGGED ? TRACE_WRITE_AND_FLAG : TRACE_WRITE);
        plan_.BeginShare();
        Visit visit;
        while (plan_.Next(visit)) {
            SendRow(visit);
        }
    }

    __aicore__ inline void Finish() {
        double_buffer_.Finish();
    }

private:
    static constexpr bool IS_FLAGGED = Destination<Args>::HAS_FLAGS;

    __aicore__ inline void SendRow(const Visit& visit) {
        const AscendC::LocalTensor<int32_t> stamps = stamps_[double_buffer_.Take() * MAX_VISIT * STAMP_WORDS];
        for (uint32_t i = 0; i < visit.num_slots; ++i) {
            plan_.WriteStamp(stamps[i * STAMP_WORDS], visit, i);
            if constexpr (IS_FLAGGED) {
                stamps.SetValue(i * STAMP_WORDS + Stamp::FLAG, FLAG_BITS);
            }
        }
        Order<AscendC::HardEvent::S_MTE3>();
        rows_.Copy(visit.row, visit.slots, visit.num_slots);
        if (scale_bytes_ > 0) {
            scales_.Copy(visit.row + static_cast<uint64_t>(scale_offset_), visit.scales, visit.num_slots);
        }
        if constexpr (IS_FLAGGED) {
            FinishRow();
        }
        for (uint32_t i = 0; i < visit.num_slots; ++i) {
            const AscendC::GlobalTensor<int32_t> to = GlobalAt<int32_t>(visit.stamps[i]);
            if constexpr (IS_FLAGGED) {
                RaiseFlags(to, stamps[i * STAMP_WORDS], STAMP_WORDS, 1);
            } else {
                AscendC::DataCopy(to, stamps[i * STAMP_WORDS], STAMP_WORDS);
            }
        }
        double_buffer_.Give();
    }

    // MTE3 starts copies in order and may end them in another: the flag starts when the row has ended.
    __aicore__ inline void FinishRow() {
        AscendC::PipeBarrier<PIPE_MTE3>();
    }

    RowCopy rows_;
    RowCopy scales_;  // where they go elsewhere than rows
    int64_t scale_offset_ = 0;
    int64_t scale_bytes_ = 0;
    AscendC::LocalTensor<int32_t> stamps_;
    DoubleBuffer double_buffer_;
    SendPlan<Args> plan_;
};

}  // namespace moe
