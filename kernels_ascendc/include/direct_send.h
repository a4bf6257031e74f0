// Direct dispatch, step 1: writes every row to its place in its receiver's output, which follows from the counts of all
// ranks in this rank's window. What later steps read of these counts comes after the rows: no peer waits for it.
//
// No flags: the post_status that follows comes when all blocks' copies are complete.
#ifndef MOE_DIRECT_SEND_H
#define MOE_DIRECT_SEND_H

#include "direct_tables.h"
#include "send_rows.h"

namespace moe {

class DirectSend {
public:
    __aicore__ inline void Init(const DirectSendArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        report_.Init(pipe, args.report, args_.zone);
        starts_.Init(&args_, pipe);
        rows_.Init(&args_, pipe, &report_, Blocks::OfLaunch(), {{}, &starts_});
        result_offsets_.Init(&args_, &starts_);
        received_counts_.Init(&args_, starts_.Scratch());
    }

    __aicore__ inline void Process() {
        starts_.Sum();
        rows_.Process();
        result_offsets_.Write();
        received_counts_.Write();
        report_.Write();
    }

private:
    DirectSendArgs args_;
    DirectStarts starts_;
    SendRows<DirectSendArgs> rows_;
    ResultOffsets result_offsets_;
    ReceivedCounts received_counts_;
    Report report_;
};

}  // namespace moe

#endif  // MOE_DIRECT_SEND_H
