"""Wrong kernels of the block schemes: counts before FLAG1, rows before FLAG2, numbers of rounds, zones."""

from __future__ import annotations

from .blocks_case import BlocksCase
from .blocks_hostile import HostileBlockCase
from .library import Patch
from .mutants import FETCHED, MUTANT_TIMEOUT_US, Mutant, without
from .mutants import FLAGS as FLAGS_FILE

FORMAT = "include/block_format.h"
STARTS = "include/blocks_send.h"
SOURCES = "include/source_starts.h"
RETURN = "include/blocks_return.h"
WAIT = "include/blocks_wait.h"
ROW_SLOTS = "include/offsets.h"
FUSED = "include/moe_fused.h"


def case_of(**changes: object) -> BlocksCase:
    """The usual case, with a deadline that suits mutants."""
    defaults: dict[str, object] = {"tokens": (4, 4), "hidden": 512, "rounds": 3}
    return BlocksCase(**{**defaults, **changes, "timeout_us": MUTANT_TIMEOUT_US})  # type: ignore[arg-type]


_MANY = case_of(experts_per_rank=12, topk=6)
_HOSTILE = HostileBlockCase(tokens=(2, 3, 2), header=4, timeout_us=MUTANT_TIMEOUT_US)
_NEGATIVE = HostileBlockCase(tokens=(2, 3, 2), header=-1, timeout_us=MUTANT_TIMEOUT_US)
_UNFINISHED = HostileBlockCase(tokens=(2, 3, 2), header=0, has_end=False, timeout_us=20_000)
_SENT = "    run.template Phase<BlocksSend>(0, args.phase_0, false, false, false);\n"
_WAITED = "    run.template Phase<BlocksWait>(2, args.phase_2, false, false, false);\n"
_CHECK_HEADER = "flag_.GetValue(word) == number_"

FLAGS = (
    Mutant(
        "no barrier between a block's counts and FLAG1",
        (without(FORMAT, "        AscendC::PipeBarrier<PIPE_MTE3>();\n"),),
        _MANY,
    ),
    Mutant(
        "FLAG2 before other blocks' rows are there",
        (
            Patch(
                FUSED,
                _SENT + "    run.template Phase<BlocksEnd>(1, args.phase_1, true,",
                _SENT + "    run.template Phase<BlocksEnd>(1, args.phase_1, false,",
            ),
        ),
        case_of(tokens=(6, 6), blocks=3, rounds=6),
    ),
    Mutant(
        "FLAG1 believed for FLAG2",
        (
            Patch(
                WAIT,
                " &&\n               IsFlagThere<true>(block + EndOfRows(args_, rows_), rank, left);",
                ";",
            ),
        ),
        case_of(rounds=6, straggle=0.3),
    ),
    Mutant(
        "FLAG2 of any round",
        (Patch(FORMAT, "static_cast<uint32_t>(number) * 0x9E3779B1U", "(number != 0 ? 0x9E3779B1U : 0)"),),
        case_of(rounds=6, straggle=0.4, schedule="D", tokens=(3, 3), topk=1, skewed=True, blocks=1),
    ),
    Mutant(
        "FLAG1 of any round",
        (Patch(WAIT, _CHECK_HEADER, _CHECK_HEADER.replace("== number_", "> 0")),),
        case_of(rounds=6, straggle=0.4),
    ),
    Mutant(
        "one word of FLAG2",
        (
            Patch(
                WAIT,
                "for (uint32_t i = 0; i < UNIT_WORDS; ++i) {\n            if (flag_",
                "for (uint32_t i = 0; i < 0; ++i) {\n            if (flag_",
            ),
        ),
        _UNFINISHED,
    ),
    Mutant(
        "numbers that do not go on",
        (
            without(
                WAIT,
                "        KeepNumber(args_, number_);\n",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "a number that starts as fresh memory",
        (Patch(FLAGS_FILE, "? 1 : before + 1;", "? 1 : before;"),),
        case_of(),
    ),
)

COUNTS = (
    Mutant(
        "a count believed that is too large",
        (Patch(WAIT, "count < 0 || count > args_.max_count", "count < 0"),),
        _HOSTILE,
    ),
    Mutant(
        "a negative count believed",
        (Patch(WAIT, "count < 0 || count > args_.max_count", "count > args_.max_count"),),
        _NEGATIVE,
    ),
    Mutant(
        "counts read before they are loaded",
        (FETCHED,),
        case_of(),
    ),
    Mutant(
        "the header of the next rank over that of this one",
        (without(FORMAT, "        Order<AscendC::HardEvent::MTE3_S>();\n"),),
        case_of(tokens=(3, 2, 4, 1), blocks=1),
    ),
    Mutant(
        "sums before all counts are there",
        (
            Patch(
                FUSED,
                _WAITED + "    run.template Phase<DispatchOffsets>(3, args.phase_3, true,",
                _WAITED + "    run.template Phase<DispatchOffsets>(3, args.phase_3, false,",
            ),
        ),
        case_of(tokens=(4, 4, 4), blocks=3, straggle=0.4),
    ),
)

PLACES = (
    Mutant(
        "rows of experts over one another",
        (Patch(STARTS, "                rows += CountOf(i);\n", ""),),
        case_of(),
    ),
    Mutant(
        "rows looked for from the first expert on",
        (Patch(ROW_SLOTS, "starts_.Of(source_) + index);", "index);"),),
        case_of(),
    ),
    Mutant(
        "rows of earlier blocks' experts left out",
        (
            without(
                SOURCES,
                "                AscendC::Add(starts_, starts_, row, static_cast<int32_t>(num_ranks_));\n",
            ),
        ),
        case_of(tokens=(2,) * 8, experts_per_rank=4, blocks=3, topk=3, hidden=64, rounds=1),
    ),
    Mutant(
        "vector sums read before they are there",
        (
            Patch(
                SOURCES,
                "PipeBarrier<PIPE_V>();\n            }\n            Order<AscendC::HardEvent::V_S>();\n",
                "PipeBarrier<PIPE_V>();\n            }\n",
            ),
        ),
        case_of(tokens=(2,) * 8, experts_per_rank=4, blocks=3, topk=3, hidden=64, rounds=1),
    ),
    Mutant(
        "results one place further",
        (Patch(RETURN, "block + EndOfRows(args_, place)", "block + EndOfRows(args_, place + 1)"),),
        case_of(),
    ),
    Mutant(
        "results of a source over one another",
        (without(RETURN, "                starts_.AddTo(source, end - row);\n"),),
        case_of(),
    ),
    Mutant(
        "the block of another rank",
        (
            Patch(
                FORMAT,
                "SendTo(BlockIn(args, place.window, place.source), flags);",
                "SendTo(BlockIn(args, place.window, rank), flags);",
            ),
        ),
        case_of(),
    ),
)

BLOCKS_MUTANTS = (*FLAGS, *COUNTS, *PLACES)
