// Direct dispatch, step 1: writes every row to its place in its receiver's output.
//
// No flags: the post_status after it is a launch of its own, and a kernel ends when its copies have (MOE_LAUNCHER).
#ifndef MOE_DIRECT_SEND_H
#define MOE_DIRECT_SEND_H

#include "send_rows.h"

namespace moe {

class DirectSend {
public:
    __aicore__ inline void Init(const DirectSendArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        report_.Init(pipe, args.report, args_.zone);
        rows_.Init(&args_, pipe, &report_);
    }

    __aicore__ inline void Process() {
        rows_.Process();
        report_.Write();
    }

private:
    DirectSendArgs args_;
    SendRows<DirectSendArgs> rows_;
    Report report_;
};

}  // namespace moe

#endif  // MOE_DIRECT_SEND_H
