// Several kernels in one launch, one after the other: the phases of a fused kernel.
//
// Each phase is a class like any other kernel's, with arguments and a report of its own, and has the whole UB. A phase
// that reads what other blocks wrote in the phases before begins after a SyncAll; every block reaches it, whatever
// happened to it before. Where a launch is split, some of its phases run on its first blocks, beside the others on the
// blocks behind those: neither reads what the others write, and none begins with a SyncAll. A phase that must not run
// on what is not there is left out by all blocks if one of them reported something in the phase before it; or, where it
// only waits for more of the same, by a block whose own waits gave up before.
#pragma once

#include "flags.h"
#include "moe_fused.h"

namespace moe {

class PhaseRunner {
public:
    __aicore__ inline PhaseRunner(const FusedHeadArgs& head, AscendC::TPipe* pipe) : head_(head), pipe_(pipe) {
        if (head_.first_blocks != 0) {
            const int64_t first = head_.first_blocks;
            is_first_ = blocks_.index < first;
            blocks_ = is_first_ ? Blocks{blocks_.index, first} : Blocks{blocks_.index - first, blocks_.number - first};
        }
        if (AscendC::GetBlockIdx() == 0) {
            NoteTime();
        }
    }

    template <typename Kernel, bool MAY_SPLIT = false, typename Args>
    __aicore__ inline void Phase(uint32_t number, const Args& args, bool is_synced, bool is_guarded, bool goes_on,
                                 bool is_on_first = false) {
        if ((head_.phases >> number & 1) == 0) {
            return;
        }
        if (head_.first_blocks != 0 && is_on_first != is_first_) {
            ++num_ran_;
            return;
        }
        if (num_ran_ > 0 && is_synced) {
            AscendC::SyncAll<true>();
        }
        BeginPhase(num_ran_);
        if (num_ran_ > 0 && is_guarded && !is_left_out_) {
            is_left_out_ = AnyReported(report_before_);
        }
        const bool runs = (!is_guarded || !is_left_out_) && (!goes_on || !has_failed_);
        if (runs || MAY_SPLIT) {
            Kernel kernel;
            if constexpr (MAY_SPLIT) {
                kernel.Init(args, pipe_, blocks_);
            } else {
                kernel.Init(args, pipe_);
            }
            if (runs) {
                kernel.Process();
                has_failed_ = has_failed_ || HasFailed(kernel, 0);
            } else {
                LeaveOut(kernel, 0);
            }
        }
        // Copies of this phase are complete before the next one's, and no buffer of it is in use any more.
        Finish();
        report_before_ = args.report;
        ++num_ran_;
        if (blocks_.index == 0) {
            NoteTime();
        }
    }

private:
    // Of kernels that can tell.
    template <typename Kernel>
    __aicore__ static inline auto HasFailed(const Kernel& kernel, int) -> decltype(kernel.HasFailed()) {
        return kernel.HasFailed();
    }

    template <typename Kernel>
    __aicore__ static inline bool HasFailed(const Kernel&, long) {
        return false;
    }

    // What a kernel does instead of its work, if anything.
    template <typename Kernel>
    __aicore__ static inline auto LeaveOut(Kernel& kernel, int) -> decltype(kernel.LeaveOut()) {
        kernel.LeaveOut();
    }

    template <typename Kernel>
    __aicore__ static inline void LeaveOut(Kernel&, long) {}

    __aicore__ inline void Finish() {
        AscendC::PipeBarrier<PIPE_ALL>();
        pipe_->Reset();
    }

    // In any block.
    __aicore__ inline bool AnyReported(uint64_t reports) {
        const int64_t blocks = AscendC::GetBlockNum();
        Table words;
        words.Init(pipe_, static_cast<uint32_t>(blocks * BLOCK_REPORT_WORDS));
        words.Load(reports, 0, blocks * BLOCK_REPORT_WORDS);
        Order<AscendC::HardEvent::MTE2_S>();
        bool any = false;
        for (int64_t block = 0; block < blocks; ++block) {
            any = any || words.At(block * BLOCK_REPORT_WORDS + BlockReport::CODE) != 0;
        }
        Finish();
        return any;
    }

    // By the first of the blocks, which stands for all.
    __aicore__ inline void NoteTime() {
        if (head_.times == 0) {
            return;
        }
        const AscendC::LocalTensor<int32_t> words = NewTensor<int32_t>(pipe_, 2);
        const uint64_t cycle = static_cast<uint64_t>(AscendC::GetSystemCycle());
        words.SetValue(0, static_cast<int32_t>(cycle));
        words.SetValue(1, static_cast<int32_t>(cycle >> 32));
        Order<AscendC::HardEvent::S_MTE3>();
        AscendC::DataCopyPad(GlobalAt<int32_t>(head_.times + num_ran_ * sizeof(int64_t)), words,
                             ExactBytes(sizeof(int64_t)));
        Finish();
    }

    FusedHeadArgs head_;
    AscendC::TPipe* pipe_;
    Blocks blocks_ = Blocks::OfLaunch();
    bool is_first_ = false;  // where the launch is split
    uint32_t num_ran_ = 0;  // on any block
    uint64_t report_before_ = 0;
    bool is_left_out_ = false;
    bool has_failed_ = false;  // this block
};

}  // namespace moe
