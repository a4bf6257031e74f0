"""How ranks, times and sizes are said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core.flight_words import bytes_in_words, printable, ranks_in_words, time_in_words


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 2, 5], "ranks 0, 2 and 5"),
        ([0, 1, 2, 5], "ranks 0 to 2 and 5"),
        ([7, 8, 0, 1, 2, 5], "ranks 0 to 2, 5, 7 and 8"),
    ],
)
def test_ranks_are_said_as_people_count(ranks: list[int], said: str) -> None:
    assert ranks_in_words(ranks) == said


@pytest.mark.parametrize(
    ("ns", "said"),
    [
        (-5, "0 us"),
        (12_340, "12.3 us"),
        (999_900, "1 ms"),
        (2_100_000, "2.1 ms"),
        (4_980_000_000, "4.98 s"),
        (119_000_000_000, "119 s"),
        (121_000_000_000, "2.02 min"),
        (3 * 3600 * 10**9, "3 h"),
        (10 * 86_400 * 10**9, "10 days"),
    ],
)
def test_a_time_has_the_unit_that_suits_it(ns: int, said: str) -> None:
    assert time_in_words(ns) == said


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 B"), (999, "999 B"), (1_234_567, "1.23 MB"), (10**16, "10000 TB")]
)
def test_bytes_have_the_unit_that_suits_them(number: int, said: str) -> None:
    assert bytes_in_words(number) == said


@given(st.floats(0, 2.0**64))
def test_no_number_is_said_with_an_exponent(number: float) -> None:
    assert "e+" not in time_in_words(number) + bytes_in_words(number)


@given(st.text())
def test_what_others_wrote_is_a_line_that_a_terminal_only_shows(text: str) -> None:
    said = printable(text)
    assert said.isprintable()
    said.encode()


def test_a_terminal_is_told_nothing() -> None:
    assert printable("a\x1b[31m\ud800\n b") == r"a\x1b[31m\ud800 b"
