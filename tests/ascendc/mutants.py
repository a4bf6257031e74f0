"""Wrong kernels: each the true one with a few lines changed, and a case in which the change matters."""

from __future__ import annotations

from dataclasses import dataclass

from .driver import Case
from .library import Patch

DISPATCH_SEND = "include/dispatch_send.h"
DISPATCH_WAIT = "include/dispatch_wait.h"
COMBINE_SEND = "include/combine_send.h"
COMBINE_WAIT = "include/combine_wait.h"
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
    case: Case


def _without(file: str, line: str) -> Patch:
    return Patch(file, line, "")


def _case(**changes: object) -> Case:
    defaults: dict[str, object] = {"tokens": (4, 4), "hidden": 512, "rounds": 3}
    return Case(**{**defaults, **changes, "timeout_us": MUTANT_TIMEOUT_US})  # type: ignore[arg-type]


_ONE_ZONE = tuple(
    Patch(file, "        args_ = args;\n", "        args_ = args;\n        args_.zone = 0;\n")
    for file in (DISPATCH_SEND, DISPATCH_WAIT, COMBINE_SEND, COMBINE_WAIT)
)

MUTANTS = (
    Mutant(
        "no PipeBarrier<PIPE_MTE3> before a flag",
        (_without(COMBINE_SEND, "        AscendC::PipeBarrier<PIPE_MTE3>();\n"),),
        _case(blocks=1),
    ),
    Mutant(
        "no SyncAll before a flag",
        (_without(DISPATCH_SEND, "        AscendC::SyncAll<true>();\n"),),
        _case(blocks=2, experts_per_rank=1),
    ),
    Mutant(
        "a core's flag without any barrier",
        (
            Patch(DISPATCH_SEND, "            FinishRowsOfAllBlocks();\n", ""),
            Patch(DISPATCH_SEND, "        WaitForStamps();\n    }\n", "    }\n"),
            Patch(
                DISPATCH_SEND,
                "        report_.Write();\n",
                "        WaitForStamps();\n        report_.Write();\n",
            ),
            _without(DISPATCH_SEND, "        Order<AscendC::HardEvent::MTE3_S>();\n"),
        ),
        _case(blocks=1, tokens=(2, 2), rounds=6),
    ),
    Mutant(
        "no EnQue",
        (_without(COMBINE_SEND, "            rows_.EnQue(in);\n"),),
        _case(),
    ),
    Mutant(
        "neither EnQue nor DeQue",
        (
            Patch(
                DISPATCH_SEND,
                "            rows_.EnQue(in);\n"
                "            AscendC::LocalTensor<uint8_t> out = rows_.DeQue<uint8_t>();\n",
                "            AscendC::LocalTensor<uint8_t> out = in;\n",
            ),
        ),
        _case(),
    ),
    Mutant(
        "no MTE2_S wait before reading triples",
        (_without(COMBINE_SEND, "        Order<AscendC::HardEvent::MTE2_S>();\n"),),
        _case(),
    ),
    Mutant(
        "no MTE2_V wait before summing flags",
        (_without(COMBINE_WAIT, "        Order<AscendC::HardEvent::MTE2_V>();\n"),),
        _case(),
    ),
    Mutant(
        "no V_S wait before reading the sum",
        (_without(COMBINE_WAIT, "        Order<AscendC::HardEvent::V_S>();\n"),),
        _case(),
    ),
    Mutant(
        "no V_MTE3 wait before clearing",
        (_without(DISPATCH_WAIT, "        Order<AscendC::HardEvent::V_MTE3>();\n"),),
        _case(),
    ),
    Mutant(
        "no V_MTE3 wait before the first flag",
        (_without(COMBINE_SEND, "        Order<AscendC::HardEvent::V_MTE3>();\n"),),
        _case(),
    ),
    Mutant(
        "no S_MTE3 wait before sending stamps",
        (
            Patch(
                DISPATCH_SEND,
                "        Order<AscendC::HardEvent::S_MTE3>();\n        if (num_slots > 0) {\n",
                "        if (num_slots > 0) {\n",
            ),
        ),
        _case(),
    ),
    Mutant(
        "a SetFlag that nothing waits for",
        (
            Patch(
                DISPATCH_SEND,
                "        for (; waited_ < visits_; ++waited_) {\n",
                "        for (; waited_ + 1 < visits_; ++waited_) {\n",
            ),
        ),
        _case(),
    ),
    Mutant(
        "a WaitFlag that nothing sets",
        (
            _without(
                DISPATCH_SEND,
                "        AscendC::SetFlag<AscendC::HardEvent::MTE3_S>(stamps_free_[visits_ % 2]);\n",
            ),
        ),
        _case(),
    ),
    Mutant(
        "a tensor never freed",
        (_without(COMBINE_SEND, "            rows_.FreeTensor(out);\n"),),
        _case(tokens=(1, 1), topk=1, blocks=1),
    ),
    Mutant(
        "UB overflow",
        (
            Patch(
                COMBINE_SEND,
                "pipe->InitBuffer(rows_, 2, static_cast<uint32_t>(piece_bytes_));",
                "pipe->InitBuffer(rows_, 2, 96 * 1024);",
            ),
        ),
        _case(),
    ),
    Mutant(
        "a buffer too short for the copy",
        (
            Patch(
                DISPATCH_SEND,
                "pipe->InitBuffer(rows_, 2, static_cast<uint32_t>(piece_bytes_));",
                "pipe->InitBuffer(rows_, 2, static_cast<uint32_t>(piece_bytes_ / 2));",
            ),
        ),
        _case(),
    ),
    Mutant(
        "a count that is not 32 bytes",
        (Patch(COMBINE_SEND, "flag_, STATUS_ENTRY_WORDS);\n    }", "flag_, 1);\n    }"),),
        _case(),
    ),
    Mutant(
        "counts stored by whole 32 bytes",
        (
            Patch(
                DISPATCH_WAIT,
                "static_cast<uint32_t>(count * sizeof(int32_t)), 0, 0, 0};",
                "static_cast<uint32_t>((count + 7) / 8 * 32), 0, 0, 0};",
            ),
        ),
        _case(blocks=2),
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
        _case(blocks=3),
    ),
    Mutant(
        "a zone used again too early",
        _ONE_ZONE,
        _case(schedule="D", rounds=6, straggle=0.5, slots_read_from=0),
    ),
    Mutant(
        "flags looked at through the scalar cache",
        (
            Patch(
                COMBINE_WAIT,
                "        AscendC::DataCopy(entries_, GlobalAt<float>(address), words_);\n",
                "        float sum = 0.0f;\n"
                "        for (uint32_t i = 0; i < words_; ++i) sum += GlobalAt<float>(address).GetValue(i);\n"
                "        if (sum >= 0.0f) return static_cast<int64_t>(sum);\n"
                "        AscendC::DataCopy(entries_, GlobalAt<float>(address), words_);\n",
            ),
        ),
        _case(),
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
        _case(),
    ),
)
