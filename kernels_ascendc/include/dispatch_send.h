// Dispatch, steps 1 and 2: a status entry to every expert's rank, then rows to their experts' slots.
//
// An entry carries a count only. It announces no rows, so it waits for none: blocks need no SyncAll.
#pragma once

#include "begun_blocks.h"
#include "send_rows.h"
#include "status_entries.h"

namespace moe {

class DispatchSend : Kernel<DispatchSendArgs> {
public:
    __aicore__ inline void Init(const DispatchSendArgs& args, AscendC::TPipe* pipe,
                                const Blocks& blocks = Blocks::OfLaunch()) {
        Kernel::Init(args, pipe, blocks);
        rows_.Init(&args_, pipe, &report_, blocks_);
        status_.Init(&args_, pipe, blocks_);
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
    SendRows<DispatchSendArgs> rows_;
    DispatchStatusPost<DispatchSendArgs> status_;
    BegunBlocks begun_;
};

}  // namespace moe
