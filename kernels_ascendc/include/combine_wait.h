// Combine, step 3: token by token, until the flags of its own results are there; then they are cleared.
#ifndef MOE_COMBINE_WAIT_H
#define MOE_COMBINE_WAIT_H

#include "platform.h"

namespace moe {

class CombineWait {
public:
    __aicore__ inline explicit CombineWait(const CombineWaitArgs& args)
        : args_(args),
          results_(static_cast<uint32_t>(args.topk + args.num_shared_experts)),
          deadline_(args.timeout_us),
          report_(args.report) {
        pipe_.InitBuffer(entries_, results_ * STATUS_ENTRY_BYTES);
        pipe_.InitBuffer(zeros_, results_ * STATUS_ENTRY_BYTES);
        pipe_.InitBuffer(sum_, STATUS_ENTRY_BYTES);
        pipe_.InitBuffer(work_, results_ * STATUS_ENTRY_BYTES);
        pipe_.InitBuffer(ids_, static_cast<uint32_t>(args.num_tokens * args.topk * sizeof(int32_t)));
    }

    __aicore__ inline void Process() {
        const Range range = Share(static_cast<uint64_t>(args_.num_tokens),
                                  static_cast<uint64_t>(AscendC::GetBlockIdx()),
                                  static_cast<uint64_t>(AscendC::GetBlockNum()));
        if (range.begin == range.end) {
            return;
        }
        AscendC::Duplicate(zeros_.Get<float>(), 0.0f, static_cast<int32_t>(results_ * WORDS_PER_ENTRY));
        Synchronize<HardEvent::V_MTE3>();
        LoadIds(range);
        for (uint64_t token = range.begin; token < range.end; ++token) {
            const uint32_t expected = NumResults(token - range.begin);
            if (expected == 0) {
                continue;
            }
            if (!WaitFor(token, expected)) {
                // What has not been cleared from here on tells the host who is missing.
                report_.Write(REPORT_TIMEOUT, static_cast<uint64_t>(args_.first_token) + token, range.end - token);
                return;
            }
            AscendC::DataCopy(Entries(token), zeros_.Get<float>(), results_ * WORDS_PER_ENTRY);
        }
    }

private:
    __aicore__ inline void LoadIds(Range range) {
        const auto topk = static_cast<uint64_t>(args_.topk);
        const uint64_t first = (static_cast<uint64_t>(args_.first_token) + range.begin) * topk;
        const auto bytes = static_cast<uint32_t>((range.end - range.begin) * topk * sizeof(int32_t));
        AscendC::DataCopyPad(ids_.Get<int32_t>(), Global<int32_t>(args_.topk_idx)[first], {1, bytes, 0, 0, 0},
                             {false, 0, 0, 0});
        Synchronize<HardEvent::MTE2_S>();
    }

    // Results that will come for a token: an id of -1 was sent to nobody.
    __aicore__ inline uint32_t NumResults(uint64_t loaded_token) const {
        const auto topk = static_cast<uint32_t>(args_.topk);
        const LocalTensor<int32_t> ids = ids_.Get<int32_t>();
        uint32_t expected = static_cast<uint32_t>(args_.num_shared_experts);
        for (uint32_t k = 0; k < topk; ++k) {
            expected += ids.GetValue(static_cast<uint32_t>(loaded_token) * topk + k) >= 0 ? 1 : 0;
        }
        return expected;
    }

    __aicore__ inline GlobalTensor<float> Entries(uint64_t token) const {
        const uint64_t at = args_.status.At(static_cast<uint64_t>(args_.zone),
                                            static_cast<uint64_t>(args_.first_token) + token, 0);
        return Global<float>(args_.window + at);
    }

    // Each result's entry is eight 1.0.
    __aicore__ inline bool WaitFor(uint64_t token, uint32_t expected) {
        const LocalTensor<float> entries = entries_.Get<float>();
        for (uint32_t attempt = 0;; ++attempt) {
            const bool passed = deadline_.Passed();
            AscendC::DataCopy(entries, Entries(token), results_ * WORDS_PER_ENTRY);
            Synchronize<HardEvent::MTE2_V>();
            AscendC::ReduceSum(sum_.Get<float>(), entries, work_.Get<float>(), static_cast<int32_t>(WORDS_PER_ENTRY),
                               static_cast<int32_t>(results_), 1);
            Synchronize<HardEvent::V_S>();
            if (sum_.Get<float>().GetValue(0) == static_cast<float>(expected * WORDS_PER_ENTRY)) {
                return true;
            }
            if (passed) {
                return false;
            }
            PollPause(attempt);
        }
    }

    const CombineWaitArgs args_;
    const uint32_t results_;
    Deadline deadline_;
    Report report_;
    AscendC::TPipe pipe_;
    mutable AscendC::TBuf<AscendC::TPosition::VECCALC> entries_;
    mutable AscendC::TBuf<AscendC::TPosition::VECCALC> zeros_;
    mutable AscendC::TBuf<AscendC::TPosition::VECCALC> sum_;
    mutable AscendC::TBuf<AscendC::TPosition::VECCALC> work_;
    mutable AscendC::TBuf<AscendC::TPosition::VECCALC> ids_;
};

}  // namespace moe

#endif  // MOE_COMBINE_WAIT_H
