// Dispatch with flags in band, steps 1 and 2: rows cut into 512-byte blocks that carry their own flags.
//
// A status entry carries a count only. It announces no rows, so it waits for none: blocks need no SyncAll.
#pragma once

#include "begun_blocks.h"
#include "inband_blocks.h"
#include "row_copy.h"
#include "send_plan.h"
#include "status_entries.h"

namespace moe {

class InbandSend : Kernel<InbandSendArgs> {
public:
    __aicore__ inline void Init(const InbandSendArgs& args, AscendC::TPipe* pipe,
                                const Blocks& blocks = Blocks::OfLaunch()) {
        Kernel::Init(args, pipe, blocks);
        last_block_ = NumBlocksOfSlot(args.stamp_offset) - 1;
        piece_blocks_ = Larger<int64_t>(1, Smaller(last_block_, MAX_PIECE_BLOCKS));
        pipe->InitBuffer(pieces_, 2, static_cast<uint32_t>(piece_blocks_ * BLOCK_BYTES));
        last_blocks_ = NewTensor<uint8_t>(pipe, int64_t{2} * MAX_VISIT * BLOCK_BYTES);
        double_buffer_.Init(pipe);
        plan_.Init(&args_, pipe, &report_, blocks_);
        status_.Init(&args_, pipe, blocks_);
        begun_.Init(pipe, args.begun);
    }

    __aicore__ inline void Process() {
        begun_.Raise();
        if (args_.post_status != 0) {
            status_.Post();
        }
        TraceStep(TRACE_WRITE_AND_FLAG);
        FillFlags();
        plan_.BeginShare();
        Visit visit;
        while (plan_.Next(visit)) {
            SendRow(visit);
        }
        double_buffer_.Finish();
        report_.Write();
    }

private:
    static constexpr int64_t MAX_PIECE_BLOCKS = 96;

    // Once: loads of rows leave the gaps between their pieces as they are.
    __aicore__ inline void FillFlags() {
        for (uint32_t i = 0; i < 2; ++i) {
            AscendC::LocalTensor<float> piece = pieces_.AllocTensor<float>();
            FillFlagsOf(piece, static_cast<uint32_t>(piece_blocks_));
            pieces_.EnQue(piece);
        }
        FillFlagsOf(last_blocks_.template ReinterpretCast<float>(), 2 * MAX_VISIT);
        Order<AscendC::HardEvent::V_MTE3>();
        for (uint32_t i = 0; i < 2; ++i) {
            AscendC::LocalTensor<float> piece = pieces_.DeQue<float>();
            pieces_.FreeTensor(piece);
        }
    }

    __aicore__ inline void FillFlagsOf(const AscendC::LocalTensor<float>& blocks, uint32_t num_blocks) {
        constexpr uint32_t FIRST_FLAG = BLOCK_DATA_BYTES / sizeof(float);
        AscendC::Duplicate(blocks[FIRST_FLAG], 1.0f, static_cast<uint64_t>(FLAG_WORDS),
                           static_cast<uint8_t>(num_blocks), 1, static_cast<uint8_t>(BLOCK_UNITS));
    }

    __aicore__ inline void SendRow(const Visit& visit) {
        for (int64_t block = 0; block < last_block_; block += piece_blocks_) {
            SendSharedBlocks(visit, block, Smaller(piece_blocks_, last_block_ - block));
        }
        SendLastBlocks(visit);
    }

    // Blocks that are the same in every slot of the visit.
    __aicore__ inline void SendSharedBlocks(const Visit& visit, int64_t block, int64_t count) {
        AscendC::LocalTensor<uint8_t> in = pieces_.AllocTensor<uint8_t>();
        LoadBlocks(in, visit.row, block, count);
        pieces_.EnQue(in);
        AscendC::LocalTensor<uint8_t> out = pieces_.DeQue<uint8_t>();
        for (uint32_t i = 0; i < visit.num_slots; ++i) {
            CopyBlocksInOrder(BlockOf(visit.slots[i], block), out, static_cast<uint32_t>(count));
        }
        pieces_.FreeTensor(out);
    }

    // The last block holds the stamp and so is another one in every slot. What a row has at its stamp's place is its
    // scale: it is there before the stamp is written around it.
    __aicore__ inline void SendLastBlocks(const Visit& visit) {
        const uint32_t half = double_buffer_.Take();
        const uint32_t stamp_at =
            static_cast<uint32_t>(args_.stamp_offset - last_block_ * static_cast<int64_t>(BLOCK_DATA_BYTES));
        for (uint32_t i = 0; i < visit.num_slots; ++i) {
            LoadBlocks(LastBlock(half, i), visit.row, last_block_, 1);
        }
        Order<AscendC::HardEvent::MTE2_S>();
        for (uint32_t i = 0; i < visit.num_slots; ++i) {
            plan_.WriteStamp(LastBlock(half, i)[stamp_at].template ReinterpretCast<int32_t>(), visit, i);
        }
        Order<AscendC::HardEvent::S_MTE3>();
        for (uint32_t i = 0; i < visit.num_slots; ++i) {
            CopyBlocksInOrder(BlockOf(visit.slots[i], last_block_), LastBlock(half, i), 1);
        }
        double_buffer_.Give();
    }

    // What the row has for these blocks, each piece to its block.
    __aicore__ inline void LoadBlocks(const AscendC::LocalTensor<uint8_t>& blocks, uint64_t row, int64_t first,
                                      int64_t count) {
        const int64_t data_bytes = static_cast<int64_t>(BLOCK_DATA_BYTES);
        const int64_t begin = first * data_bytes;
        const int64_t bytes = Smaller(count * data_bytes, args_.row_bytes - begin);
        const uint64_t source = row + begin;
        const int64_t whole = bytes > 0 ? bytes / data_bytes : 0;
        if (whole > 0) {
            const AscendC::DataCopyExtParams spread{static_cast<uint16_t>(whole), BLOCK_DATA_BYTES, 0, 1, 0};
            AscendC::DataCopyPad(blocks, GlobalAt<uint8_t>(source), spread, NoPadding<uint8_t>());
        }
        if (bytes > whole * data_bytes) {
            AscendC::DataCopy(blocks[whole * static_cast<int64_t>(BLOCK_BYTES)],
                              GlobalAt<uint8_t>(source + whole * data_bytes),
                              static_cast<uint32_t>(bytes - whole * data_bytes));
        }
    }

    __aicore__ inline AscendC::LocalTensor<uint8_t> LastBlock(uint32_t half, uint32_t i) const {
        return last_blocks_[(half * MAX_VISIT + i) * BLOCK_BYTES];
    }

    __aicore__ inline AscendC::GlobalTensor<uint8_t> BlockOf(uint64_t slot, int64_t block) const {
        return GlobalAt<uint8_t>(slot + static_cast<uint64_t>(block) * BLOCK_BYTES);
    }

    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> pieces_;
    AscendC::LocalTensor<uint8_t> last_blocks_;
    DoubleBuffer double_buffer_;
    SendPlan<InbandSendArgs> plan_;
    DispatchStatusPost<InbandSendArgs> status_;
    BegunBlocks begun_;
    int64_t last_block_ = 0;
    int64_t piece_blocks_ = 1;
};

}  // namespace moe
