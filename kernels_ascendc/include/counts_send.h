// Direct dispatch, before any row: how many rows this rank has for every shared rank and expert, to all
// ranks. From the counts of all, each rank finds where its own rows begin in everybody's output.
#pragma once

#include "status_entries.h"

namespace moe {

class CountsSend {
public:
    __aicore__ inline void Init(const CountsSendArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        peers_.Init(args.peers, args.num_ranks);
        pipe->InitBuffer(words_, 2, static_cast<uint32_t>(WORDS_PER_PIECE * sizeof(int32_t)));
        entry_.Init(pipe, 1);
    }

    __aicore__ inline void Process() {
        entry_.Clear();
        entry_.Set(0, args_.agreed == 0 ? 0 : ReadFresh<int32_t>(args_.agreed), WordOfDispatch(args_));
        Order<AscendC::HardEvent::S_MTE3>();
        const Share ranks = SplitEvenly(args_.num_ranks, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        SendWords(args_.shared_counts, args_.num_shared_ranks, 0, ranks);
        SendWords(args_.counts, args_.num_experts, args_.num_shared_ranks, ranks);
        FinishCounts();
        const uint64_t at = args_.status.At(args_.zone, 0, args_.rank);
        for (int64_t rank = ranks.first; rank < ranks.last; ++rank) {
            if (!peers_.IsMasked(rank)) {
                entry_.Send(0, peers_.WindowOf(rank) + at);
            }
        }
    }

private:
    static constexpr int64_t WORDS_PER_PIECE = 2048;

    // `count` words to the entries from `first` on, in the row of this rank.
    __aicore__ inline void SendWords(uint64_t source, int64_t count, int64_t first, const Share& ranks) {
        for (int64_t done = 0; done < count; done += WORDS_PER_PIECE) {
            const AscendC::DataCopyExtParams bytes = ExactWords(Smaller(WORDS_PER_PIECE, count - done));
            AscendC::LocalTensor<int32_t> in = words_.AllocTensor<int32_t>();
            AscendC::DataCopyPad(in, GlobalAt<int32_t>(source)[done], bytes, NoPadding<int32_t>());
            words_.EnQue(in);
            AscendC::LocalTensor<int32_t> out = words_.DeQue<int32_t>();
            const uint64_t at = args_.slots.At(args_.zone, args_.rank, first + done);
            for (int64_t rank = ranks.first; rank < ranks.last; ++rank) {
                if (!peers_.IsMasked(rank)) {
                    AscendC::DataCopyPad(GlobalAt<int32_t>(peers_.WindowOf(rank) + at), out, bytes);
                }
            }
            words_.FreeTensor(out);
        }
    }

    // Each block announces the counts that it copied itself: its own copies have to be complete.
    __aicore__ inline void FinishCounts() {
        AscendC::PipeBarrier<PIPE_MTE3>();
    }

    CountsSendArgs args_;
    Peers peers_;
    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> words_;
    StatusEntries entry_;
};

}  // namespace moe
