"""A trial that was not survived is seen as such: a check that cannot fail shows nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from moe_triton.processes import RankFailedError
from tests.chaos.trial import (
    FAULTS,
    LAST_STRIKE,
    SCHEMES,
    Account,
    Seen,
    Trial,
    complaints,
    doubts,
    worst_seconds,
)

LOST = Seen("RankLostError", "dispatch number 3 cannot go on without rank(s) [1]", 1.5, (1,))
LATE = "CommunicationTimeoutError"
DOUBTFUL = replace(LOST, missing=(0, 1), uncertain=(0,))
KILL = Trial("kill", "direct", 3, 1, 3, "dispatch", 0)
DEAD = RankFailedError({1: "died without an error"})
FINE = Account((LOST,))


def test_a_trial_that_goes_as_it_should_is_survived() -> None:
    assert complaints(KILL, [FINE, DEAD, FINE]) == []
    assert worst_seconds([FINE, DEAD, Account()]) == 1.5
    assert complaints(KILL, [Account((DOUBTFUL,)), DEAD, FINE]) == []
    assert doubts(KILL, [Account((DOUBTFUL,)), DEAD, FINE]) == 1


@pytest.mark.parametrize(
    ("account", "said"),
    [
        (DEAD, "died without an error"),
        (Account(), "met None"),
        (Account((Seen("BufferStateError", "the buffer is closed", 0.0),)), "not RankLostError"),
        (Account((Seen(LOST.kind, "timed out waiting for rank(s) [2]", 1.0),)), "does not name rank 1"),
        (Account((replace(LOST, missing=(0, 1)),)), "names an innocent rank"),
        (Account((LOST,), wrong=("round 4 gave other bits than the reference",)), "other bits"),
        (Account((LOST,), left_behind=("/dev/shm/a window",)), "a window"),
    ],
)
def test_anything_else_is_told(account: Account | RankFailedError, said: str) -> None:
    (complaint,) = complaints(KILL, [FINE, DEAD, account])
    assert said in complaint


def test_only_a_deadly_fault_may_take_its_victim() -> None:
    late = Trial("late", "direct", 2, 1, 0, "combine", 0)
    assert complaints(late, [Account((Seen(LATE, "rank(s) [1]", 1.0),)), DEAD]) == [str(DEAD)]


def test_every_fault_can_strike_every_rank_before_the_last_rounds() -> None:
    source = random.Random(0)
    for fault in FAULTS:
        trials = [Trial.draw(fault, source) for _ in range(200)]
        assert all(trial.number < LAST_STRIKE and trial.victim < trial.num_ranks for trial in trials)
        assert {trial.victim for trial in trials if trial.num_ranks == 4} == {0, 1, 2, 3}
        servers = {(trial.scheme, trial.ranks_per_server) for trial in trials}
        assert ({("hierarchy", 1), ("fullmesh", None), ("fullmesh", 1)} <= servers) == (
            FAULTS[fault].schemes == SCHEMES
        )
        assert ("hierarchy", None) not in servers
        assert not FAULTS[fault].is_deadly or min(trial.num_ranks for trial in trials) == 3
