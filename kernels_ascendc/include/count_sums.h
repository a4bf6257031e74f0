// Counts that peers wrote, clamped, and sums of them by vector instructions.
#pragma once

#include "flags.h"

namespace moe {

class CountSums {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe, int64_t max_entries, int64_t max_count) {
        max_count_ = max_count;
        sums_are_exact_ = max_count <= MAX_EXACT_SUM / max_entries;
        counts_.Init(pipe, max_entries);
        clamped_ = NewTensor<int32_t>(pipe, max_entries);
        floats_ = NewTensor<float>(pipe, max_entries);
        work_ = NewTensor<float>(pipe, max_entries / REPEAT_ENTRIES);
        sum_ = NewTensor<float>(pipe, 1);
    }

    // As Table::Load.
    __aicore__ inline void Load(uint64_t address, int64_t first, int64_t count) {
        first_ = first;
        counts_.Load(address, first, count);
    }

    __aicore__ inline int64_t ClampedAt(int64_t index) const {
        return Smaller<int64_t>(Larger<int64_t>(counts_.At(index), 0), max_count_);
    }

    // The first `count` that are loaded, for sums. Scalar code has waited for the copy.
    __aicore__ inline void Clamp(int64_t count) {
        if (!sums_are_exact_) {
            return;
        }
        const int32_t entries = static_cast<int32_t>(count);
        AscendC::Maxs(clamped_, counts_.Entries(), 0, entries);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mins(clamped_, clamped_, static_cast<int32_t>(max_count_), entries);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(floats_, clamped_, AscendC::RoundMode::CAST_NONE, static_cast<uint32_t>(count));
    }

    // Whether those that are clamped are there for vector instructions.
    __aicore__ inline bool HasVector() const {
        return sums_are_exact_;
    }

    __aicore__ inline AscendC::LocalTensor<int32_t> From(int64_t entry) const {
        return clamped_[static_cast<uint32_t>(entry - first_)];
    }

    // Of the first `count` of those that are clamped.
    __aicore__ inline int64_t SumFirst(int64_t count) {
        if (!sums_are_exact_) {
            int64_t sum = 0;
            for (int64_t index = first_; index < first_ + count; ++index) {
                sum += ClampedAt(index);
            }
            return sum;
        }
        // The sum before has been read.
        Order<AscendC::HardEvent::S_V>();
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ReduceSum(sum_, floats_, work_, static_cast<int32_t>(count));
        Order<AscendC::HardEvent::V_S>();
        return static_cast<int64_t>(sum_.GetValue(0));
    }

private:
    // Vector instructions sum floats, which hold every integer up to here. Only far more tokens than an NPU's limits
    // allow make larger sums.
    static constexpr int64_t MAX_EXACT_SUM = 1 << 24;
    static constexpr int64_t REPEAT_ENTRIES = 64;  // that a vector instruction reduces to one

    Table counts_;
    AscendC::LocalTensor<int32_t> clamped_;
    AscendC::LocalTensor<float> floats_, work_, sum_;
    int64_t max_count_ = 0;
    bool sums_are_exact_ = true;
    int64_t first_ = 0;
};

}  // namespace moe
