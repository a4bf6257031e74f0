"""Dispatches whose first blocks receive while the others send, and go wrong."""

from __future__ import annotations

from dataclasses import replace

from .case import BRIEF_US
from .library import Patch
from .mutants import MUTANT_TIMEOUT_US, Mutant, without
from .mutants_fused import FUSED, PHASES
from .receiving import MissingCase, ReceivingCase

RECEIVE, BEGUN = "include/dispatch_receive.h", "include/begun_blocks.h"
INBAND_ROWS, INBAND_SEND = "include/inband_rows.h", "include/inband_send.h"

_USUAL = ReceivingCase(
    tokens=(4, 3, 4),
    blocks=5,
    first_blocks=2,
    topk=3,
    rounds=4,
    straggle=0.3,
    scaled=True,
    timeout_us=MUTANT_TIMEOUT_US,
)
# One receiver for many rows: it looks while they come.
_ONE_BLOCK = replace(_USUAL, tokens=(24, 30), blocks=2, first_blocks=1, hidden=256)
_INBAND = replace(_USUAL, inband=True, hidden=900)
# Every token goes to every expert. Waits are in vain: they need not be long.
_MISSING = MissingCase(tokens=(2, 2, 2), blocks=4, first_blocks=2, topk=6, timeout_us=BRIEF_US)

_WAIT = "    run.template Phase<DispatchWait, true>(1, args.phase_1, false, false, false, true);\n"
_OFFSETS = "    run.template Phase<DispatchOffsets, true>(2, args.phase_2, false, false, false, true);\n"
_RECEIVE = "    run.template Phase<DispatchReceive, true>(3, args.phase_3, false, false, true, true);\n"
_OTHERS = "Blocks{blocks_.index - first, blocks_.number - first}"


def _mutant(name: str, file: str, old: str, new: str, case: ReceivingCase = _USUAL) -> Mutant:
    return Mutant(name, (Patch(file, old, new),), case)


RECEIVING_MUTANTS = (
    _mutant(
        "rows received before their entries", FUSED, _WAIT + _OFFSETS + _RECEIVE, _RECEIVE + _WAIT + _OFFSETS
    ),
    _mutant(
        "all blocks receive",
        PHASES,
        "is_on_first != is_first_) {",
        "!is_on_first && is_first_) {",
    ),
    _mutant("all blocks send", PHASES, "is_on_first != is_first_) {", "is_on_first && !is_first_) {"),
    _mutant(
        "a block less sends", PHASES, _OTHERS, "Blocks{blocks_.index - first, blocks_.number - first + 1}"
    ),
    _mutant(
        "a block less receives", PHASES, "Blocks{blocks_.index, first}", "Blocks{blocks_.index, first + 1}"
    ),
    _mutant(
        "the zone turned before every block knows it",
        RECEIVE,
        "begun_.Wait(args_.timeout_us, args_.window)",
        "true",
    ),
    _mutant(
        "a block less waited for",
        BEGUN,
        "if (flags_.SumWords(0, words_) == static_cast<int64_t>(words_)) {",
        "if (flags_.SumWords(0, words_) >= static_cast<int64_t>(words_ - STATUS_ENTRY_WORDS)) {",
    ),
    _mutant(
        "flags of blocks not cleared",
        BEGUN,
        "                AscendC::DataCopy(GlobalAt<float>(address_), flags_.Entries(), words_);\n",
        "",
    ),
    _mutant(
        "rows taken that have not come",
        RECEIVE,
        "if (flags_.IsSet(piece.first + i)) {",
        "if (piece.count > 0) {",
    ),
    _mutant(
        "flags read again before they are cleared",
        RECEIVE,
        "        Order<AscendC::HardEvent::MTE3_V>();\n        Order<AscendC::HardEvent::MTE3_MTE2>();\n",
        "",
        _ONE_BLOCK,
    ),
    Mutant(
        "flags of taken rows not cleared", (without(RECEIVE, "        flags_.Clear(stamp, 1);\n"),), _USUAL
    ),
    _mutant(
        "a row's place by its place in the window",
        RECEIVE,
        "const int64_t before = order_.NumberAt(place);",
        "const int64_t before = place;",
    ),
    _mutant(
        "sums of the counts with an entry's own",
        RECEIVE,
        "sums_.SumFirst(before)",
        "sums_.SumFirst(before + 1)",
    ),
    _mutant(
        "entries not cleared",
        RECEIVE,
        "            flags_.ClearEntries(args_.window + args_.status.At(args_.zone, 0, 0));\n",
        "",
    ),
    Mutant(
        "a block that gave up says nothing of having begun",
        (without(PHASES, "            LeaveOut(kernel, 0);\n"),),
        _MISSING,
    ),
    _mutant(
        "rows received after entries have not come", PHASES, " && (!goes_on || !has_failed_)", "", _MISSING
    ),
    _mutant(
        "in-band rows taken that have not come",
        RECEIVE,
        "if (flags_.IsSet(piece.first + i)) {",
        "if (piece.count > 0) {",
        _INBAND,
    ),
    _mutant(
        "all rows there when one block is",
        INBAND_ROWS,
        "all_set_ = set == static_cast<int64_t>(words);",
        "all_set_ = set > 0;",
        _INBAND,
    ),
    _mutant(
        "a row taken without its last block",
        INBAND_ROWS,
        "SumWords(static_cast<uint32_t>(at) * words_of_row_, words_of_row_) ==\n"
        "                               static_cast<int64_t>(words_of_row_);",
        "SumWords(static_cast<uint32_t>(at) * words_of_row_, words_of_row_ - FLAG_WORDS) ==\n"
        "                               static_cast<int64_t>(words_of_row_ - FLAG_WORDS);",
        _INBAND,
    ),
    _mutant(
        "a taken row's last flag left",
        INBAND_ROWS,
        "scatter{static_cast<uint16_t>(num_blocks_),",
        "scatter{static_cast<uint16_t>(num_blocks_ - 1),",
        _INBAND,
    ),
    _mutant(
        "gaps between blocks taken for data",
        INBAND_ROWS,
        "gather{static_cast<uint16_t>(num_blocks_), BLOCK_DATA_BYTES, UB_ALIGN, 0, 0};",
        "gather{static_cast<uint16_t>(num_blocks_), BLOCK_DATA_BYTES, 0, 0, 0};",
        _INBAND,
    ),
    _mutant(
        "a scale in the stamp copied from the middle of a unit",
        RECEIVE,
        "has_scales && args.scale_offset > args.stamp_offset;",
        "false;",
        _INBAND,
    ),
    _mutant(
        "a scale loaded over the weight",
        RECEIVE,
        "is_scale_stamped_ ? loaded_bytes_ + UB_ALIGN :",
        "is_scale_stamped_ ? loaded_bytes_ :",
        _INBAND,
    ),
    _mutant(
        "another row noted as taken",
        INBAND_ROWS,
        "const int64_t number = first_numbers_.At(place) + row;",
        "const int64_t number = first_numbers_.At(place) + row + 1;",
        replace(_INBAND, tokens=(24, 30), blocks=2, first_blocks=1),
    ),
    _mutant(
        "rows of one entry noted as another's",
        INBAND_ROWS,
        "        number += Base::RowsOf(place);\n",
        "        number += 1;\n",
        replace(_INBAND, tokens=(24, 30), blocks=2, first_blocks=1),
    ),
    Mutant(
        "a block that sends in-band rows says nothing of having begun",
        (without(INBAND_SEND, "        begun_.Raise();\n"),),
        _INBAND,
    ),
)
