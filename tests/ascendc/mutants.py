"""Wrong kernels: each the true one with a few lines changed, and a case in which the change matters."""

from __future__ import annotations

from dataclasses import dataclass

from .announced import CallCase, TablesCase
from .case import Case
from .exchange import ExchangeCase
from .library import Patch
from .offsets import OffsetsCase

DISPATCH_SEND = "include/dispatch_send.h"
DISPATCH_WAIT = "include/dispatch_wait.h"
DISPATCH_ROWS = "include/dispatch_rows.h"
ENTRY_ORDER = "include/entry_order.h"
COMBINE_SEND = "include/combine_send.h"
COMBINE_WAIT = "include/combine_wait.h"
RESULT_FLAGS = "include/result_flags.h"
SEND_PLAN = "include/send_plan.h"
SEND_ROWS = "include/send_rows.h"
ROW_COPY = "include/row_copy.h"
STATUS_ENTRIES = "include/status_entries.h"
WAITS = "include/waits.h"
FLAGS = "include/flags.h"

AnyCase = Case | ExchangeCase | OffsetsCase | CallCase | TablesCase

# A wait that can no longer end should not take long to say so; the true kernels pass with it too.
MUTANT_TIMEOUT_US = 1_000_000


@dataclass(frozen=True)
class Mutant:
    """A wrong kernel.

    Attributes:
        name: what is wrong.
        patches: the changes.
        case: what to run it on.
        may_crash: it takes for tokens' numbers what lay in memory before, and can read anywhere.
    """

    name: str
    patches: tuple[Patch, ...]
    case: AnyCase
    may_crash: bool = False


def without(file: str, line: str) -> Patch:
    """Removes a line."""
    return Patch(file, line, "")


def case_of(**changes: object) -> Case:
    """The usual case, with a deadline that suits mutants."""
    defaults: dict[str, object] = {"tokens": (4, 4), "hidden": 512, "rounds": 3}
    return Case(**{**defaults, **changes, "timeout_us": MUTANT_TIMEOUT_US})  # type: ignore[arg-type]


_NO_WAIT_FOR_FLAGS = """\
        Order<AscendC::HardEvent::MTE2_S>();
    }

    int32_t number_ = 0;  // of the round
"""
# Of a table that is loaded by itself.
FETCHED = Patch(
    FLAGS,
    "        Load(address, first, count);\n        Order<AscendC::HardEvent::MTE2_S>();\n",
    "        Load(address, first, count);\n",
)

