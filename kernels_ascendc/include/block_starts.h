// Where this rank's rows for an expert begin in the block for its rank: behind those for the experts before it there.
// Counts {1, 0, 2, 3} of four experts, two on each rank, give {0, 1, 0, 2}.
#ifndef MOE_BLOCK_STARTS_H
#define MOE_BLOCK_STARTS_H

#include "flags.h"

namespace moe {

class BlockStarts {
public:
    __aicore__ inline void Init(const BlocksSendArgs* args, AscendC::TPipe* pipe) {
        args_ = args;
        counts_.Init(pipe, args->num_experts);
        starts_ = NewTensor<int32_t>(pipe, args->num_experts);
    }

    __aicore__ inline void Load() {
        counts_.Load(args_->counts, 0, args_->num_experts);
        AscendC::Duplicate(starts_, UNKNOWN, static_cast<int32_t>(args_->num_experts));
        Order<AscendC::HardEvent::MTE2_S>();
        Order<AscendC::HardEvent::V_S>();
    }

    // Of an expert among those of all ranks.
    __aicore__ inline int32_t CountOf(int64_t expert) const {
        return counts_.At(expert);
    }

    // Each rank's are summed up once, when they are first asked for.
    __aicore__ inline int64_t Of(uint64_t rank, uint64_t expert) const {
        const int64_t first = static_cast<int64_t>(rank) * args_->num_local_experts;
        if (starts_.GetValue(static_cast<uint32_t>(first)) == UNKNOWN) {
            SumExperts(first);
        }
        return starts_.GetValue(static_cast<uint32_t>(first + static_cast<int64_t>(expert)));
    }

private:
    static constexpr int32_t UNKNOWN = -1;

    __aicore__ inline void SumExperts(int64_t first) const {
        int32_t rows = 0;
        for (int64_t expert = first; expert < first + args_->num_local_experts; ++expert) {
            starts_.SetValue(static_cast<uint32_t>(expert), rows);
            rows += CountOf(expert);
        }
    }

    const BlocksSendArgs* args_ = nullptr;
    Table counts_;
    AscendC::LocalTensor<int32_t> starts_;
};

}  // namespace moe

#endif  // MOE_BLOCK_STARTS_H
