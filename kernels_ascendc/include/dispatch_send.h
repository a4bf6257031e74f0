// Dispatch, steps 1 and 2: a status entry to every expert's rank, then rows to their experts' slots.
//
// An entry carries a count only. It announces no rows, so it waits for none: blocks need no SyncAll.
#ifndef MOE_DISPATCH_SEND_H
#define MOE_DISPATCH_SEND_H

#include "begun_blocks.h"
#include "send_rows.h"
#include "status_entries.h"

namespace moe {

class DispatchSend {
public:
    // Instead of all of the launch; before `Init`.
    __aicore__ inline void UseBlocks(const Blocks& blocks) {
        rows_.UseBlocks(blocks);
        status_.UseBlocks(blocks);
    }

    __aicore__ inline void Init(const DispatchSendArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        FindZone(args_);
        report_.Init(pipe, args.report, args_.zone);
        rows_.Init(&args_, pipe, &report_);
        status_.Init(&args_, pipe);
        begun_.Init(pipe, args.begun);
    }

    __aicore__ inline void Process() {
        begun_.Raise();
        if (args_.post_status != 0) {
            status_.Post();
        }
        rows_.Process();
        report_.Write();
    }

private:
    DispatchSendArgs args_;
    SendRows<DispatchSendArgs> rows_;
    DispatchStatusPost<DispatchSendArgs> status_;
    BegunBlocks begun_;
    Report report_;
};

}  // namespace moe

#endif  // MOE_DISPATCH_SEND_H
