"""Wrong kernels of prefix sums and of the table of slots."""

from __future__ import annotations

from .library import Patch
from .mutants import Mutant, without
from .offsets import OffsetsCase

OFFSETS = "include/offsets.h"
COUNT_SUMS = "include/count_sums.h"

_USUAL = OffsetsCase(ranks=5, experts=4, blocks=3, stats=True)
# Without a table: sums that are wrong would have slots written outside of it.
_SUMS = OffsetsCase(ranks=5, experts=4, blocks=3, tabled=False)
_HOSTILE = OffsetsCase(experts=4, blocks=2, hostile=0.5, tabled=False)
_KEPT = OffsetsCase(tokens=9, experts=4, blocks=2, kept=True)
_PIECES = OffsetsCase(ranks=3, experts=2, tokens=7000, blocks=1, kept=True)
_LONG = OffsetsCase(ranks=3, experts=2, tokens=200, blocks=2, kept=True)
_CHUNKS = OffsetsCase(ranks=5, experts=900, tokens=1, blocks=1, stats=True, tabled=False)

_READY = "        Order<AscendC::HardEvent::S_MTE3>();\n"
_STORE = "        AscendC::DataCopyPad(GlobalAt<int32_t>(args_.{})"
_CALL = "        AscendC::"
_BARRIER = f"{_CALL}PipeBarrier<PIPE_V>();\n"


def _mutant(name: str, file: str, old: str, new: str, case: OffsetsCase = _USUAL) -> Mutant:
    return Mutant(name, (Patch(file, old, new),), case)


ORDERS = (
    *(
        _mutant(
            f"no barrier before {name}", COUNT_SUMS, f"{_BARRIER}{_CALL}{name}(", f"{_CALL}{name}(", _HOSTILE
        )
        for name in ("Mins", "Cast", "ReduceSum")
    ),
    Mutant(
        "no V_S wait before reading the sum of counts",
        (without(COUNT_SUMS, "        Order<AscendC::HardEvent::V_S>();\n"),),
        _SUMS,
    ),
    Mutant(
        "a sum of counts over one that scalar code reads",
        (without(COUNT_SUMS, "        Order<AscendC::HardEvent::S_V>();\n"),),
        _SUMS,
    ),
    Mutant(
        "no MTE2_S wait before reading counts",
        (without(OFFSETS, "        Order<AscendC::HardEvent::MTE2_S>();\n"),),
        OffsetsCase(blocks=1),
    ),
    *(
        _mutant(f"{what} stored before they are there", OFFSETS, f"{_READY}{store}", store)
        for what, store in (
            ("sums", _STORE.format("recv_offsets")),
            ("mark and total", _STORE.format("trailer")),
        )
    ),
    Mutant(
        "sums of the next chunk before the last ones are stored",
        (Patch(OFFSETS, "buffers.\n        Order<AscendC::HardEvent::MTE3_S>();\n", "buffers.\n"),),
        _CHUNKS,
    ),
    Mutant(
        "slots stored before they are there",
        (without(OFFSETS, "            Order<AscendC::HardEvent::S_MTE3>();\n"),),
        _KEPT,
    ),
    Mutant(
        "slots stored before vector instructions wrote them",
        (without(OFFSETS, "            Order<AscendC::HardEvent::V_MTE3>();\n"),),
        OffsetsCase(ranks=3, experts=2, tokens=200, blocks=2),
    ),
    _mutant("no barrier before Muls", OFFSETS, f"{_BARRIER}{_CALL}Muls(", f"{_CALL}Muls(", _LONG),
    _mutant(
        "no barrier after Muls",
        OFFSETS,
        f"static_cast<int32_t>(ROWS_PER_ADD));\n{_BARRIER}",
        "static_cast<int32_t>(ROWS_PER_ADD));\n",
        _LONG,
    ),
    Mutant(
        "slots of the next piece before the last ones are stored",
        (without(OFFSETS, "            Order<AscendC::HardEvent::MTE3_S>();\n"),),
        _PIECES,
    ),
)

