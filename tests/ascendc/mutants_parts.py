"""Wrong kernels of a combine in parts."""

from __future__ import annotations

from .library import Patch
from .mutants import COMBINE_SEND, FLAGS, Mutant, case_of, without

COMBINE_READY = "include/combine_ready.h"

_PARTS = case_of(tokens=(9, 8), part_tokens=3, hidden=64)
_ONE_BLOCK = case_of(tokens=(9, 8), part_tokens=3, hidden=64, blocks=1)
_UNEVEN = case_of(tokens=(3, 12), part_tokens=3, hidden=64)
_TIMED = case_of(tokens=(9, 8), part_tokens=3, hidden=64, timed=True, absent=0.3)

PART_MUTANTS = (
    Mutant(
        "a token is ready with its first result",
        (
            Patch(
                COMBINE_READY,
                "        if (missing > 0) {\n",
                "        if (missing > 1) {\n",
            ),
        ),
        _PARTS,
    ),
    Mutant(
        "a round's number not kept by parts",
        (without(COMBINE_READY, "        KeepNumber(*args_, number_);\n"),),
        case_of(tokens=(9, 8), part_tokens=3, hidden=64, rounds=6, straggle=0.5),
    ),
    Mutant(
        "a token taken twice",
        (without(COMBINE_READY, "                pending_.Set(token, TAKEN);\n"),),
        _PARTS,
    ),
    Mutant(
        "what is taken is forgotten between launches",
        (Patch(COMBINE_READY, "if (is_new || places_.first > before) {", "if (is_new) {"),),
        _PARTS,
    ),
    Mutant(
        "what tokens wait for is never stored",
        (Patch(COMBINE_READY, "if (is_new || places_.first > before) {", "if (places_.first > before) {"),),
        _PARTS,
    ),
    Mutant(
        "every part's places from the first one on",
        (Patch(COMBINE_READY, "places_ = OwnIn(args_->part);", "places_ = OwnIn(0);"),),
        _PARTS,
    ),
    Mutant(
        "parts with incomplete tokens are not looked at again",
        (
            Patch(
                COMBINE_READY,
                "taken_ += part == taken_ && is_over ? 1 : 0;",
                "taken_ += part == taken_ ? 1 : 0;",
            ),
        ),
        _PARTS,
    ),
    Mutant(
        "no MTE2_S wait before pending results are read",
        (without(COMBINE_READY, "        Order<AscendC::HardEvent::MTE2_S>();\n"),),
        _PARTS,
    ),
    Mutant(
        "no S_MTE3 wait before a list is stored",
        (
            Patch(
                FLAGS,
                "        Order<AscendC::HardEvent::S_MTE3>();\n"
                "        AscendC::DataCopyPad(GlobalAt<int32_t>(address)[first_], entries_,",
                "        AscendC::DataCopyPad(GlobalAt<int32_t>(address)[first_], entries_,",
            ),
        ),
        _PARTS,
        may_crash=True,
    ),
    Mutant(
        "a list changed while it is stored",
        (
            Patch(
                FLAGS,
                "[first_], entries_, ExactWords(count));\n        Order<AscendC::HardEvent::MTE3_S>();\n",
                "[first_], entries_, ExactWords(count));\n",
            ),
        ),
        _ONE_BLOCK,
    ),
    Mutant(
        "a part that was sent ahead is sent again",
        (
            Patch(
                COMBINE_SEND,
                "progress_.Read(PartProgress::SENT) > args_.part;",
                "progress_.Read(PartProgress::SENT) < 0;",
            ),
        ),
        _PARTS,
    ),
    Mutant(
        "the last part ends with its own tokens",
        (Patch(COMBINE_SEND, "part + 1 < args.num_parts ? first", "part < args.num_parts ? first"),),
        _UNEVEN,
    ),
    Mutant(
        "every part sends all rows",
        (Patch(COMBINE_SEND, "if (tokens.Contains(token)) {", "if (token < tokens.last) {"),),
        _PARTS,
    ),
    Mutant(
        "a waiting block forgets what it sent ahead",
        (
            Patch(
                COMBINE_READY,
                "ready_.Keep(progress_, sent_);",
                "ready_.Keep(progress_, args_.part + 1);",
            ),
        ),
        _PARTS,
    ),
    Mutant(
        "progress of the first block for all",
        (
            Patch(
                COMBINE_SEND,
                "return AscendC::GetBlockIdx() * static_cast<int64_t>(PART_PROGRESS_WORDS);",
                "return 0;",
            ),
        ),
        _PARTS,
    ),
    Mutant(
        "progress read from an old cache line",
        (
            Patch(
                COMBINE_SEND,
                "return ReadFresh<int32_t>(address_, FirstWord() + word);",
                "return GlobalAt<int32_t>(address_).GetValue(static_cast<uint64_t>(FirstWord() + word));",
            ),
        ),
        _PARTS,
    ),
    Mutant(
        "times of results that come in a later part not kept apart",
        (
            Patch(
                COMBINE_READY,
                "        } else {\n"
                "            waited_.Load(first * num_results_, (last - first) * num_results_);\n        }\n",
                "        }\n",
            ),
        ),
        _TIMED,
    ),
)