MUTANTS = (
    Mutant(
        "no PipeBarrier<PIPE_MTE3> before a flag",
        (without(COMBINE_SEND, "        AscendC::PipeBarrier<PIPE_MTE3>();\n"),),
        case_of(blocks=1),
    ),
    Mutant(
        "no EnQue",
        (without(ROW_COPY, "            rows_.EnQue(in);\n"),),
        case_of(),
    ),
    Mutant(
        "neither EnQue nor DeQue",
        (
            Patch(
                ROW_COPY,
                "            rows_.EnQue(in);\n"
                "            AscendC::LocalTensor<uint8_t> out = rows_.DeQue<uint8_t>();\n",
                "            AscendC::LocalTensor<uint8_t> out = in;\n",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "no MTE2_S wait before reading origins",
        (FETCHED,),
        case_of(),
    ),
    Mutant(
        "no MTE2_V wait before summing flags",
        (without(WAITS, "        Order<AscendC::HardEvent::MTE2_V>();\n"),),
        case_of(inband=True, tokens=(40, 40), blocks=1),
    ),
    Mutant(
        "no MTE2_S wait before looking at flags of results",
        (Patch(COMBINE_WAIT, _NO_WAIT_FOR_FLAGS, _NO_WAIT_FOR_FLAGS.partition("\n")[2]),),
        case_of(),
    ),
    Mutant(
        "flags of any round count",
        (Patch(RESULT_FLAGS, "StatusEntry::FLAG)) == number_;", "StatusEntry::FLAG)) != 0;"),),
        case_of(rounds=6, straggle=0.5),
    ),
    Mutant(
        "flags of any round count in parts",
        (Patch(RESULT_FLAGS, "StatusEntry::FLAG)) == number_;", "StatusEntry::FLAG)) != 0;"),),
        case_of(tokens=(9, 8), part_tokens=3, hidden=64, rounds=6, straggle=0.5),
    ),
    Mutant(
        "a round's number not kept",
        (without(COMBINE_WAIT, "        KeepNumber(args_, number_);\n"),),
        case_of(rounds=6, straggle=0.5),
    ),
    Mutant(
        "a round's number kept in its own zone",
        (Patch(FLAGS, "(1 - args.zone)", "args.zone"),),
        case_of(rounds=6, blocks=3),
    ),
    Mutant(
        "results that nobody expects are waited for",
        (Patch(RESULT_FLAGS, "missing += HasBit(expected, k) && ", "missing += "),),
        case_of(absent=0.3),
    ),
    Mutant(
        "no V_S wait before reading the sum",
        (without(WAITS, "        Order<AscendC::HardEvent::V_S>();\n"),),
        case_of(),
    ),
    Mutant(
        "no V_MTE3 wait before clearing",
        (without(DISPATCH_WAIT, "        Order<AscendC::HardEvent::V_MTE3>();\n"),),
        case_of(),
    ),
    Mutant(
        "no V_MTE3 wait before the first flag",
        (without(COMBINE_SEND, "        Order<AscendC::HardEvent::V_MTE3>();\n"),),
        case_of(),
    ),
    Mutant(
        "no S_MTE3 wait before sending stamps",
        (
            Patch(
                SEND_ROWS,
                "        Order<AscendC::HardEvent::S_MTE3>();\n        rows_.Copy(",
                "        rows_.Copy(",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "a SetFlag that nothing waits for",
        (
            Patch(
                ROW_COPY,
                "        for (; waited_ < given_; ++waited_) {\n",
                "        for (; waited_ + 1 < given_; ++waited_) {\n",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "a WaitFlag that nothing sets",
        (
            without(
                ROW_COPY,
                "        AscendC::SetFlag<AscendC::HardEvent::MTE3_S>(free_[given_ % 2]);\n",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "a tensor never freed",
        (without(ROW_COPY, "            rows_.FreeTensor(out);\n"),),
        case_of(tokens=(1, 1), topk=1, blocks=1),
    ),
    Mutant(
        "UB overflow",
        (
            Patch(
                ROW_COPY,
                "pipe->InitBuffer(rows_, 2, static_cast<uint32_t>(piece_bytes_));",
                "pipe->InitBuffer(rows_, 2, 96 * 1024);",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "a buffer too short for the copy",
        (
            Patch(
                ROW_COPY,
                "pipe->InitBuffer(rows_, 2, static_cast<uint32_t>(piece_bytes_));",
                "pipe->InitBuffer(rows_, 2, static_cast<uint32_t>(piece_bytes_ / 2));",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "a count that is not 32 bytes",
        (Patch(COMBINE_SEND, "flag_, STATUS_ENTRY_WORDS, 1);", "flag_, 1, 1);"),),
        case_of(),
    ),
    Mutant(
        "counts stored by whole 32 bytes",
        (
            Patch(
                ENTRY_ORDER,
                "static constexpr uint32_t LENGTH = sizeof(int32_t);",
                "static constexpr uint32_t LENGTH = UB_ALIGN;",
            ),
        ),
        case_of(blocks=2),
    ),
    Mutant(
        "counts in the order of the window",
        (
            Patch(
                ENTRY_ORDER,
                "return ExpertAt(place) * num_ranks_ + SourceAt(place);",
                "return place;",
            ),
        ),
        case_of(blocks=5, tokens=(4, 4, 4), experts_per_rank=3),
    ),
    Mutant(
        "counts of many entries in the order of the window",
        (
            Patch(
                ENTRY_ORDER,
                "const uint32_t gap = static_cast<uint32_t>(num_experts_ - 1);",
                "const uint32_t gap = 0;",
            ),
        ),
        case_of(blocks=1),
    ),
    Mutant(
        "entries of shared ranks as far apart as those of others",
        (Patch(STATUS_ENTRIES, "routed < 0 ? 1 : LocalExperts()", "LocalExperts()"),),
        case_of(tokens=(4, 4, 4), shared=(1, 1), hidden=64),
    ),
    Mutant(
        "one flag for all entries of a rank",
        (
            Patch(
                STATUS_ENTRIES,
                "        for (int64_t i = 0; i < last - first; ++i) {\n            entries_.Set(",
                "        for (int64_t i = 0; i < last - first; i += 2) {\n            entries_.Set(",
            ),
        ),
        case_of(blocks=1),
    ),
    Mutant(
        "zeros over words on their way to a table",
        (without(DISPATCH_WAIT, "        Order<AscendC::HardEvent::MTE3_V>();\n"),),
        case_of(),
    ),
    Mutant(
        "entries cleared before other blocks have seen them",
        (Patch(DISPATCH_WAIT, "same_call && !WaitsForAll()) {", "same_call) {"),),
        case_of(blocks=2),
    ),
    Mutant(
        "a zone used again too early",
        (Patch(FLAGS, "        FindZone(args_);\n", "        args_.zone = 0;\n"),),
        case_of(schedule="D", rounds=6, straggle=0.5, slots_read_from=0),
    ),
    Mutant(
        "flags looked at through the scalar cache",
        (
            Patch(
                COMBINE_WAIT,
                "        AscendC::DataCopy(flags_.Entries(), GlobalAt<int32_t>(address),\n"
                "                          static_cast<uint32_t>(num_results_ * STATUS_ENTRY_WORDS));\n",
                "        for (uint32_t i = 0; i < num_results_ * STATUS_ENTRY_WORDS; ++i)\n"
                "            flags_.Entries().SetValue(i, GlobalAt<int32_t>(address).GetValue(i));\n",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "an event id beyond the eighth",
        (
            Patch(
                FLAGS,
                "    const AscendC::TEventID id = GetTPipePtr()->FetchEventID(event);\n",
                "    const AscendC::TEventID id = 8;\n",
            ),
        ),
        case_of(),
    ),
)
