// Which results come back for a token, and the flags that say so: an entry each, whose words are the round's number.
#pragma once

#include "silent_ranks.h"

namespace moe {

// A bit for each result of a token: of 32 routed ones, and as many shared ones as there are.
using ResultBits = int64_t;

// Of some tokens, by what their dispatch was given. Shared experts come after the routed ones.
template <typename Args>
class ExpectedResults {
public:
    __aicore__ inline void Init(const Args* args, AscendC::TPipe* pipe, uint32_t max_entries) {
        args_ = args;
        num_results_ = args->topk + args->num_shared_experts;
        ids_.Init(pipe, max_entries);
        active_.Init(pipe, max_entries);
        silent_.Init(args->peers, args->num_ranks, args->changes);
    }

    // Before each look: whether there are ranks that nothing is awaited from any more.
    __aicore__ inline bool LookForSilent() {
        return silent_.Look();
    }

    // Of the results that a token expects, those that are still to come: not those of ranks that are silent now. Ranks
    // of shared experts never are.
    __aicore__ inline ResultBits Awaited(int64_t token, ResultBits expected) const {
        if (!silent_.HasAny()) {
            return expected;
        }
        const int64_t of_rank = args_->num_experts / (args_->num_ranks - args_->num_shared_ranks);
        ResultBits awaited = expected;
        for (int64_t k = 0; k < args_->topk; ++k) {
            const ResultBits bit = ResultBits{1} << k;
            if ((expected & bit) != 0 &&
                silent_.Has(args_->num_shared_ranks + ids_.At(token * args_->topk + k) / of_rank)) {
                awaited &= ~bit;
            }
        }
        return awaited;
    }

    // Results of ranks that were silent before: `-2 - id` stands for their ids. They may come all the same.
    __aicore__ inline ResultBits Lost(int64_t token) const {
        ResultBits lost = 0;
        for (int64_t k = 0; k < args_->topk; ++k) {
            lost |= ids_.At(token * args_->topk + k) < NO_EXPERT ? ResultBits{1} << k : 0;
        }
        return lost;
    }

    // Between Order<S_MTE2> and Order<MTE2_S>, as `Table::Load`.
    __aicore__ inline void Load(int64_t first, int64_t last) {
        ids_.Load(args_->topk_idx, first * args_->topk, (last - first) * args_->topk);
        if (args_->active_index != 0) {
            active_.Load(args_->active_index, first, last - first);
        }
    }

    // A bit for each result. Entries that were sent nowhere get none.
    __aicore__ inline ResultBits Of(int64_t token) const {
        if (args_->active_index != 0 && active_.At(token) < 0) {
            return 0;
        }
        ResultBits expected = ((ResultBits{1} << num_results_) - 1) & -(ResultBits{1} << args_->topk);
        for (int64_t k = 0; k < args_->topk; ++k) {
            const int32_t id = ids_.At(token * args_->topk + k);
            expected |= id >= 0 && id < args_->num_experts ? ResultBits{1} << k : 0;
        }
        return expected;
    }

    // Who computes a result; its rank is not known here.
    __aicore__ inline int64_t ExpertOf(int64_t token, int64_t k) const {
        return k < args_->topk ? ids_.At(token * args_->topk + k) : args_->num_experts + k - args_->topk;
    }

private:
    static constexpr int32_t NO_EXPERT = -1;

    const Args* args_ = nullptr;
    int64_t num_results_ = 0;
    SilentRanks silent_;
    Table ids_, active_;
};

__aicore__ inline bool HasBit(ResultBits bits, int64_t k) {
    return (bits >> k & 1) != 0;
}

// Entries of results in UB. Only those that a token expects count: its caller may have told combine of fewer than
// dispatch sent.
class ResultFlags {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe, int64_t num_results, int64_t max_tokens, int32_t number) {
        num_results_ = num_results;
        number_ = number;
        entries_ = NewTensor<int32_t>(pipe, max_tokens * num_results * STATUS_ENTRY_WORDS);
    }

    __aicore__ inline const AscendC::LocalTensor<int32_t>& Entries() const {
        return entries_;
    }

    // Of the token whose entries are the `index`-th here.
    __aicore__ inline bool IsThere(int64_t index, int64_t k) const {
        const int64_t entry = index * num_results_ + k;
        return entries_.GetValue(static_cast<uint32_t>(entry * STATUS_ENTRY_WORDS + StatusEntry::FLAG)) == number_;
    }

    __aicore__ inline int64_t NumMissing(int64_t index, ResultBits expected) const {
        int64_t missing = 0;
        for (int64_t k = 0; k < num_results_; ++k) {
            missing += HasBit(expected, k) && !IsThere(index, k) ? 1 : 0;
        }
        return missing;
    }

    // A bit for each of these.
    __aicore__ inline ResultBits Missing(int64_t index, ResultBits expected) const {
        ResultBits missing = 0;
        for (int64_t k = 0; k < num_results_; ++k) {
            missing |= HasBit(expected, k) && !IsThere(index, k) ? ResultBits{1} << k : 0;
        }
        return missing;
    }

    // Results that have come by now and that nobody expects, nor waits for.
    __aicore__ inline void ReportStray(int64_t index, ResultBits expected, int64_t token, Report& report) const {
        int64_t stray = 0;
        for (int64_t k = 0; k < num_results_; ++k) {
            stray += !HasBit(expected, k) && IsThere(index, k) ? 1 : 0;
        }
        if (stray > 0) {
            report.Add(REPORT_STRAY, token, stray);
        }
    }

private:
    AscendC::LocalTensor<int32_t> entries_;
    int64_t num_results_ = 0;
    int32_t number_ = 0;
};

}  // namespace moe
