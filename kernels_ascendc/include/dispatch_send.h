// Dispatch, steps 1 and 2: rows to their experts' slots, then a status entry to every expert's rank.
#ifndef MOE_DISPATCH_SEND_H
#define MOE_DISPATCH_SEND_H

#include "row_copy.h"
#include "send_plan.h"
#include "status_entries.h"

namespace moe {

class DispatchSend {
public:
    __aicore__ inline void Init(const DispatchSendArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        rows_.Init(pipe, args.row_bytes);
        pipe->InitBuffer(stamp_buffer_, static_cast<uint32_t>(2 * MAX_VISIT * STAMP_BYTES));
        stamps_ = stamp_buffer_.Get<int32_t>();
        halves_.Init(pipe);
        report_.Init(pipe, args.report);
        plan_.Init(&args_, pipe, &report_);
        status_.Init(&args_, pipe);
    }

    __aicore__ inline void Process() {
        SendRows();
        if (args_.post_status != 0) {
            FinishRowsOfAllBlocks();
            status_.Post();
        }
        report_.Write();
    }

private:
    __aicore__ inline void SendRows() {
        TraceStep(TRACE_WRITE);
        AscendC::Duplicate(stamps_, 0, static_cast<int32_t>(2 * MAX_VISIT * STAMP_WORDS));
        Order<AscendC::HardEvent::V_S>();
        Visit visit;
        while (plan_.Next(visit)) {
            SendRow(visit);
        }
        halves_.Finish();
    }

    __aicore__ inline void SendRow(const Visit& visit) {
        const AscendC::LocalTensor<int32_t> stamps =
            stamps_[static_cast<uint32_t>(halves_.Take() * MAX_VISIT * STAMP_WORDS)];
        for (uint32_t i = 0; i < visit.num_slots; ++i) {
            plan_.WriteStamp(stamps[static_cast<uint32_t>(i * STAMP_WORDS)], visit, i);
        }
        Order<AscendC::HardEvent::S_MTE3>();
        rows_.Copy(visit.row, visit.slots, visit.num_slots);
        for (uint32_t i = 0; i < visit.num_slots; ++i) {
            AscendC::DataCopy(GlobalAt<int32_t>(visit.slots[i] + static_cast<uint64_t>(args_.stamp_offset)),
                              stamps[static_cast<uint32_t>(i * STAMP_WORDS)], STAMP_WORDS);
        }
        halves_.Give();
    }

    // A status entry announces rows that several blocks wrote: every block's copies have to be complete,
    // and every block has to have said so, before the first entry leaves.
    __aicore__ inline void FinishRowsOfAllBlocks() {
        AscendC::PipeBarrier<PIPE_ALL>();
        TraceStep(TRACE_SYNC);
        AscendC::SyncAll<true>();
    }

    DispatchSendArgs args_;
    RowCopy rows_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> stamp_buffer_;
    AscendC::LocalTensor<int32_t> stamps_;
    Halves halves_;
    SendPlan<DispatchSendArgs> plan_;
    DispatchStatusPost<DispatchSendArgs> status_;
    Report report_;
};

}  // namespace moe

#endif  // MOE_DISPATCH_SEND_H
