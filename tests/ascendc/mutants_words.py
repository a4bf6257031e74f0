"""Kernels that leave the call word out somewhere."""

from __future__ import annotations

from .direct import DirectCase
from .disagreement import DisagreeingCase
from .library import Patch
from .mutants import (
    COMBINE_SEND,
    DISPATCH_WAIT,
    FLAGS,
    MUTANT_TIMEOUT_US,
    STATUS_ENTRIES,
    Mutant,
    case_of,
    without,
)
from .mutants_calls import POST_STATUS

_OTHER = DisagreeingCase(tokens=(3, 2, 4), timeout_us=MUTANT_TIMEOUT_US)
_DIRECT = DirectCase(tokens=(4, 4), hidden=512, timeout_us=MUTANT_TIMEOUT_US)
_BESIDE_MISSING = DisagreeingCase(tokens=(3, 2, 4), blocks=1, other=2, absent_rank=1, timeout_us=20_000)

WORD_MUTANTS = (
    Mutant(
        "call words not compared",
        (Patch(DISPATCH_WAIT, "words.GetValue(entry + StatusEntry::CALL) != call_)", "false)"),),
        _OTHER,
    ),
    Mutant(
        "no call word in entries",
        (without(STATUS_ENTRIES, "        entries_.SetValue(WordOf(i) + StatusEntry::CALL, call);\n"),),
        case_of(),
    ),
    Mutant(
        "a combine's kind not kept",
        (without(COMBINE_SEND, "            KeepWord(args_.combine_kind, args_.kind);\n"),),
        case_of(),
    ),
    Mutant(
        "a combine's kind not kept where it posts for all its results",
        (without(POST_STATUS, "        KeepWord(args_.combine_kind, args_.kind);\n"),),
        _DIRECT,
    ),
    Mutant(
        "a dispatch's word without the combine before",
        (
            Patch(
                STATUS_ENTRIES,
                "call_ = WordOfDispatch(*args_);",
                "call_ = static_cast<int32_t>(args_->call);",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "a dispatch's word not kept for its wait",
        (without(STATUS_ENTRIES, "        KeepWord(args_->dispatch_word, call_, blocks_);\n"),),
        case_of(),
    ),
    Mutant(
        "the combine before read from an old cache line",
        (
            Patch(
                STATUS_ENTRIES,
                "ReadFresh<int32_t>(args.combine_kind);",
                "GlobalAt<int32_t>(args.combine_kind).GetValue(0);",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "a kept word stored before it is written",
        (
            Patch(
                FLAGS,
                "static_cast<int32_t>(word));\n    Order<AscendC::HardEvent::S_MTE3>();\n",
                "static_cast<int32_t>(word));\n",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "entries of another call cleared",
        (
            Patch(
                DISPATCH_WAIT,
                "if (complete && same_call && !WaitsForAll()) {",
                "if (complete && !WaitsForAll()) {",
            ),
        ),
        _OTHER,
    ),
    Mutant(
        "what is missing reported in place of another call",
        (Patch(FLAGS, "if (number_ == 0 || is_first_mismatch) {", "if (number_ == 0) {"),),
        _BESIDE_MISSING,
    ),
)
