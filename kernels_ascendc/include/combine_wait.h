// Combine, step 3: waits for each token until its own results are there, and clears their flags.
#ifndef MOE_COMBINE_WAIT_H
#define MOE_COMBINE_WAIT_H

#include "waits.h"

namespace moe {

class CombineWait {
public:
    __aicore__ inline void Init(const CombineWaitArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        FindZone(args_);
        num_results_ = args.topk + args.num_shared_experts;
        words_ = static_cast<uint32_t>(num_results_ * STATUS_ENTRY_WORDS);
        flags_.Init(pipe, words_);
        pipe->InitBuffer(zero_buffer_, static_cast<uint32_t>(words_ * sizeof(float)));
        zeros_ = zero_buffer_.Get<float>();
        ids_.Init(pipe, TABLE_ENTRIES);
        active_.Init(pipe, TABLE_ENTRIES);
        waited_.Init(pipe, args.waited_us, TABLE_ENTRIES);
        report_.Init(pipe, args.report, args_.zone);
        kept_zone_.Init(pipe);
    }

    __aicore__ inline void Process() {
        kept_zone_.Keep(args_.kept_zone, static_cast<int32_t>(args_.zone));
        AscendC::Duplicate(zeros_, 0.0f, static_cast<int32_t>(words_));
        Order<AscendC::HardEvent::V_MTE3>();
        const Share share = SplitEvenly(args_.num_tokens, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        const int64_t tokens_per_chunk = TABLE_ENTRIES / num_results_;
        end_ = args_.first_token + share.last;
        deadline_.Start(report_.IsOld() ? 0 : args_.timeout_us);
        for (int64_t first = share.first; first < share.last; first += tokens_per_chunk) {
            first_of_chunk_ = args_.first_token + first;
            ReceiveTokens(Smaller(first_of_chunk_ + tokens_per_chunk, end_));
            if (timed_out_ && !waited_.IsWanted()) {
                break;
            }
        }
        report_.Write();
    }

private:
    static constexpr int64_t TABLE_ENTRIES = 1024;

    __aicore__ inline void ReceiveTokens(int64_t last) {
        LoadTables(first_of_chunk_, last);
        for (int64_t token = first_of_chunk_; token < last; ++token) {
            const int64_t expected = Expect(token);
            if (expected > 0) {
                ReceiveToken(token, expected);
            }
        }
        if (waited_.IsWanted()) {
            waited_.Store(first_of_chunk_ * num_results_, (last - first_of_chunk_) * num_results_);
        }
        for (int64_t token = first_of_chunk_; IsTraced() && token < last; ++token) {
            TraceWaits(token);
        }
    }

    // By expert, since its rank is not known here. Shared experts come after the routed ones.
    __aicore__ inline void TraceWaits(int64_t token) {
        for (int64_t k = 0; k < num_results_; ++k) {
            if (IsExpected(token, k)) {
                const int64_t expert =
                    k < args_.topk ? ids_.At(token * args_.topk + k) : args_.num_experts + k - args_.topk;
                deadline_.TraceWait(expert, waited_.At(TimeOf(token) + k));
            }
        }
    }

    __aicore__ inline void LoadTables(int64_t first, int64_t last) {
        Order<AscendC::HardEvent::S_MTE2>();
        ids_.Load(args_.topk_idx, first * args_.topk, (last - first) * args_.topk);
        if (args_.active != 0) {
            active_.Load(args_.active, first, last - first);
        }
        Order<AscendC::HardEvent::MTE2_S>();
    }

    // The number of results that come back for a token.
    __aicore__ inline int64_t Expect(int64_t token) {
        int64_t expected = 0;
        for (int64_t k = 0; k < num_results_; ++k) {
            const bool is_expected = IsExpected(token, k);
            expected += is_expected ? 1 : 0;
            if (waited_.IsWanted()) {
                waited_.Set(TimeOf(token) + k, 0);
                if (is_expected) {
                    waited_.Expect(TimeOf(token) + k);
                }
            }
        }
        return expected;
    }

    // Entries that were sent nowhere get no result.
    __aicore__ inline bool IsExpected(int64_t token, int64_t k) const {
        if (args_.active != 0 && active_.At(token) < 0) {
            return false;
        }
        if (k >= args_.topk) {
            return true;
        }
        const int32_t id = ids_.At(token * args_.topk + k);
        return id >= 0 && id < args_.num_experts;
    }

    __aicore__ inline int64_t TimeOf(int64_t token) const {
        return (token - first_of_chunk_) * num_results_;
    }

    __aicore__ inline void ReceiveToken(int64_t token, int64_t expected) {
        const uint64_t zone = args_.zone;
        const uint64_t address = args_.window + args_.status.At(zone, token, 0);
        if (timed_out_) {
            LookOnce(token, address);
        } else if (WaitForResults(token, address, expected)) {
            ClearFlags(address);
        } else {
            timed_out_ = true;
            // The entries from here on are left as they are, and tell the host who is missing.
            report_.Add(REPORT_TIMEOUT, token, end_ - token);
            NoteMissing(token);
        }
    }

    __aicore__ inline bool WaitForResults(int64_t token, uint64_t address, int64_t expected) {
        int64_t noted = 0;
        for (PollLoop poll(deadline_, args_.window, token, end_ - token); poll.Next();) {
            const int64_t seen = SumFlags(address);
            if (waited_.IsWanted() && seen != noted) {
                waited_.NoteArrivals(flags_.Entries(), TimeOf(token), num_results_, poll.WaitedUs());
                noted = seen;
            }
            if (seen == expected * static_cast<int64_t>(STATUS_ENTRY_WORDS)) {
                return true;
            }
            poll.Miss(expected - seen / static_cast<int64_t>(STATUS_ENTRY_WORDS));
        }
        return false;
    }

    // After the deadline: only to record the times of missing results.
    __aicore__ inline void LookOnce(int64_t token, uint64_t address) {
        if (waited_.IsWanted()) {
            SumFlags(address);
            waited_.NoteArrivals(flags_.Entries(), TimeOf(token), num_results_, 0);
            NoteMissing(token);
        }
    }

    __aicore__ inline void NoteMissing(int64_t token) {
        if (waited_.IsWanted()) {
            waited_.NoteMissing(TimeOf(token), num_results_, deadline_.WaitedUs());
        }
    }

    // All eight words of an entry are 1.0f.
    __aicore__ inline int64_t SumFlags(uint64_t address) {
        AscendC::DataCopy(flags_.Entries(), GlobalAt<float>(address), words_);
        return flags_.SumWords(0, words_);
    }

    __aicore__ inline void ClearFlags(uint64_t address) {
        AscendC::DataCopy(GlobalAt<float>(address), zeros_, words_);
    }

    CombineWaitArgs args_;
    FlagCounter flags_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> zero_buffer_;
    AscendC::LocalTensor<float> zeros_;
    Table ids_;
    Table active_;
    WaitedTimes waited_;
    Report report_;
    KeptWord kept_zone_;
    Deadline deadline_;
    int64_t num_results_ = 0;
    uint32_t words_ = 0;
    int64_t first_of_chunk_ = 0;
    int64_t end_ = 0;
    bool timed_out_ = false;
};

}  // namespace moe

#endif  // MOE_COMBINE_WAIT_H
