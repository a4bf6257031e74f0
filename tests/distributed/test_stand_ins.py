"""Once a relay has died, another rank of its server passes on what it did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_triton.processes import RankFailedError, run_ranks
from tests.distributed.stand_ins import Relayed, rounds_with_stand_ins
from tests.distributed.stood_in_calls import (
    calls_stood_in,
    combines_of_before,
    ended_from_outside,
    rounds_with_a_late_relay,
)
from tests.distributed.test_masks import between_servers
from tests.patience import seconds

LONG = pytest.mark.long


@pytest.mark.parametrize("victim", [2, pytest.param(1, marks=LONG)])
def test_the_next_rank_stands_in(victim: int) -> None:
    case = between_servers("hierarchy", 2)
    of = Relayed(case, (victim,), {victim: victim ^ 1})
    results = run_ranks(rounds_with_stand_ins, 4, (of,), timeout_s=seconds(60.0), allow_failures=True)
    assert isinstance(results.pop(victim), RankFailedError)
    assert results == [[]] * 3


@pytest.mark.parametrize("tokens", [9, pytest.param(4, marks=LONG)])
def test_calls_of_each_kind(tokens: int) -> None:
    """Of one round and of several, which relays have a part in."""
    case = between_servers("hierarchy", 2)
    results = run_ranks(calls_stood_in, 4, (case, 1, tokens), timeout_s=seconds(60.0), allow_failures=True)
    assert isinstance(results.pop(1), RankFailedError)
    assert results == [[]] * 3


def test_dispatches_of_before_are_combined() -> None:
    case = between_servers("hierarchy", 2)
    results = run_ranks(combines_of_before, 4, (case, 2), timeout_s=seconds(60.0), allow_failures=True)
    assert isinstance(results.pop(2), RankFailedError)
    assert results == [[]] * 3


@LONG
def test_what_is_passed_on_learns_of_a_mask_by_itself() -> None:
    """Also where the call of the rank that stands in knows of it already: sums say whom they are without."""
    case = between_servers("hierarchy", 3, 6)
    case = replace(case, config=replace(case.config, num_topk=12))
    of = case, 1, 0, 2
    results = run_ranks(rounds_with_a_late_relay, 6, of, timeout_s=seconds(60.0), allow_failures=True)
    assert [isinstance(results.pop(victim), RankFailedError) for victim in (1, 0)] == [True, True]
    assert results == [[]] * 4


@LONG
@pytest.mark.parametrize(
    ("num_ranks", "victims"),
    [
        (4, {1: 0, 3: 2}),  # a sender of the rail that is stood in for
        (6, {2: 3, 4: 5}),  # on two of three servers
    ],
)
def test_two_relays_are_stood_in_for(num_ranks: int, victims: dict[int, int]) -> None:
    of = Relayed(between_servers("hierarchy", 2, num_ranks), tuple(victims), victims)
    results = run_ranks(rounds_with_stand_ins, num_ranks, (of,), timeout_s=seconds(60.0), allow_failures=True)
    assert [rank for rank, each in enumerate(results) if isinstance(each, RankFailedError)] == [*victims]
    assert [each for rank, each in enumerate(results) if rank not in victims] == [[]] * (num_ranks - 2)


@LONG
@pytest.mark.parametrize(("how", "error"), [("close", "BufferStateError"), ("Ctrl-C", "KeyboardInterrupt")])
def test_a_call_that_passes_on_can_be_ended(how: str, error: str) -> None:
    case = between_servers("hierarchy", 2)
    of = case, 2, how
    results = run_ranks(ended_from_outside, 4, of, timeout_s=seconds(60.0), allow_failures=True)
    assert results[3] == error
