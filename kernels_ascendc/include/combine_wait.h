// Combine, step 3: waits for each token until its own results are there.
#pragma once

#include "result_flags.h"
#include "waits.h"

namespace moe {

class CombineWait : Kernel<CombineWaitArgs> {
public:
    __aicore__ inline void Init(const CombineWaitArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        num_results_ = args.topk + args.num_shared_experts;
        number_ = RoundNumber(args_);
        flags_.Init(pipe, num_results_, 1, number_);
        expected_.Init(&args_, pipe, TABLE_ENTRIES);
        waited_.Init(pipe, args.waited_us, TABLE_ENTRIES);
    }

    __aicore__ inline void Process() {
        KeepWord(args_.kept_zone, args_.zone);
        KeepNumber(args_, number_);
        const Share share = blocks_.ShareOf(args_.num_tokens);
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
        Order<AscendC::HardEvent::S_MTE2>();
        expected_.Load(first_of_chunk_, last);
        Order<AscendC::HardEvent::MTE2_S>();
        for (int64_t token = first_of_chunk_; token < last; ++token) {
            const ResultBits expected = expected_.Of(token);
            for (int64_t k = 0; waited_.IsWanted() && k < num_results_; ++k) {
                waited_.Expect(TimeOf(token) + k, HasBit(expected, k));
            }
            if (expected != 0) {
                ReceiveToken(token, expected);
            }
        }
        waited_.Store(first_of_chunk_ * num_results_, (last - first_of_chunk_) * num_results_);
        for (int64_t token = first_of_chunk_; IsTraced() && token < last; ++token) {
            for (int64_t k = 0; k < num_results_; ++k) {
                if (HasBit(expected_.Of(token), k)) {
                    deadline_.TraceWait(expected_.ExpertOf(token, k), waited_.At(TimeOf(token) + k));
                }
            }
        }
    }

    __aicore__ inline int64_t TimeOf(int64_t token) const {
        return (token - first_of_chunk_) * num_results_;
    }

    __aicore__ inline void ReceiveToken(int64_t token, ResultBits expected) {
        const uint64_t address = args_.window + args_.status.At(static_cast<uint64_t>(args_.zone), token, 0);
        if (timed_out_) {
            LookOnce(token, address);
        } else if (WaitForResults(token, address, expected)) {
            flags_.ReportStray(0, expected | expected_.Lost(token), token, report_);
        } else {
            timed_out_ = true;
            report_.Add(REPORT_TIMEOUT, token, end_ - token);
            NoteMissing(token);
        }
    }

    __aicore__ inline bool WaitForResults(int64_t token, uint64_t address, ResultBits expected) {
        int64_t noted = num_results_;
        ResultBits late = 0;
        int64_t num_late = 0;
        for (PollLoop poll(deadline_, args_.window, token, end_ - token); poll.Next();) {
            LoadFlags(address);
            const ResultBits awaited = expected_.Awaited(token, expected);
            const int64_t missing = flags_.NumMissing(0, awaited);
            if (waited_.IsWanted() && missing < noted) {
                waited_.NoteArrivals(flags_.Entries(), number_, TimeOf(token), num_results_, poll.WaitedUs());
                noted = missing;
            }
            if (missing == 0) {
                NoteLate(token, late, poll.WaitedUs());
                return true;
            }
            if (IsWatched() && missing != num_late) {
                late = flags_.Missing(0, awaited);
                num_late = missing;
            }
            poll.Miss(missing);
        }
        NoteLate(token, late, deadline_.WaitedUs());
        return false;
    }

    // What the last look that missed some did not find.
    __aicore__ inline void NoteLate(int64_t token, ResultBits late, int32_t us) {
        for (int64_t k = 0; late != 0 && k < num_results_; ++k) {
            if (HasBit(late, k)) {
                deadline_.TraceWait(expected_.ExpertOf(token, k), us);
            }
        }
    }

    // After the deadline: only to record the times of missing results.
    __aicore__ inline void LookOnce(int64_t token, uint64_t address) {
        if (waited_.IsWanted()) {
            LoadFlags(address);
            waited_.NoteArrivals(flags_.Entries(), number_, TimeOf(token), num_results_, 0);
            NoteMissing(token);
        }
    }

    __aicore__ inline void NoteMissing(int64_t token) {
        waited_.NoteMissing(TimeOf(token), num_results_, deadline_.WaitedUs());
    }

    __aicore__ inline void LoadFlags(uint64_t address) {
        Order<AscendC::HardEvent::S_MTE2>();
        AscendC::DataCopy(flags_.Entries(), GlobalAt<int32_t>(address),
                          static_cast<uint32_t>(num_results_ * STATUS_ENTRY_WORDS));
        expected_.LookForSilent();
        Order<AscendC::HardEvent::MTE2_S>();
    }

    int32_t number_ = 0;  // of the round
    ResultFlags flags_;
    ExpectedResults<CombineWaitArgs> expected_;
    WaitedTimes waited_;
    Deadline deadline_;
    int64_t num_results_ = 0;
    int64_t first_of_chunk_ = 0;
    int64_t end_ = 0;
    bool timed_out_ = false;
};

}  // namespace moe
