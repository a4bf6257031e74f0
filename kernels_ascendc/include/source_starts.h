// How many rows each source has for the experts before one: where its rows for that expert begin in its block.
// Of two sources that have {2, 1} rows for expert 0 and {0, 3} for expert 1: expert 2's begin at {2, 4}.
#pragma once

#include "flags.h"

namespace moe {

class SourceStarts {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe, int64_t num_ranks) {
        num_ranks_ = num_ranks;
        starts_ = NewTensor<int32_t>(pipe, num_ranks);
    }

    // May be called again, whatever was read and written since.
    __aicore__ inline void Clear() {
        Order<AscendC::HardEvent::S_V>();
        AscendC::Duplicate(starts_, 0, static_cast<int32_t>(num_ranks_));
        Order<AscendC::HardEvent::V_S>();
    }

    __aicore__ inline int64_t Of(int64_t source) const {
        return starts_.GetValue(static_cast<uint32_t>(source));
    }

    __aicore__ inline void AddTo(int64_t source, int64_t rows) {
        starts_.SetValue(static_cast<uint32_t>(source), static_cast<int32_t>(Of(source) + rows));
    }

    // The counts of these entries, expert by expert and in an expert source by source. Of whole experts one vector
    // instruction each, where their counts begin whole units of UB.
    template <typename Counts>
    __aicore__ inline void Add(const Counts& counts, const Share& entries) {
        int64_t entry = entries.first;
        for (; entry < entries.last && entry % num_ranks_ != 0; ++entry) {
            AddTo(entry % num_ranks_, counts.ClampedAt(entry));
        }
        if (num_ranks_ % ENTRIES_PER_UNIT == 0 && counts.HasVector() && entries.first % ENTRIES_PER_UNIT == 0) {
            Order<AscendC::HardEvent::S_V>();
            for (; entry + num_ranks_ <= entries.last; entry += num_ranks_) {
                const AscendC::LocalTensor<int32_t> row = counts.From(entry);
                AscendC::Add(starts_, starts_, row, static_cast<int32_t>(num_ranks_));
                AscendC::PipeBarrier<PIPE_V>();
            }
            Order<AscendC::HardEvent::V_S>();
        }
        for (; entry < entries.last; ++entry) {
            AddTo(entry % num_ranks_, counts.ClampedAt(entry));
        }
    }

private:
    static constexpr int64_t ENTRIES_PER_UNIT = UB_ALIGN / sizeof(int32_t);

    AscendC::LocalTensor<int32_t> starts_;
    int64_t num_ranks_ = 1;
};

}  // namespace moe
