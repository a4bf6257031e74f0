"""A rank is lost inside a dispatch of `direct`: its rows count on all ranks that have them, or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moe_triton.processes import RankFailedError, RankGroup, run_ranks
from tests.distributed.cases import Case, small_case
from tests.distributed.direct_workers import Way
from tests.distributed.lost_in_direct import Lost, Moment, lose
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
EVERYBODY = 0, 1, 3
# By rank how far it is when it hears of the loss. The lost one hears nothing.
ALL_WAIT_FOR_ROWS: tuple[Moment, ...] = ("rows", "rows", "before", "rows")


def long(*values: object) -> Any:
    """Values of a test that the short run leaves out."""
    return pytest.param(*values, marks=pytest.mark.long)


def case_of(quantize: str | None = None) -> Case:
    return small_case(4, "direct", quantize, rounds=5, weights=True, num_blocks=1)


def check(results: list[Any], of: Lost, *, repeated: int) -> list[int]:
    """That all others have gone on alike; how many rows each has taken out."""
    taken_out = []
    for rank in of.others:
        wrong, times, left_out = results[rank]
        assert (wrong, times) == ([], repeated)
        taken_out.append(left_out)
    return taken_out


@pytest.mark.parametrize("hearing", [(0,), long((1, 3)), long(())])
def test_counts_that_some_lack_have_all_repeat(ranks: Groups, hearing: tuple[int, ...]) -> None:
    noticed = tuple("rows" if rank in hearing else "counts" for rank in range(4))
    of = Lost(case_of(), 1, hearing, noticed)
    assert check(ranks(4).run(lose, of, "elsewhere", {}), of, repeated=1) == [-1] * 3


@pytest.mark.parametrize(
    ("quantize", "way"),
    [
        (None, "in place"),
        ("int8_128", "elsewhere"),
        *(long(*each) for each in [(None, "elsewhere"), ("int8", "in place"), ("int8_128", "in place")]),
    ],
)
def test_rows_of_whom_all_have_counts_are_taken_out(ranks: Groups, quantize: str | None, way: Way) -> None:
    of = Lost(case_of(quantize), 1, EVERYBODY, ALL_WAIT_FOR_ROWS)
    assert all(rows > 0 for rows in check(ranks(4).run(lose, of, way, {}), of, repeated=0))


@pytest.mark.parametrize("way", ["elsewhere", "in place"])
def test_who_has_all_rows_keeps_them(ranks: Groups, way: Way) -> None:
    of = Lost(case_of(), 4, (0,), ("results", "rows", "before", "rows"))
    first, *others = check(ranks(4).run(lose, of, way, {}), of, repeated=0)
    assert first == -1
    assert all(rows > 0 for rows in others)


@pytest.mark.parametrize("is_repeated", [False, long(True)])
def test_rows_that_are_sent_late_come_nowhere(ranks: Groups, is_repeated: bool) -> None:
    if is_repeated:
        of = Lost(case_of(), 1, (0,), ("rows", "counts", "before", "counts"), sends_late=True)
    else:
        of = Lost(case_of(), 1, EVERYBODY, ALL_WAIT_FOR_ROWS, sends_late=True)
    check(ranks(4).run(lose, of, "elsewhere", {}), of, repeated=int(is_repeated))


def test_who_begins_without_a_rank_has_all_repeat(ranks: Groups) -> None:
    of = Lost(case_of(), 1, EVERYBODY, ("before", "meeting", "before", "meeting"))
    assert check(ranks(4).run(lose, of, "elsewhere", {}), of, repeated=1) == [-1] * 3


@pytest.mark.parametrize("meeting", [long(0), 1])
def test_another_one_dies_before_it_is_repeated(meeting: int) -> None:
    of = Lost(case_of(), 1, (0,), dies=True, also_dies=(3, meeting))
    options = {"on_lost": "mask", "timeout_s": seconds(300.0)}
    results = run_ranks(lose, 4, (of, "elsewhere", options), timeout_s=seconds(60.0), allow_failures=True)
    assert [isinstance(result, RankFailedError) for result in results] == [False, False, True, True]
    check(results, of, repeated=1)
