"""Wrong flags of a dispatch's rows."""

from __future__ import annotations

from .library import Patch
from .mutants import DISPATCH_ROWS, DISPATCH_WAIT, SEND_PLAN, SEND_ROWS, WAITS, Mutant, case_of, without

ROW_FLAGS, DISPATCH_TAKE = "include/row_flags.h", "include/dispatch_take.h"
_PARTS = case_of(takes=2, rounds=4, straggle=0.5)
_TIMED = case_of(timed=True, rounds=4, straggle=0.5)
_SCALARS_LOAD = "            Order<AscendC::HardEvent::S_MTE2>();\n"
_SCALARS_ZERO = "            Order<AscendC::HardEvent::S_V>();\n"

_FINISH = "        if constexpr (IS_FLAGGED) {\n            FinishRow();\n        }\n"

ROW_MUTANTS = (
    Mutant(
        "no PipeBarrier<PIPE_MTE3> before a row's flag",
        (without(SEND_ROWS, "        AscendC::PipeBarrier<PIPE_MTE3>();\n"),),
        case_of(blocks=1),
    ),
    Mutant(
        "the barrier behind a row's flag",
        (
            without(SEND_ROWS, _FINISH),
            Patch(
                SEND_ROWS,
                "        double_buffer_.Give();\n",
                f"{_FINISH}        double_buffer_.Give();\n",
            ),
        ),
        case_of(blocks=1),
    ),
    Mutant(
        "rows sent to where this rank has them itself",
        (Patch(SEND_PLAN, "args.slots.AtOn(rank, zone, source", "args.slots.At(zone, source"),),
        case_of(),
    ),
    Mutant(
        "rows in band sent to where this rank has them itself",
        (Patch(SEND_PLAN, "args.slots.AtOn(rank, zone, source", "args.slots.At(zone, source"),),
        case_of(inband=True),
    ),
    Mutant(
        "rows not waited for",
        (Patch(DISPATCH_ROWS, "if (seen == num_stamps_) {\n", "if (seen >= 0) {\n"),),
        case_of(rounds=6),
    ),
    Mutant(
        "one row less waited for",
        (Patch(DISPATCH_ROWS, "if (seen == num_stamps_) {\n", "if (seen >= num_stamps_ - 1) {\n"),),
        case_of(rounds=6),
    ),
    Mutant(
        "flags of rows not cleared",
        (Patch(DISPATCH_ROWS, "                flags_.Clear(piece.stamp, piece.count);\n", ""),),
        case_of(),
    ),
    Mutant(
        "a flag less cleared",
        (
            Patch(
                ROW_FLAGS,
                "Smaller(MAX_CLEARED, count - first)",
                "Smaller(MAX_CLEARED, count - 1)",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "more than the flag cleared",
        (
            Patch(
                ROW_FLAGS,
                "{number, FLAG_BYTES, 0, gap, 0});",
                "{number, STAMP_BYTES, 0, gap + FLAG_BYTES - STAMP_BYTES, 0});",
            ),
            Patch(ROW_FLAGS, "args_->slots.index_stride + FLAG_AT;", "args_->slots.index_stride;"),
        ),
        case_of(),
    ),
    Mutant(
        "counts of rows used before they are there",
        (
            Patch(
                ROW_FLAGS,
                "counts_, places);\n        Order<AscendC::HardEvent::MTE2_S>();\n",
                "counts_, places);\n",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "stamps loaded over those that scalar code reads",
        (without(DISPATCH_ROWS, _SCALARS_LOAD),),
        _TIMED,
    ),
    Mutant(
        "stamps of a part loaded over those that scalar code reads",
        (Patch(DISPATCH_TAKE, f"{_SCALARS_LOAD}            flags_", "            flags_"),),
        # Eight rows of each source: behind a look's stamps there is nothing to make zero.
        case_of(tokens=(8, 8), experts_per_rank=1, blocks=1, takes=2, rounds=4, straggle=0.5),
    ),
    Mutant(
        "zeros over stamps that scalar code reads",
        (without(ROW_FLAGS, _SCALARS_ZERO),),
        _PARTS,
    ),
    Mutant(
        "entries loaded over those that scalar code reads",
        (without(DISPATCH_WAIT, _SCALARS_LOAD),),
        _TIMED,
    ),
    Mutant(
        "a sum of flags over one that scalar code reads",
        (without(WAITS, "        Order<AscendC::HardEvent::S_V>();\n"),),
        case_of(inband=True),
    ),
    Mutant(
        "a tensor of a buffer that was given no memory",
        (
            Patch(
                ROW_FLAGS,
                "            waited_.Load(0, count);\n",
                "            time_buffer_.Get<int32_t>();\n            waited_.Load(0, count);\n",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "rows taken behind one that has not come",
        (Patch(DISPATCH_TAKE, "missing == 0 ? count : CountFirst()", "count - missing"),),
        _PARTS,
    ),
    Mutant(
        "rows taken that have not come",
        (Patch(DISPATCH_TAKE, "missing == 0 ? count : CountFirst()", "count"),),
        _PARTS,
    ),
    Mutant(
        "rows that are taken keep their flags",
        (Patch(DISPATCH_TAKE, "                flags_.Clear(stamp, there);\n", ""),),
        _PARTS,
    ),
    Mutant(
        "a last part that does not wait",
        (
            Patch(
                DISPATCH_TAKE,
                "            if (args_.part + 1 == args_.num_parts) {\n",
                "            if (false) {\n",
            ),
        ),
        _PARTS,
    ),
    Mutant(
        "each part begins with no row taken",
        (Patch(DISPATCH_TAKE, "        if (args_.part > 0) {\n", "        if (false) {\n"),),
        _PARTS,
    ),
)
