// FLAG2 behind the last row of each rank's block. It needs no barrier of its own: a phase comes after all blocks'
// copies (PhaseRunner).
#ifndef MOE_BLOCKS_POST_H
#define MOE_BLOCKS_POST_H

#include "block_format.h"

namespace moe {

class BlocksPost {
public:
    __aicore__ inline void Init(const BlocksPostArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        FindZone(args_);
        peers_.Init(args.peers, args.num_ranks);
        pipe->InitBuffer(buffer_, UB_ALIGN);
    }

    __aicore__ inline void Process() {
        const Share ranks = SplitEvenly(args_.num_ranks, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        const AscendC::LocalTensor<int32_t> flag = buffer_.Get<int32_t>();
        const int32_t number = RoundNumber(args_);
        for (uint32_t i = 0; i < UNIT_WORDS; ++i) {
            flag.SetValue(i, EndFlagWord(number, i));
        }
        Order<AscendC::HardEvent::S_MTE3>();
        for (int64_t rank = ranks.first; rank < ranks.last; ++rank) {
            const int64_t rows = ReadFresh<int32_t>(args_.rows_to, rank);
            if (rows < 0 || rows > args_.max_rows) {
                continue;  // reported where they were to be sent
            }
            const uint64_t block = BlockIn(args_, peers_.WindowOf(rank), args_.rank);
            RaiseFlags(GlobalAt<int32_t>(block + EndOfRows(args_, rows)), flag, UNIT_WORDS, 1);
        }
    }

private:
    BlocksPostArgs args_;
    Peers peers_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
};

}  // namespace moe

#endif  // MOE_BLOCKS_POST_H
