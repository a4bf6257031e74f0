"""Dispatches in one launch that do not keep to the order of its phases."""

from __future__ import annotations

from .case import BRIEF_US
from .fused import FusedCase, MissingRowsCase
from .library import Patch
from .mutants import DISPATCH_WAIT, MUTANT_TIMEOUT_US, Mutant, without
from .mutants_direct import case_of as direct_case_of
from .mutants_offsets import OFFSETS

PHASES = "include/phases.h"
FUSED = "include/moe_fused.h"

_USUAL = FusedCase(
    tokens=(4, 3, 4), blocks=3, topk=3, rounds=4, straggle=0.3, timed=True, timeout_us=MUTANT_TIMEOUT_US
)
# Every token goes to every expert. Waits are in vain: they need not be long.
_MISSING = MissingRowsCase(tokens=(2, 2, 2), blocks=3, topk=6, timeout_us=BRIEF_US)

_SYNCED = direct_case_of(blocks=3)

_WAIT = "    run.template Phase<DispatchWait>(1, args.phase_1, false, false, false);\n"
_OFFSETS = "    run.template Phase<DispatchOffsets>(2, args.phase_2, false, false, false);\n"
_ROWS = "    run.template Phase<DispatchRows>(3, args.phase_3, false, false, true);\n"


def _mutant(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, (Patch(file, old, new),), _USUAL)


FUSED_MUTANTS = (
    _mutant(
        "prefix sums of blocks that waited for their own entries only",
        DISPATCH_WAIT,
        "const Share awaited = WaitsForAll() ? Share{0, total} : share;",
        "const Share awaited = share;",
    ),
    _mutant(
        "prefix sums before the last flag", DISPATCH_WAIT, "if (seen == count) {", "if (seen >= count - 1) {"
    ),
    _mutant("prefix sums before the wait", FUSED, _WAIT + _OFFSETS + _ROWS, _OFFSETS + _WAIT + _ROWS),
    _mutant(
        "rows waited for before their entries", FUSED, _WAIT + _OFFSETS + _ROWS, _ROWS + _WAIT + _OFFSETS
    ),
    _mutant("a table of slots before there are rows in them", FUSED, _ROWS, ""),
    _mutant(
        "a table of slots in the other zone",
        OFFSETS,
        "args_.slots.At(args_.zone, source_, expert_, index)",
        "args_.slots.At(1 - args_.zone, source_, expert_, index)",
    ),
    _mutant(
        "the zone turned before it is used",
        DISPATCH_WAIT,
        "KeepWord(args_.turned,",
        "KeepWord(args_.zone_at,",
    ),
    _mutant(
        "copies of a phase on their way when the next one begins",
        PHASES,
        "        AscendC::PipeBarrier<PIPE_ALL>();\n        pipe_->Reset();\n",
        # a kernel's last copies are waited for in any case
        "        if (num_ran_ == 3) {\n"
        "            AscendC::PipeBarrier<PIPE_ALL>();\n"
        "        }\n"
        "        pipe_->Reset();\n",
    ),
    _mutant("UB of a phase kept from the next ones", PHASES, "        pipe_->Reset();\n", ""),
    Mutant(
        "rows waited for after entries have not come",
        (Patch(PHASES, " && (!goes_on || !has_failed_)", ""),),
        _MISSING,
    ),
    Mutant(
        "SyncAll between phases on one core only",
        (
            Patch(
                PHASES,
                "        if (num_ran_ > 0 && is_synced) {\n",
                "        if (num_ran_ > 0 && is_synced && AscendC::GetBlockIdx() == 0) {\n",
            ),
        ),
        _SYNCED,
    ),
    Mutant(
        "no SyncAll between phases", (without(PHASES, "            AscendC::SyncAll<true>();\n"),), _SYNCED
    ),
)
