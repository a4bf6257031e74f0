"""Closing while a call is under way: the call ends at once, and nothing is taken from under it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_triton.processes import RankGroup
from tests.distributed import closed
from tests.distributed.interrupted import WAYS, Way
from tests.patience import seconds

Groups = Callable[[int], RankGroup]


@pytest.mark.parametrize(
    ("way", "how"), [(way, ("thread", "handler")[i % 2]) for i, way in enumerate(WAYS)], ids=str
)
def test_a_call_that_waits_ends_when_its_buffer_is_closed(ranks: Groups, way: Way, how: str) -> None:
    first, then, second, given_back = ranks(2).run(closed.close_meanwhile, way, how)[0]
    said = f"the buffer was closed while it was in a {way.operator}"
    assert first == ("BufferStateError", said, True)
    assert then == ("BufferStateError", "the buffer is closed. Construct a new one.", True)
    assert second == ("", "", True)
    assert given_back


def test_threads_that_close_at_once_all_wait_for_the_call(ranks: Groups) -> None:
    said, given_back = ranks(2).run(closed.close_in_threads)[0]
    assert said[0] == "BufferStateError"
    assert given_back == [True] * 3


def test_a_group_that_is_released_ends_its_calls(ranks: Groups) -> None:
    said = ranks(2).run(closed.release_meanwhile)[0]
    assert said == ("BufferStateError", "the buffer was closed while it was in a dispatch", True)


def test_closing_while_a_call_compiles(ranks: Groups) -> None:
    said = ranks(2).run(closed.close_while_compiling)[0]
    assert said[0] == "BufferStateError"
    assert "closed" in said[1]


def test_outputs_in_the_window_outlive_it(ranks: Groups) -> None:
    assert ranks(2).run(closed.look_after_close) == [True, True]


@pytest.mark.parametrize("rounds", [18, pytest.param(600, marks=pytest.mark.long)])
def test_closing_at_any_moment(ranks: Groups, rounds: int) -> None:
    assert ranks(2).run(closed.close_at_any_moment, rounds, timeout_s=seconds(600.0)) == [[], []]
