"""Prefix sums of counts that peers wrote, and the table of slots: every word, and none beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_triton.core.ascendc import MAX_BLOCKS
from moe_triton.layout import SLOT_ALIGN, STATUS_ENTRY_BYTES

from .library import Library
from .offsets import OffsetsCase, check_offsets, draw, launch

CASES = {
    "usual": OffsetsCase(),
    "one_block": OffsetsCase(blocks=1, stats=True),
    "more_blocks_than_entries": OffsetsCase(ranks=2, experts=1, blocks=7),
    "cumulative": OffsetsCase(cumulative=True, experts=7, blocks=3),
    "stats": OffsetsCase(stats=True, experts=9, blocks=4),
    "both": OffsetsCase(stats=True, cumulative=True, experts=5, blocks=3),
    "no_table": OffsetsCase(tabled=False, blocks=3),
    "hostile": OffsetsCase(hostile=0.5, experts=6, blocks=3, stats=True),
    "little_room": OffsetsCase(hostile=0.2, room=0.3, experts=6, blocks=3, stats=True),
    "kept": OffsetsCase(kept=True, tokens=9, experts=4),
    "kept_alone": OffsetsCase(kept=True, blocks=1, tokens=9),
    "kept_and_hostile": OffsetsCase(kept=True, hostile=0.4, room=0.4, tokens=9, blocks=3),
    "EP16": OffsetsCase(ranks=16, experts=16, tokens=16, blocks=MAX_BLOCKS, stats=True),
    "EP64": OffsetsCase(ranks=64, experts=4, tokens=8, blocks=MAX_BLOCKS),
    "entries_in_chunks": OffsetsCase(ranks=3, experts=1500, tokens=2, blocks=2, stats=True),
    "chunks_in_a_share": OffsetsCase(ranks=5, experts=1000, tokens=2, blocks=1, kept=True, hostile=0.1),
    "rows_in_pieces": OffsetsCase(ranks=3, experts=2, tokens=7000, blocks=1, kept=True),
    "long_runs": OffsetsCase(ranks=3, experts=4, tokens=1200, blocks=3, room=0.9),
    "long_runs_and_kept": OffsetsCase(ranks=3, experts=4, tokens=100, blocks=2, kept=True),
    "long_sums": OffsetsCase(ranks=4, experts=3, tokens=20_000, blocks=5, tabled=False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_word(library: Library, case: OffsetsCase) -> None:
    check_offsets(library, case)


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 13, MAX_BLOCKS])
def test_blocks_share_the_entries(library: Library, blocks: int) -> None:
    for entries in [{"ranks": 2, "experts": 3}, {"ranks": 7, "experts": 5}, {"ranks": 16, "experts": 16}]:
        check_offsets(library, OffsetsCase(**entries, blocks=blocks, stats=True, kept=True, hostile=0.1))


def test_orders_of_completion(strict: Library) -> None:
    for seed in range(8):
        check_offsets(strict, OffsetsCase(experts=5, blocks=3, stats=True, kept=True), seed)


def test_counts_above_the_number_of_slots_stay_inside(library: Library) -> None:
    """Even where the plan would let them pass: the slots' own number of places is a bound, too."""
    case = OffsetsCase(hostile=1.0, ranks=2, experts=2, tokens=3, room=40.0)
    received = draw(case)
    received.counts[:] = 1000
    found = launch(library, case, received, 0, max_count=2000)
    ends = case.tokens * np.arange(1, case.entries + 1)
    assert found["recv_offsets"].tolist() == ends.tolist()
    rows = found["row_slots"][: ends[-1]].astype(np.int64) * SLOT_ALIGN
    assert rows.max() + case.slots.item_bytes <= case.slots.end


def test_a_region_in_units() -> None:
    case = OffsetsCase()
    units = case.slots.in_units(SLOT_ALIGN)
    at = {"zone": 1, "source": 2, "expert": 1, "index": 4}
    assert SLOT_ALIGN * units.offset(**at) == case.slots.offset(**at)
    with pytest.raises(ValueError, match="multiples of 1024"):
        case.slots.in_units(2 * SLOT_ALIGN)
    with pytest.raises(ValueError, match="too many"):
        replace(case, tokens=1_000_000, experts=1000).slots.in_units(STATUS_ENTRY_BYTES)
