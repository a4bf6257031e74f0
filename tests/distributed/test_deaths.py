"""Ranks that die are noticed at once; who leaves, or is stopped, is not taken for dead."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from moe_triton.processes import RankFailedError, run_ranks
from moe_triton.rendezvous.deaths import IN_STORE
from moe_triton.rendezvous.process_ends import BY_LINE, BY_LOCK, BY_PIDFD
from tests.distributed import deaths
from tests.distributed.cases import small_case
from tests.patience import seconds


@pytest.fixture
def children() -> Iterator[list[int]]:
    """Processes that ranks have left behind."""
    left: list[int] = []
    yield left
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def survivors(function: Any, num_ranks: int, *arguments: Any, **options: Any) -> list[Any]:
    """What the ranks that have not died return."""
    results = run_ranks(function, num_ranks, arguments, allow_failures=True, timeout_s=seconds(60), **options)
    for result in results:
        assert not isinstance(result, RankFailedError) or "died without an error" in str(result), result
    return [result for result in results if not isinstance(result, RankFailedError)]


@pytest.mark.parametrize(
    ("scheme", "moment", "has_pidfds"),
    [
        ("fullmesh_v1", "dispatch", True),
        ("fullmesh_v1", "dispatch", False),
        ("direct", "combine", True),
        ("fullmesh_v2", "between calls", False),
    ],
)
def test_a_rank_that_is_killed_is_named_at_once(
    scheme: str, moment: str, has_pidfds: bool, children: list[int]
) -> None:
    results = survivors(
        deaths.killed, 3, small_case(3, scheme), moment, has_pidfds, hear=lambda _, pid: children.append(pid)
    )
    assert len(results) == 2
    for (operator, missing, said), broken, health in results:
        assert operator == ("call" if moment == "between calls" else moment) or operator == "call"
        assert missing == (2,)
        assert f"rank 2 is dead (the end of {BY_PIDFD if has_pidfds else BY_LOCK})" in said
        assert "the buffer is broken" in broken
        assert "[2]" in broken
        assert (health.rank, health.state) == (2, "dead")


@pytest.mark.parametrize(
    ("dying", "are_joined"),
    [((2, 3), True), ((3,), False), ((2, 3), False)],
    ids=["by connections", "from its neighbour", "by its silence"],
)
def test_other_servers_hear_of_a_death(dying: tuple[int, ...], are_joined: bool) -> None:
    results = survivors(deaths.server_killed, 4, deaths.case_on_servers(4), dying, are_joined)
    assert len(results) == 4 - len(dying)
    for rank, ((_, missing, said), signs, health) in enumerate(results):
        assert set(missing) <= set(dying)
        assert "is dead" in said
        states = [each.state for each in health]
        assert states[dying[0] :] == ["dead"] * len(dying)
        assert states[rank] == "alive"
        # Played servers are not watched as processes are.
        far = BY_LINE if are_joined else IN_STORE
        assert [sign for n, sign in enumerate(signs) if n // 2 != rank // 2] == [far] * 2
        assert signs[rank ^ 1] == BY_PIDFD
        if rank // 2 == 0:
            words = BY_LINE if are_joined else BY_PIDFD if len(dying) == 1 else "no heartbeat of its server"
            assert all(words in health[each].sign for each in dying)


def test_a_wait_that_needs_nothing_of_the_dead_goes_on() -> None:
    for are_right, (operator, missing, _) in survivors(deaths.died_beside_others, 3):
        assert are_right
        assert (operator, missing) == ("call", (2,))


def test_who_is_stuck_behind_the_dead_does_not_wait_for_them() -> None:
    first, second = survivors(deaths.stuck_behind, 3)
    assert first[:2] == ("combine", (2,))
    assert "Rank(s) [1], which it waited for, have given up without them" in first[2]
    assert second[:2] == ("call", (2,))


def test_who_leaves_is_not_dead() -> None:
    ((health, (operator, missing, said)),) = survivors(deaths.leave, 3)
    assert [each.state for each in health] == ["alive", "left", "left"]
    assert (operator, missing) == ("dispatch", (1, 2))
    assert "rank 1 has left (it has closed its buffers)" in said
    assert "rank 2 has left (its process ended with a buffer open)" in said


def test_who_is_stopped_is_late_and_not_dead() -> None:
    ((kind, missing, found, then),) = survivors(deaths.stop, 2)
    assert (kind, missing) == ("CommunicationTimeoutError", (1,))
    assert [each.state for each in found] == ["alive", "late"]
    assert then == ["alive", "alive"]


def test_buffers_of_a_group_share_what_they_watch() -> None:
    ((said, with_one, with_four),) = survivors(deaths.shared, 2)
    assert said == [(1,)] * 3
    assert with_one[0] == 1
    assert with_one[1] >= 4  # of each, a board and a pidfd
    # An entrance of each construction is open for a while.
    assert with_four[0] == 1
    assert with_four[1] <= with_one[1] + 3


@pytest.mark.parametrize(
    ("dying", "moment", "hosts"),
    [(2, "said", False), (0, "said", False), (2, 1, False), (0, 2, False), (1, 3, False), (0, 2, True)]
    + [(dying, "take", False) for dying in range(3)],
)
def test_who_dies_in_a_construction_is_named_at_once(dying: int, moment: int | str, hosts: bool) -> None:
    """Whoever waits there for it has a time-out that the test does not wait for."""
    results = survivors(deaths.dies_constructing, 3, dying, moment, hosts)
    assert len(results) == 2
    for _, operator, missing, said in results:
        assert (operator, missing) == ("rendezvous", (dying,)), said
    # Others may hear first that one has given up.
    named = [said for is_lost, *_, said in results if is_lost]
    assert named
    for said in named:
        assert f"rank {dying} is dead (the end of its process" in said
        assert "Construct it without those that are lost." in said


def test_who_dies_beside_a_buffer_is_not_waited_for_in_the_next_construction() -> None:
    for operator, missing, said in survivors(deaths.dies_beside_a_buffer, 3):
        assert (operator, missing) == ("rendezvous", (1,))
        assert "rank 1 is dead" in said


def test_who_is_known_to_be_dead_is_not_waited_for_in_a_construction() -> None:
    for operator, missing, said in survivors(deaths.known_to_be_dead, 3):
        assert (operator, missing) == ("rendezvous", (1,))
        assert "rank 1 is dead" in said
