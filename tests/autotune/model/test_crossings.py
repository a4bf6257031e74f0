"""Lines cross where they are said to."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from autotune.cli.model.cluster import Crossing, crossings

SIZES = (8, 16, 32, 64)


def test_straight_lines_cross_where_they_are_equal() -> None:
    lines = {"flat": [10.0] * 4, "steep": [0.25 * size for size in SIZES]}
    assert crossings(SIZES, lines) == [Crossing(40, below="steep", above="flat")]
    assert crossings(SIZES, dict(reversed(lines.items()))) == [Crossing(40, below="steep", above="flat")]


def test_lines_may_cross_twice_and_at_a_size() -> None:
    lines = {"a": [1.0, 2.0, 1.0, 0.0], "b": [0.0, 2.0, 2.0, 2.0], "c": [3.0, 3.0, 3.0, 3.0]}
    assert crossings(SIZES, lines) == [Crossing(16, below="b", above="a")]
    again = {"a": [0.0, 3.0, 3.0, 0.0], "b": [1.0] * 4}
    assert [(c.below, c.above) for c in crossings(SIZES, again)] == [("a", "b"), ("b", "a")]


def test_lines_that_touch_do_not_cross() -> None:
    assert crossings(SIZES, {"a": [1.0, 0.0, 0.0, 1.0], "b": [0.0] * 4}) == []
    assert crossings(SIZES, {"a": [0.0] * 4, "b": [0.0] * 4}) == []


_lines = st.lists(st.integers(-9, 9), min_size=4, max_size=4)


@given(_lines, _lines)
def test_between_crossings_the_lower_one_stays_lower(first: list[int], second: list[int]) -> None:
    found = crossings(SIZES, {"a": first, "b": second})
    assert all(before.above == after.below for before, after in itertools.pairwise(found))
    assert all(crossing.below != crossing.above for crossing in found)
    for size, a, b in zip(SIZES, first, second, strict=True):
        before = [crossing for crossing in found if crossing.size < size]
        after = [crossing for crossing in found if crossing.size > size]
        if a != b:
            lower = "a" if a < b else "b"
            assert not before or before[-1].above == lower
            assert not after or after[0].below == lower
