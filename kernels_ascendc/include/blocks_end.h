// Blocks in a group inside one server, step 2: FLAG2 of each rank's block, behind its last row. It needs no barrier of
// its own: a phase comes after all blocks' copies (PhaseRunner).
#pragma once

#include "block_format.h"

namespace moe {

class BlocksEnd : Kernel<BlocksEndArgs> {
public:
    __aicore__ inline void Init(const BlocksEndArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        peers_.Init(args.peers, args.num_ranks);
        flags_.Init(pipe);
    }

    __aicore__ inline void Process() {
        TraceStep(TRACE_FLAG);
        flags_.Begin(RoundNumber(args_));
        for (int64_t rank = AscendC::GetBlockIdx(); rank < args_.num_ranks; rank += AscendC::GetBlockNum()) {
            flags_.Write(args_, peers_, rank);
        }
    }

private:
    Peers peers_;
    EndOfBlocks flags_;
};

}  // namespace moe