NUMBERS = (
    _mutant(
        "counts below zero",
        COUNT_SUMS,
        "Smaller<int64_t>(Larger<int64_t>(counts_.At(index), 0), max_count_)",
        "Smaller<int64_t>(counts_.At(index), max_count_)",
        _HOSTILE,
    ),
    _mutant(
        "counts above what a rank may send",
        COUNT_SUMS,
        "Smaller<int64_t>(Larger<int64_t>(counts_.At(index), 0), max_count_)",
        "Larger<int64_t>(counts_.At(index), 0)",
        _HOSTILE,
    ),
    _mutant(
        "counts below zero in sums",
        COUNT_SUMS,
        "AscendC::Maxs(clamped_, counts_.Entries(), 0, entries);",
        "AscendC::Maxs(clamped_, counts_.Entries(), -(1 << 20), entries);",
        _HOSTILE,
    ),
    _mutant(
        "counts above what a rank may send in sums",
        COUNT_SUMS,
        "static_cast<int32_t>(max_count_), entries)",
        "1 << 20, entries)",
        _HOSTILE,
    ),
    _mutant(
        "sums of floats that hold no such number",
        COUNT_SUMS,
        "max_count <= MAX_EXACT_SUM / max_entries",
        "true",
        OffsetsCase(ranks=40, experts=40, tokens=60_000, blocks=3, tabled=False),
    ),
    _mutant(
        "sums beyond the capacity",
        OFFSETS,
        "return Smaller(rows, args_.capacity);",
        "return rows;",
        OffsetsCase(hostile=0.2, room=0.3, experts=6, tabled=False),
    ),
    _mutant(
        "an expert's rows from the block's first entry on",
        OFFSETS,
        "Smaller(chunk.last, share_.first - source_) - chunk.first",
        "before",
    ),
    _mutant(
        "stats written over",
        OFFSETS,
        "stats_.GetValue(i) + static_cast<int32_t>(rows)",
        "static_cast<int32_t>(rows)",
    ),
    _mutant(
        "the total from the first block",
        OFFSETS,
        "        if (share_.last == total) {\n",
        "        if (share_.first == 0) {\n",
    ),
    _mutant(
        "sums stored by whole 32 bytes",
        OFFSETS,
        "ends_, ExactWords(own.last - own.first)",
        "ends_, ExactWords((own.last - own.first + 7) / 8 * 8)",
    ),
    _mutant(
        "slots stored by whole 32 bytes",
        OFFSETS,
        "ExactWords(piece.last - piece.first)",
        "ExactWords((piece.last - piece.first + 7) / 8 * 8)",
    ),
    _mutant(
        "slots of the next entry as if it were of the same source",
        OFFSETS,
        "SlotOf(row - entry_row_)",
        "SlotOf(row - first_row_)",
    ),
    _mutant(
        "slots of a long run from its first whole unit on",
        OFFSETS,
        "SlotAfter(slot, at - run.first)",
        "SlotAfter(slot, at - first)",
        _LONG,
    ),
    _mutant(
        "the last slots of a long run like the first ones",
        OFFSETS,
        "FillOneByOne(SlotAfter(slot, last - run.first), stride,",
        "FillOneByOne(slot, stride,",
        _LONG,
    ),
    _mutant(
        "counts above the number of slots",
        OFFSETS,
        "Smaller(args_.max_count, static_cast<int64_t>(args_.slots.index_extent))",
        "args_.max_count + 1",
        OffsetsCase(experts=4, blocks=2, hostile=0.5),
    ),
)

OWN = (
    _mutant("slots of rows that stay", OFFSETS, "source_ == args_.kept_rank", "false", _KEPT),
    _mutant(
        "the rank before this one has no slots",
        OFFSETS,
        "source_ == args_.kept_rank",
        "source_ + 1 == args_.kept_rank",
        _KEPT,
    ),
    _mutant(
        "rows that stay as neighbouring slots",
        OFFSETS,
        "FillOneByOne(NO_SLOT, 0,",
        "FillRun(NO_SLOT,",
        _KEPT,
    ),
)

OFFSETS_MUTANTS = ORDERS + NUMBERS + OWN
