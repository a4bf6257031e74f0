// Combine in parts, step 3: waits for some of this rank's tokens, whichever are complete first.
//
// A rank that is late must not keep others from sending: a block that has waited as long as it took to send a part
// sends the next one before it waits on.
#ifndef MOE_COMBINE_READY_H
#define MOE_COMBINE_READY_H

#include "combine_send.h"
#include "ready_tokens.h"

namespace moe {

class CombineReady : Kernel<CombineReadyArgs> {
public:
    __aicore__ inline void Init(const CombineReadyArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        pipe_ = pipe;
        ready_.Init(&args_, pipe, &report_);
        progress_.Init(pipe, args.progress);
    }

    __aicore__ inline void Process() {
        KeepWord(args_.kept_zone, args_.zone);
        sent_ = args_.part + 1;
        if (args_.part == 0) {
            ready_.Begin(0, 0);
        } else {
            sent_ = Larger(sent_, progress_.Read(PartProgress::SENT));
            ready_.Begin(progress_.Read(PartProgress::TAKEN), progress_.Read(PartProgress::NOTED));
        }
        timeout_us_ = report_.IsOld() ? 0 : args_.timeout_us;
        bool is_done = Wait(HasMore() ? progress_.Read(PartProgress::SEND_US) : 0);
        while (!is_done && HasMore()) {
            is_done = Wait(SendNext());
        }
        if (!is_done) {
            ready_.GiveUp();
        }
        progress_.Keep(PartProgress::SENT, sent_, ready_.Taken(), ready_.Noted());
        report_.Write();
    }

private:
    __aicore__ inline bool HasMore() const {
        return args_.num_entries > 0 && sent_ < args_.num_parts;
    }

    __aicore__ inline bool Wait(int64_t patience_us) {
        return ready_.Wait(HasMore() ? Smaller(patience_us, timeout_us_) : timeout_us_);
    }

    // Returns how long it took.
    __aicore__ inline int64_t SendNext() {
        if (!is_sending_) {
            results_.Init(&args_, pipe_, &report_, true);
            results_.Begin();
            is_sending_ = true;
        }
        return results_.Send(TokenRange::OfPart(args_, sent_++));
    }

    AscendC::TPipe* pipe_ = nullptr;
    ResultRows<CombineReadyArgs> results_;
    ReadyTokens ready_;
    PartsProgress progress_;
    int64_t timeout_us_ = 0;
    int64_t sent_ = 0;  // parts
    bool is_sending_ = false;
};

}  // namespace moe

#endif  // MOE_COMBINE_READY_H
