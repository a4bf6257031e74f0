"""Wrong kernels again: rows with flags in band."""

from __future__ import annotations

from .library import Patch
from .mutants import (
    FETCHED,
    ROW_COPY,
    Mutant,
    case_of,
    without,
)

INBAND_SEND = "include/inband_send.h"
INBAND_RECEIVE = "include/inband_receive.h"
PLATFORM = "include/platform.h"

_INBAND = case_of(inband=True, hidden=900, scaled=True, tokens=(3, 3))
# More blocks to a row: one of them is later than the last one more often.
_LONG_ROWS = case_of(inband=True, hidden=6000, scaled=True, tokens=(3, 3))
_INBAND_TIMED = case_of(inband=True, hidden=300, scaled=True, timed=True, straggle=0.4)
_ONE_BLOCK_SLOTS = case_of(inband=True, hidden=128, tokens=(2, 2), topk=1, blocks=1, schedule="D", rounds=8)

INBAND_MUTANTS = (
    Mutant(
        "blocks copied in no order",
        (
            Patch(
                PLATFORM,
                "    emulation::CopyBlocksInOrder(to, from, blocks, BLOCK_BYTES, BLOCK_DATA_BYTES);\n",
                "    AscendC::DataCopy(to, from, blocks * BLOCK_BYTES);\n",
            ),
        ),
        _ONE_BLOCK_SLOTS,
    ),
    Mutant(
        "the last block's stamp after its flag",
        (
            Patch(
                INBAND_SEND,
                "        double_buffer_.Give();\n",
                # A pause that a block may make anywhere, here on one rank, so that the other is ahead.
                "        AscendC::PipeBarrier<PIPE_ALL>();\n"
                "        for (uint32_t nap = 0; args_.rank == 1 && nap < 40; ++nap) PollPause(30000, 0, 1);\n"
                "        for (uint32_t i = 0; i < visit.num_slots; ++i) {\n"
                "            plan_.WriteStamp(\n"
                "                LastBlock(half, i)[stamp_at].template ReinterpretCast<int32_t>(), visit, "
                "i);\n"
                "        }\n"
                "        Order<AscendC::HardEvent::S_MTE3>();\n"
                "        for (uint32_t i = 0; i < visit.num_slots; ++i) {\n"
                "            CopyBlocksInOrder(BlockOf(visit.slots[i], last_block_), LastBlock(half, i), "
                "1);\n"
                "        }\n"
                "        double_buffer_.Give();\n",
            ),
            Patch(
                INBAND_SEND,
                "            plan_.WriteStamp(LastBlock(half, i)[stamp_at].template "
                "ReinterpretCast<int32_t>(), visit, i);\n",
                "",
            ),
        ),
        _INBAND,
    ),
    Mutant(
        "gaps between blocks without flags",
        (without(INBAND_SEND, "            FillFlagsOf(piece, static_cast<uint32_t>(piece_blocks_));\n"),),
        case_of(inband=True, hidden=900, rounds=1, tokens=(2, 2)),
    ),
    Mutant(
        "blocks sent before their flags are filled in",
        (without(INBAND_SEND, "        Order<AscendC::HardEvent::V_MTE3>();\n"),),
        _INBAND,
    ),
    Mutant(
        "the last block stamped before its tail is loaded",
        (without(INBAND_SEND, "        Order<AscendC::HardEvent::MTE2_S>();\n"),),
        _INBAND,
    ),
    Mutant(
        "the last block sent before its stamp is written",
        (
            Patch(
                INBAND_SEND,
                "        Order<AscendC::HardEvent::S_MTE3>();\n",
                "        Order<AscendC::HardEvent::MTE2_MTE3>();\n",
            ),
        ),
        _INBAND,
    ),
    Mutant(
        "last blocks used again while they are sent",
        (
            Patch(
                ROW_COPY,
                "            AscendC::WaitFlag<AscendC::HardEvent::MTE3_S>(free_[waited_ % 2]);\n"
                "            ++waited_;\n        }\n        return",
                "        }\n        return",
            ),
            Patch(
                ROW_COPY,
                "        AscendC::SetFlag<AscendC::HardEvent::MTE3_S>(free_[given_ % 2]);\n",
                "",
            ),
            Patch(
                ROW_COPY,
                "            AscendC::WaitFlag<AscendC::HardEvent::MTE3_S>(free_[waited_ % 2]);\n        }\n"
                "        pipe_->",
                "        }\n        pipe_->",
            ),
        ),
        # Rows of one block: no other piece keeps a sender from the next ones.
        case_of(inband=True, hidden=200, scaled=True, tokens=(8, 8), blocks=1, rounds=1),
    ),
    Mutant(
        "the shared pieces' buffer used by two loads",
        (
            Patch(
                INBAND_SEND,
                "        pieces_.EnQue(in);\n"
                "        AscendC::LocalTensor<uint8_t> out = pieces_.DeQue<uint8_t>();\n"
                "        for (uint32_t i",
                "        AscendC::LocalTensor<uint8_t> out = in;\n        for (uint32_t i",
            ),
        ),
        _INBAND,
    ),
    Mutant(
        "a piece of a row one block short",
        (
            Patch(
                INBAND_SEND,
                "BLOCK_DATA_BYTES, 0, 1, 0};",
                "BLOCK_DATA_BYTES, 0, 0, 0};",
            ),
        ),
        _INBAND,
    ),
    Mutant(
        "rows taken without waiting",
        (
            Patch(
                INBAND_RECEIVE,
                "            if (seen == num_rows_ * static_cast<int64_t>(words_)) {\n",
                "            if (seen >= 0) {\n",
            ),
        ),
        _INBAND,
    ),
    Mutant(
        "only the last block's flag waited for",
        (
            Patch(
                INBAND_RECEIVE,
                "            const int64_t seen = LookAtRows(0, num_rows_);\n",
                "            LookAtRows(0, num_rows_);\n"
                "            int64_t seen = 0;\n"
                "            for (int64_t i = 0; i < num_rows_; ++i) {\n"
                "                const int64_t end = (i + 1) * static_cast<int64_t>(words_);\n"
                "                seen += words_ / 8 * flags_.SumWords(static_cast<uint32_t>(end - 8), 8);\n"
                "            }\n",
            ),
        ),
        _LONG_ROWS,
    ),
    Mutant(
        "flags not cleared",
        (without(INBAND_RECEIVE, "            ClearFlags(slots_[i]);\n"),),
        case_of(inband=True, hidden=300, schedule="D", rounds=4),
    ),
    Mutant(
        "one block's flag left",
        (
            Patch(
                INBAND_RECEIVE,
                "scatter{static_cast<uint16_t>(num_blocks_),",
                "scatter{static_cast<uint16_t>(num_blocks_ - 1),",
            ),
        ),
        _INBAND,
    ),
    Mutant(
        "data read before the flags",
        (
            Patch(
                INBAND_RECEIVE,
                "    __aicore__ inline bool WaitForRows() {\n",
                "    __aicore__ inline bool WaitForRows() {\n"
                "        for (int64_t i = 0; i < num_rows_; ++i) {\n"
                "            CopyRow(slots_[i], args_.out_rows + args_.row_bytes * (first_row_ + i));\n"
                "        }\n",
            ),
            without(
                INBAND_RECEIVE,
                "                CopyRow(slots_[i], args_.out_rows + static_cast<uint64_t>(place) * "
                "args_.row_bytes);\n",
            ),
        ),
        _INBAND,
    ),
    Mutant(
        "data and flags read in one copy",
        (
            Patch(
                INBAND_RECEIVE,
                "    __aicore__ inline bool WaitForRows() {\n",
                "    __aicore__ inline bool WaitForRows() {\n"
                "        Order<AscendC::HardEvent::MTE3_MTE2>();\n"
                "        for (PollLoop poll(deadline_, args_.window); poll.Next();) {\n"
                "            AscendC::DataCopy(whole_, GlobalAt<float>(slots_[0]), num_blocks_ * 128);\n"
                "            Order<AscendC::HardEvent::MTE2_S>();\n"
                "            int64_t there = 0;\n"
                "            for (int64_t b = 0; b < num_blocks_; ++b) {\n"
                "                there += whole_.GetValue(b * 128 + 127) == 1.0f;\n"
                "            }\n"
                "            if (there == num_blocks_) {\n"
                "                return true;\n"
                "            }\n"
                "        }\n"
                "        return false;\n"
                "    }\n\n"
                "    __aicore__ inline bool WaitForOthers() {\n",
            ),
            Patch(
                INBAND_RECEIVE,
                "                CopyRow(slots_[i], args_.out_rows + static_cast<uint64_t>(place) * "
                "args_.row_bytes);\n",
                "            for (int64_t b = 0; b * 480 < args_.row_bytes; ++b) {\n"
                "                const AscendC::DataCopyExtParams bytes =\n"
                "                    ExactBytes(Smaller<int64_t>(480, args_.row_bytes - b * 480));\n"
                "                AscendC::DataCopyPad(\n"
                "                    GlobalAt<float>(args_.out_rows + (first_row_ + i) * args_.row_bytes + "
                "b * 480),\n"
                "                    whole_[b * 128], bytes);\n"
                "            }\n",
            ),
            Patch(
                INBAND_RECEIVE,
                "        piece_blocks_ = ",
                "        max_rows_ = 1;\n"
                "        pipe->InitBuffer(whole_buffer_, num_blocks_ * 512);\n"
                "        whole_ = whole_buffer_.Get<float>();\n"
                "        piece_blocks_ = ",
            ),
            Patch(
                INBAND_RECEIVE,
                "    Table offsets_;\n",
                "    AscendC::TBuf<AscendC::TPosition::VECCALC> whole_buffer_;\n"
                "    AscendC::LocalTensor<float> whole_;\n"
                "    Table offsets_;\n",
            ),
        ),
        _ONE_BLOCK_SLOTS,
    ),
    Mutant(
        "a row's scales as if they lay in one block",
        (
            Patch(
                INBAND_RECEIVE,
                "Smaller(DATA_BYTES - at % DATA_BYTES, bytes - done)",
                "bytes - done",
            ),
        ),
        case_of(inband=True, hidden=900, scaled=True, num_scales=57, tokens=(3, 3)),
    ),
    Mutant(
        "scales and stamps stored before they are loaded",
        (without(INBAND_RECEIVE, "        Order<AscendC::HardEvent::MTE2_MTE3>();\n"),),
        _INBAND,
    ),
    Mutant(
        "scales and stamps loaded over those being stored",
        (without(INBAND_RECEIVE, "        Order<AscendC::HardEvent::MTE3_MTE2>();\n"),),
        # 34 rows: two of them in a second batch.
        case_of(inband=True, hidden=300, scaled=True, tokens=(9, 8), skewed=True, blocks=1, rounds=4),
    ),
    Mutant("offsets read before they are loaded", (FETCHED,), _INBAND),
    Mutant(
        "rows put by whole 32 bytes",
        (
            Patch(
                INBAND_RECEIVE,
                "(to + done), out, ExactBytes(bytes));",
                "(to + done), out, ExactBytes((bytes + 31) / 32 * 32));",
            ),
        ),
        case_of(inband=True, hidden=241, tokens=(3, 3)),
    ),
    Mutant(
        "blocks' gaps taken for data",
        (
            Patch(
                INBAND_RECEIVE,
                "gather{static_cast<uint16_t>(NumBlocks(bytes)), BLOCK_DATA_BYTES, UB_ALIGN,",
                "gather{static_cast<uint16_t>(NumBlocks(bytes)), BLOCK_DATA_BYTES, 0,",
            ),
        ),
        _INBAND,
    ),
    Mutant(
        "times of other entries raised",
        (Patch(INBAND_RECEIVE, "        waited_.Load(first, last - first);\n", ""),),
        _INBAND_TIMED,
    ),
)
