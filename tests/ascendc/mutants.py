"""Wrong kernels: each the true one with a few lines changed, and a case in which the change matters."""

from __future__ import annotations

from dataclasses import dataclass

from .case import Case
from .exchange import ExchangeCase
from .library import Patch

DISPATCH_SEND = "include/dispatch_send.h"
DISPATCH_WAIT = "include/dispatch_wait.h"
COMBINE_SEND = "include/combine_send.h"
COMBINE_WAIT = "include/combine_wait.h"
SEND_PLAN = "include/send_plan.h"
SEND_ROWS = "include/send_rows.h"
ROW_COPY = "include/row_copy.h"
STATUS_ENTRIES = "include/status_entries.h"
WAITS = "include/waits.h"
FLAGS = "include/flags.h"

# A wait that can no longer end should not take long to say so; the true kernels pass with it too.
MUTANT_TIMEOUT_US = 1_000_000


@dataclass(frozen=True)
class Mutant:
    """A wrong kernel.

    Attributes:
        name: what is wrong.
        patches: the changes.
        case: what to run it on.
    """

    name: str
    patches: tuple[Patch, ...]
    case: Case | ExchangeCase


def without(file: str, line: str) -> Patch:
    """Removes a line."""
    return Patch(file, line, "")


def case_of(**changes: object) -> Case:
    """The usual case, with a deadline that suits mutants."""
    defaults: dict[str, object] = {"tokens": (4, 4), "hidden": 512, "rounds": 3}
    return Case(**{**defaults, **changes, "timeout_us": MUTANT_TIMEOUT_US})  # type: ignore[arg-type]


_ONE_ZONE = tuple(
    Patch(file, "        FindZone(args_);\n", "        args_.zone = 0;\n")
    for file in (DISPATCH_SEND, DISPATCH_WAIT, COMBINE_SEND, COMBINE_WAIT)
)

MUTANTS = (
    Mutant(
        "no PipeBarrier<PIPE_MTE3> before a flag",
        (without(COMBINE_SEND, "        AscendC::PipeBarrier<PIPE_MTE3>();\n"),),
        case_of(blocks=1),
    ),
    Mutant(
        "no SyncAll before a flag",
        (without(DISPATCH_SEND, "        AscendC::SyncAll<true>();\n"),),
        case_of(blocks=2, experts_per_rank=1),
    ),
    Mutant(
        "a core's flag without any barrier",
        (
            without(DISPATCH_SEND, "            FinishRowsOfAllBlocks();\n"),
            Patch(
                SEND_ROWS,
                "        double_buffer_.Finish();\n    }\n",
                "    }\n\n    __aicore__ inline void Finish() {\n        double_buffer_.Finish();\n    }\n",
            ),
            Patch(
                DISPATCH_SEND,
                "        report_.Write();\n",
                "        rows_.Finish();\n        report_.Write();\n",
            ),
            without(STATUS_ENTRIES, "        Order<AscendC::HardEvent::MTE3_S>();\n"),
        ),
        case_of(blocks=1, tokens=(2, 2), rounds=6),
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
        (without(COMBINE_SEND, "        Order<AscendC::HardEvent::MTE2_S>();\n"),),
        case_of(),
    ),
    Mutant(
        "no MTE2_V wait before summing flags",
        (
            Patch(
                WAITS,
                "        Order<AscendC::HardEvent::MTE2_V>();\n        AscendC::ReduceSum(sum_, "
                "entries_[first]",
                "        AscendC::ReduceSum(sum_, entries_[first]",
            ),
        ),
        case_of(),
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
                SEND_PLAN,
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
                SEND_PLAN,
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
                DISPATCH_WAIT,
                "counts_,\n                             ExactBytes(count * static_cast<int64_t>(sizeof("
                "int32_t))));",
                "counts_, ExactBytes((count + 7) / 8 * 32));",
            ),
        ),
        case_of(blocks=2),
    ),
    Mutant(
        "SyncAll on one core only",
        (
            Patch(
                DISPATCH_SEND,
                "        AscendC::SyncAll<true>();\n",
                "        if (AscendC::GetBlockIdx() == 0) AscendC::SyncAll<true>();\n",
            ),
        ),
        case_of(blocks=3),
    ),
    Mutant(
        "a zone used again too early",
        _ONE_ZONE,
        case_of(schedule="D", rounds=6, straggle=0.5, slots_read_from=0),
    ),
    Mutant(
        "flags looked at through the scalar cache",
        (
            Patch(
                COMBINE_WAIT,
                "        return flags_.SumWords(0, words_);\n",
                "        float sum = 0.0f;\n"
                "        for (uint32_t i = 0; i < words_; ++i) sum += GlobalAt<float>(address).GetValue(i);\n"
                "        return static_cast<int64_t>(sum);\n",
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
