// Combine, step 3: waits for each token until its own results are there, and clears their flags.
#ifndef MOE_COMBINE_WAIT_H
#define MOE_COMBINE_WAIT_H

#include "flags.h"

namespace moe {

class CombineWait {
public:
    __aicore__ inline void Init(const CombineWaitArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        num_results_ = args.topk + args.num_shared_experts;
        words_ = static_cast<uint32_t>(num_results_ * STATUS_ENTRY_WORDS);
        const uint32_t bytes = words_ * sizeof(float);
        pipe->InitBuffer(entry_buffer_, bytes);
        entries_ = entry_buffer_.Get<float>();
        pipe->InitBuffer(zero_buffer_, bytes);
        zeros_ = zero_buffer_.Get<float>();
        pipe->InitBuffer(work_buffer_, bytes);
        work_ = work_buffer_.Get<float>();
        pipe->InitBuffer(sum_buffer_, UB_ALIGN);
        sum_ = sum_buffer_.Get<float>();
        ids_.Init(pipe, TABLE_ENTRIES);
        report_.Init(pipe, args.report);
    }

    __aicore__ inline void Process() {
        AscendC::Duplicate(zeros_, 0.0f, static_cast<int32_t>(words_));
        Order<AscendC::HardEvent::V_MTE3>();
        const Share share = SplitEvenly(args_.num_tokens, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        const int64_t tokens_per_chunk = TABLE_ENTRIES / args_.topk;
        deadline_.Start(args_.timeout_us);
        for (int64_t first = share.first; first < share.last; first += tokens_per_chunk) {
            const int64_t last = Smaller(first + tokens_per_chunk, share.last);
            LoadIds(args_.first_token + first, args_.first_token + last);
            for (int64_t token = first; token < last; ++token) {
                if (!ReceiveToken(args_.first_token + token)) {
                    // The entries from here on stay as they are and tell the host who is missing.
                    report_.Add(REPORT_TIMEOUT, args_.first_token + token, share.last - token);
                    report_.Write();
                    return;
                }
            }
        }
        Order<AscendC::HardEvent::MTE3_S>();
    }

private:
    static constexpr int64_t TABLE_ENTRIES = 1024;

    __aicore__ inline void LoadIds(int64_t first, int64_t last) {
        Order<AscendC::HardEvent::S_MTE2>();
        ids_.Load(args_.topk_idx, first * args_.topk, (last - first) * args_.topk);
        Order<AscendC::HardEvent::MTE2_S>();
    }

    __aicore__ inline bool ReceiveToken(int64_t token) {
        const uint64_t zone = static_cast<uint64_t>(args_.zone);
        const uint64_t address = args_.window + args_.status.At(zone, static_cast<uint64_t>(token), 0);
        if (!WaitForResults(address, NumExpected(token))) {
            return false;
        }
        ClearFlags(address);
        return true;
    }

    // An id of -1 was not sent anywhere, so nothing comes back for it.
    __aicore__ inline int64_t NumExpected(int64_t token) const {
        int64_t expected = args_.num_shared_experts;
        for (int64_t k = 0; k < args_.topk; ++k) {
            expected += ids_.At(token * args_.topk + k) >= 0 ? 1 : 0;
        }
        return expected;
    }

    __aicore__ inline bool WaitForResults(uint64_t address, int64_t expected) {
        for (Looks looks(deadline_); looks.Next();) {
            if (SumFlags(address) == expected * static_cast<int64_t>(STATUS_ENTRY_WORDS)) {
                return true;
            }
        }
        return false;
    }

    // All eight words of an entry are 1.0f: no mask is needed to sum them.
    __aicore__ inline int64_t SumFlags(uint64_t address) {
        AscendC::DataCopy(entries_, GlobalAt<float>(address), words_);
        Order<AscendC::HardEvent::MTE2_V>();
        AscendC::ReduceSum(sum_, entries_, work_, static_cast<int32_t>(words_));
        Order<AscendC::HardEvent::V_S>();
        return static_cast<int64_t>(sum_.GetValue(0));
    }

    __aicore__ inline void ClearFlags(uint64_t address) {
        AscendC::DataCopy(GlobalAt<float>(address), zeros_, words_);
    }

    CombineWaitArgs args_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> entry_buffer_;
    AscendC::LocalTensor<float> entries_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> zero_buffer_;
    AscendC::LocalTensor<float> zeros_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> work_buffer_;
    AscendC::LocalTensor<float> work_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> sum_buffer_;
    AscendC::LocalTensor<float> sum_;
    Table ids_;
    Report report_;
    Deadline deadline_;
    int64_t num_results_ = 0;
    uint32_t words_ = 0;
};

}  // namespace moe

#endif  // MOE_COMBINE_WAIT_H
