// Dispatch by blocks, step 1: to each rank a header with its counts, then its rows, which lie one after the other, by
// expert. FLAG2 follows when all blocks' copies are complete: by blocks_end. Blocks that are posted are made in the out
// part, and get FLAG2 here (block_posts.h).
#pragma once

#include "block_posts.h"
#include "send_rows.h"
#include "status_entries.h"

namespace moe {

// Where this rank's rows for an expert begin in the block for its rank: behind those for the experts before it there.
// Counts {1, 0, 2, 3} of four experts, two on each rank, give {0, 1, 0, 2}.
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
            int32_t rows = 0;
            for (int64_t i = first; i < first + args_->num_local_experts; ++i) {
                starts_.SetValue(static_cast<uint32_t>(i), rows);
                rows += CountOf(i);
            }
        }
        return starts_.GetValue(static_cast<uint32_t>(first + static_cast<int64_t>(expert)));
    }

private:
    static constexpr int32_t UNKNOWN = -1;

    const BlocksSendArgs* args_ = nullptr;
    Table counts_;
    AscendC::LocalTensor<int32_t> starts_;
};

// Behind the rows for the experts before, in the block for the receiver.
template <>
struct Destination<BlocksSendArgs> : NumberedRanks<BlocksSendArgs> {
    static constexpr bool HAS_SCALES = false;
    static constexpr bool HAS_FLAGS = false;
    static constexpr bool HAS_SHARED = false;
    static constexpr bool MAY_POST = true;

    const BlockStarts* starts = nullptr;
    const BlockPosts<BlocksSendArgs>* posts = nullptr;

    // Ranks of other parts have their turn.
    __aicore__ inline bool IsKept(const BlocksSendArgs&, uint64_t rank) const {
        return !posts->Has(rank);
    }

    __aicore__ inline bool Locate(const BlocksSendArgs& args, uint64_t rank, uint64_t source, uint64_t expert,
                                  uint64_t index, uint64_t& slot, uint64_t& stamp, uint64_t&) const {
        const uint64_t most = static_cast<uint64_t>(args.max_rows);
        if (index >= most) {
            return false;
        }
        const uint64_t place = static_cast<uint64_t>(starts->Of(rank, expert)) + index;
        slot = args.peer_blocks.At(args.zone, source) + EndOfRows(args, static_cast<int64_t>(place));
        stamp = slot + args.stamp_offset;
        return place < most;
    }
};

class BlocksSend : Kernel<BlocksSendArgs> {
public:
    __aicore__ inline void Init(const BlocksSendArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        peers_.Init(args.peers, args.num_ranks);
        starts_.Init(&args_, pipe);
        headers_.Init(args_, pipe);
        posts_.Init(&args_, &peers_, &report_, pipe);
        rows_.Init(&args_, pipe, &report_, blocks_, {{}, &starts_, &posts_});
    }

    __aicore__ inline void Process() {
        starts_.Load();
        const int32_t call = WordOfDispatch(args_);
        KeepWord(args_.dispatch_word, call);
        posts_.Begin();
        headers_.Send(args_, call, peers_, *this);
        rows_.Begin();
        for (int64_t part = 0; part < args_.num_parts; ++part) {
            rows_.SendAll();
            posts_.EndPart();
        }
        rows_.Finish();
        posts_.Finish();
        report_.Write();
    }

    // For BlockHeaders.
    __aicore__ inline int64_t Fill(int64_t rank) {
        const int64_t experts = args_.num_local_experts;
        int64_t rows = 0;
        for (int64_t expert = 0; expert < experts; ++expert) {
            const int32_t count = starts_.CountOf(rank * experts + expert);
            headers_.SetCount(expert, count);
            rows += count;
        }
        return rows;
    }

private:
    Peers peers_;
    BlockStarts starts_;
    BlockHeaders headers_;
    BlockPosts<BlocksSendArgs> posts_;
    SendRows<BlocksSendArgs> rows_;
};

}  // namespace moe
