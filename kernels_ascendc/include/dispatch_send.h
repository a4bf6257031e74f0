// Dispatch, steps 1 and 2: rows to their experts' slots, then a status entry to every expert's rank.
#ifndef MOE_DISPATCH_SEND_H
#define MOE_DISPATCH_SEND_H

#include "send_rows.h"
#include "status_entries.h"

namespace moe {

class DispatchSend {
public:
    __aicore__ inline void Init(const DispatchSendArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        FindZone(args_);
        report_.Init(pipe, args.report, args_.zone);
        rows_.Init(&args_, pipe, &report_);
        status_.Init(&args_, pipe);
    }

    __aicore__ inline void Process() {
        rows_.Process();
        if (args_.post_status != 0) {
            FinishRowsOfAllBlocks();
            status_.Post();
        }
        report_.Write();
    }

private:
    // A status entry announces rows that several blocks wrote: every block's copies have to be complete,
    // and every block has to have said so, before the first entry leaves. CANN's SyncAll waits for the pipes of
    // its own core, but no page promises it; the barrier does, and waits for nothing a second time.
    __aicore__ inline void FinishRowsOfAllBlocks() {
        AscendC::PipeBarrier<PIPE_ALL>();
        TraceStep(TRACE_SYNC);
        AscendC::SyncAll<true>();
    }

    DispatchSendArgs args_;
    SendRows<DispatchSendArgs> rows_;
    DispatchStatusPost<DispatchSendArgs> status_;
    Report report_;
};

}  // namespace moe

#endif  // MOE_DISPATCH_SEND_H
