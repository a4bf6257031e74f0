"""Wrong kernels of the direct scheme: where rows begin, tables for later steps, phases of one launch."""

from __future__ import annotations

from .direct_missing import MissingCountsCase
from .library import Patch
from .mutants import Mutant, without
from .mutants_direct import DIRECT_SEND, DIRECT_STARTS, case_of

PHASES, FUSED = (f"include/{name}.h" for name in ("phases", "moe_fused"))

_RANKS = case_of(tokens=(4, 3, 4), topk=3, experts_per_rank=4, hidden=64)
_CHUNKS = case_of(tokens=(3,) * 5, topk=3, experts_per_rank=300, hidden=32, rounds=1)
_SHARED = case_of(tokens=(3, 2, 3, 2), shared=(2, 2), hidden=64)
_BLOCKS = case_of(tokens=(4, 4), schedule="D", blocks=3, rounds=4)
_MISSING = MissingCountsCase(tokens=(4, 4, 4), timeout_us=20_000, blocks=2)
_WHOLE_ROWS = "AscendC::Mins(rows_, rows_, static_cast<int32_t>(args_->max_count), words);\n"
_BARRIER = "        AscendC::PipeBarrier<PIPE_V>();\n"

STARTS = (
    Mutant(
        "own rows counted among those of earlier sources",
        (Patch(DIRECT_STARTS, "args_->rank - first), number)", "args_->rank + 1 - first), number)"),),
        _RANKS,
    ),
    Mutant(
        "earlier sources counted from the chunk's first",
        (Patch(DIRECT_STARTS, "args_->rank - first), number)", "args_->rank), number)"),),
        _CHUNKS,
    ),
    Mutant(
        "the first chunk of sources again",
        (
            Patch(
                DIRECT_STARTS,
                "args_->counts.At(args_->zone, first, 0)",
                "args_->counts.At(args_->zone, 0, 0)",
            ),
        ),
        _CHUNKS,
    ),
    Mutant(
        "counts loaded over those that are being summed",
        (without(DIRECT_STARTS, "        Order<AscendC::HardEvent::V_MTE2>();\n"),),
        _CHUNKS,
    ),
    Mutant(
        "counts summed before they are loaded",
        (without(DIRECT_STARTS, "        Order<AscendC::HardEvent::MTE2_V>();\n"),),
        _RANKS,
    ),
    Mutant(
        "counts of zone 0 in every dispatch",
        (Patch(DIRECT_STARTS, "args_->counts.At(args_->zone, first, 0)", "args_->counts.At(0, first, 0)"),),
        _RANKS,
    ),
    Mutant(
        "counts summed before they are clamped",
        (Patch(DIRECT_STARTS, _WHOLE_ROWS + _BARRIER, _WHOLE_ROWS),),
        _RANKS,
    ),
    Mutant(
        "halves summed before they are sums",
        (
            Patch(
                DIRECT_STARTS,
                "static_cast<int32_t>(half * row_words_));\n            AscendC::PipeBarrier<PIPE_V>();\n",
                "static_cast<int32_t>(half * row_words_));\n",
            ),
        ),
        case_of(tokens=(3, 2, 3, 2, 3), topk=3, hidden=64),
    ),
    Mutant(
        "an odd row lost",
        (Patch(DIRECT_STARTS, "left -= half;", "left = half;"),),
        case_of(tokens=(3, 2, 3, 2, 3), topk=3, hidden=64),
    ),
    Mutant(
        "a receiver's entries summed up again",
        (Patch(DIRECT_STARTS, "if (before >= 0) {", "{"),),
        _RANKS,
    ),
    Mutant(
        "sums go on from one receiver to the next",
        (Patch(DIRECT_STARTS, "SumEntries(static_cast<uint32_t>(first));", "SumEntries(0);"),),
        _SHARED,
    ),
)

_STORE = "        Order<AscendC::HardEvent::S_MTE3>();\n        AscendC::DataCopyPad("

TABLES = (
    Mutant(
        "result offsets in bytes",
        (Patch(DIRECT_SEND, "ELEMENT_BYTES = 2;", "ELEMENT_BYTES = 1;"),),
        _RANKS,
    ),
    Mutant(
        "result offsets of the first tokens of a share only",
        (Patch(DIRECT_SEND, "token < share.last; token += per_chunk", "token < share.first + 1; ++token"),),
        case_of(tokens=(150, 90), topk=8, experts_per_rank=8, hidden=32, rounds=1),
    ),
    Mutant(
        "shared results at the places of routed ones",
        (
            Patch(
                DIRECT_SEND,
                "Of(args, rank, 0, shared_slots_.At(token)",
                "Of(args, 0, 0, 0",
            ),
        ),
        _SHARED,
    ),
    Mutant(
        "result offsets stored before they are written",
        (
            Patch(
                DIRECT_SEND,
                "        Order<AscendC::HardEvent::S_MTE3>();\n        constexpr int64_t OFFSET_BYTES",
                "        constexpr int64_t OFFSET_BYTES",
            ),
        ),
        _RANKS,
    ),
    Mutant(
        "counts by source, not by expert",
        (Patch(DIRECT_SEND, "i * sources + s)", "s * entries + i)"),),
        _RANKS,
    ),
    Mutant(
        "counts of the first rank that has experts",
        (
            Patch(
                DIRECT_SEND,
                "first_entry_ = is_shared ? args->rank : args->num_shared_ranks + routed;",
                "first_entry_ = args->num_shared_ranks + 0 * routed;",
            ),
        ),
        _RANKS,
    ),
    Mutant(
        "counts stored before they are written",
        (
            Patch(
                DIRECT_SEND,
                _STORE + "GlobalAt<int32_t>(args_->recv_counts)",
                "        AscendC::DataCopyPad(GlobalAt<int32_t>(args_->recv_counts)",
            ),
        ),
        _RANKS,
    ),
)

_SEND = "run.template Phase<DirectSend>(2, args.phase_2, "
_POST = "run.template Phase<PostStatus>(3, args.phase_3, "

PHASE_ORDER = (
    Mutant(
        "rows sent before every block has seen its counts",
        (Patch(FUSED, f"{_SEND}true,", f"{_SEND}false,"),),
        _BLOCKS,
    ),
    Mutant(
        "rows announced before every block has sent its own",
        (Patch(FUSED, f"{_POST}true,", f"{_POST}false,"),),
        _BLOCKS,
    ),
    Mutant(
        "a phase begins before the copies of the one before are complete",
        (without(PHASES, "        AscendC::PipeBarrier<PIPE_ALL>();\n"),),
        _BLOCKS,
    ),
    Mutant(
        "no phase gives its memory back",
        (without(PHASES, "        pipe_->Reset();\n"),),
        case_of(tokens=(2, 2), hidden=32 * 1024, rounds=1),
    ),
    Mutant(
        "rows sent although counts are missing",
        (Patch(FUSED, f"{_SEND}true, true", f"{_SEND}true, false"),),
        _MISSING,
    ),
    Mutant(
        "rows announced that were not sent",
        (Patch(FUSED, f"{_POST}true, true", f"{_POST}true, false"),),
        _MISSING,
    ),
    Mutant(
        "only the first block's report looked at",
        (Patch(PHASES, "block < blocks; ++block", "block < 1; ++block"),),
        MissingCountsCase(tokens=(4, 4, 4), timeout_us=20_000, blocks=3),
    ),
    Mutant(
        "reports read before they are loaded",
        (without(PHASES, "        Order<AscendC::HardEvent::MTE2_S>();\n"),),
        _BLOCKS,
    ),
)

PLACE_MUTANTS = STARTS + TABLES + PHASE_ORDER
