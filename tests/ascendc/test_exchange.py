"""Rows between two ranks: every byte in its place, and none anywhere else."""

from __future__ import annotations

import numpy as np
import pytest

from moe_triton.core.ascendc import REPORT_BAD_ROW

from .exchange import Exchange, ExchangeCase
from .library import Library
from .orders import orders

CASES = {
    "usual": ExchangeCase(),
    "one_block": ExchangeCase(blocks=1, rows=(4, 1)),
    "empty": ExchangeCase(rows=(0, 3), blocks=3),
    "no_first_row": ExchangeCase(first_row=None, rounds=4),
    "no_scales": ExchangeCase(num_scales=0, spare=0),
    "several_scales": ExchangeCase(rows=(70, 75), num_scales=57, blocks=1),
    "no_header": ExchangeCase(header_words=0, row_bytes=32),
}
LARGE_CASES = {
    "chunks_of_scales": ExchangeCase(rows=(1300, 700), row_bytes=32),
    "long_header": ExchangeCase(header_words=2500),
    "row_in_pieces": ExchangeCase(row_bytes=96 * 1024, rows=(2, 1)),
}


@orders(25, 100)
@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_strict(strict: Library, case: ExchangeCase, seeds: range) -> None:
    for seed in seeds:
        Exchange(strict, case, seed).run()


@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_fast(fast: Library, case: ExchangeCase) -> None:
    for seed in range(10):
        Exchange(fast, case, seed).run()


@pytest.mark.parametrize("case", list(LARGE_CASES.values()), ids=list(LARGE_CASES))
def test_large(library: Library, case: ExchangeCase) -> None:
    for seed in range(3):
        Exchange(library, case, seed).run()


# (first row, number, slots) of 12 rows: how many are sent, and the index and number reported.
HOSTILE = {
    "negative_first": ((-1, 3, 12), (0, 0, 1)),
    "negative_number": ((1, -3, 12), (0, 0, 1)),
    "first_behind_the_rows": ((13, 0, 12), (0, 0, 1)),
    "last_behind_the_rows": ((9, 4, 12), (3, 3, 1)),
    "huge_first": ((2**31 - 1, 2**31 - 1, 12), (0, 0, 1)),
    "huge_number": ((0, 2**31 - 1, 12), (12, 12, 2**31 - 13)),
    "more_than_slots": ((2, 9, 7), (7, 7, 2)),
}


@pytest.mark.parametrize(("numbers", "outcome"), list(HOSTILE.values()), ids=list(HOSTILE))
def test_hostile_numbers_stay_in_bounds(
    library: Library, numbers: tuple[int, int, int], outcome: tuple[int, int, int]
) -> None:
    first, number, num_slots = numbers
    sent, index, reported = outcome
    # Each side has as many rows as slots: the smaller of the two is the window's.
    case = ExchangeCase(rows=(num_slots - 2, 0), first_row=0)
    exchange = Exchange(library, case)
    load = exchange.load(0, 0)
    load.rows = np.resize(load.rows, (12, case.row_bytes))
    load.scales = np.resize(load.scales, 12)
    load.first[0], load.number[0] = first, number
    want = exchange.windows[1].array.copy()
    report = exchange.send(0, load, zone=1, capacity=12)
    assert report[0, :3].tolist() == [REPORT_BAD_ROW, index, reported]
    assert not report[1:].any()
    got = exchange.windows[1].array
    _forget_paddings(exchange, [want, got])
    exchange.lay(want, load, 1, sent)
    assert np.array_equal(got, want)
    exchange.windows[1].check_guards()


def _forget_paddings(exchange: Exchange, windows: list[np.ndarray]) -> None:
    """What lies beside a scale in its 32 bytes is of no interest."""
    case = exchange.case
    for window in windows:
        for index in range(case.capacity):
            at = case.slots.offset(zone=1, index=index) + case.row_bytes
            window[at + 4 : at + 32] = 0
