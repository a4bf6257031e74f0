"""A slow rank is found in runs as they were recorded, and said once a minute at most."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core.flight_file import NUM_RUNS, Run
from moe_triton.core.logs import log_of
from moe_triton.runtime.slow_rank import (
    EVERY_RUNS,
    EVERY_S,
    FEWEST_ROUNDS,
    NUM_ROUNDS,
    SAID_EVERY_S,
    Slow,
    SlowRankLog,
    rounds_of,
    slow_rank,
)

MS = 1000
Awaited = tuple[int, int] | None


def run_of(
    index: int, operator: str, number: int, us: int, awaited: Awaited = None, *, ended: bool = True
) -> Run:
    """One of so many microseconds."""
    begin_ns = 10**12 + index * 10**9
    end_ns = begin_ns + us * 1000 if ended else None
    return Run(index, operator, number, number % 2, "", begin_ns, end_ns, 8, 8, "wait", {}, awaited, "well")


def pairs(awaited: Sequence[tuple[Awaited, Awaited]], us: int = 4 * MS) -> list[Run]:
    """A dispatch and a combine for each, whom they waited for, and how long a round of both took."""
    runs: list[Run] = []
    for number, (of_dispatch, of_combine) in enumerate(awaited):
        runs.append(run_of(2 * number + 1, "dispatch", number, us // 2, of_dispatch))
        runs.append(run_of(2 * number + 2, "combine", number, us // 2, of_combine))
    return runs


def test_the_line_of_the_issue_is_what_is_found() -> None:
    late = [((2, 30), (5, 2100))] * 94 + [((5, 40), (3, 900))] * 6
    assert slow_rank(pairs(late)) == Slow(rank=5, num_longest=94, num_rounds=100, average_us=2100.0)


def test_only_the_last_rounds_count() -> None:
    before, after = [((1, 3 * MS), None)] * 20, [((4, 3 * MS), None)] * 100
    assert slow_rank(pairs(before + after)) == Slow(4, 100, 100, 3000.0)
    assert slow_rank(pairs(after + before)) == Slow(4, 80, 100, 3000.0)
    assert slow_rank(pairs(after + before + before[:1])) is None


@pytest.mark.parametrize(
    ("late", "us", "is_slow"),
    [
        ([((5, MS), None)] * 100, 5 * MS, True),
        ([((5, MS - 1), None)] * 100, 2 * MS, False),
        ([((5, MS), None)] * 100, 5 * MS + 10, False),
        ([((5, 9 * MS), None)] * 80 + [(None, None)] * 20, 10 * MS, True),
        ([((5, 9 * MS), None)] * 79 + [(None, None)] * 21, 10 * MS, False),
        ([((5, 9 * MS), None)] * 79 + [((5, 99), None)] * 21, 10 * MS, False),
        ([((5, 9 * MS), None), ((4, 9 * MS), None)] * 50, 10 * MS, False),
        ([(None, None)] * 100, 10 * MS, False),
    ],
)
def test_a_rank_is_slow_from_there_on(late: list[tuple[Awaited, Awaited]], us: int, is_slow: bool) -> None:
    assert (slow_rank(pairs(late, us)) is not None) == is_slow


def test_few_rounds_say_nothing() -> None:
    late = [((1, 3 * MS), None)]
    assert slow_rank([]) is None
    assert slow_rank(pairs(late * (FEWEST_ROUNDS - 1))) is None
    assert slow_rank(pairs(late * FEWEST_ROUNDS)) == Slow(1, FEWEST_ROUNDS, FEWEST_ROUNDS, 3000.0)


def test_a_run_that_has_not_ended_does_not_count() -> None:
    runs = pairs([((1, 3 * MS), None)] * 30)
    running = run_of(61, "dispatch", 30, 0, (2, 10**6), ended=False)
    assert slow_rank([*runs, running]) == slow_rank(runs)


def test_a_round_is_a_dispatch_and_what_follows_it() -> None:
    d, c, b = "dispatch", "combine", "barrier"
    calls = [(c, 6), (d, 7), (d, 7), (c, 7), (b, 0), (d, 8), (c, 8), (d, 9)]
    runs = [run_of(index, *call, 10) for index, call in enumerate(calls, 1)]
    assert [[run.index for run in each] for each in rounds_of(runs)] == [[2, 3, 4, 5], [6, 7], [8]]


@given(st.integers(0, 2**32), st.integers(2, 16), st.integers(1, 20))
def test_ranks_that_are_late_by_turns_are_not_slow(seed: int, num_ranks: int, late_ms: int) -> None:
    """As rank 0 sees it, which waits for the last one, if that is later than it is itself."""
    of = random.Random(seed)
    late: list[tuple[Awaited, Awaited]] = []
    for _ in range(NUM_ROUNDS):
        times = [of.randrange(late_ms * MS) for _ in range(num_ranks)]
        last = max(range(num_ranks), key=times.__getitem__)
        late.append((None, (last, times[last] - times[0]) if last else None))
    assert slow_rank(pairs(late, late_ms * MS)) is None


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Reads:
    """Runs that are read, and how often."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs, self.count = runs, 0

    def __call__(self) -> list[Run]:
        self.count += 1
        return self.runs


SLOW = [((5, 2100), None)] * 94 + [((2, 200), None)] * 6


def test_it_is_said_once_a_minute_and_looked_at_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock, reads = Clock(), Reads(pairs([(None, None)] * 100))
    log = SlowRankLog(reads, log_of("waits", rank=1, num_ranks=8, group="ab12"), clock)
    for num_runs in range(EVERY_RUNS):
        log.looked(num_runs)
    assert reads.count == 0
    log.looked(EVERY_RUNS)
    log.looked(EVERY_RUNS + 1)
    assert (reads.count, caplog.messages) == (1, [])
    reads.runs = pairs(SLOW)
    clock.now += EVERY_S - 1
    log.looked(2 * EVERY_RUNS)
    assert reads.count == 1
    clock.now += 1
    log.looked(3 * EVERY_RUNS)
    said = (
        "rank 1 of 8 [group ab12]: rank 5 was awaited longest in 94 of the last 100 rounds, 2.1 ms on average"
    )
    assert caplog.messages == [said]
    clock.now += SAID_EVERY_S - 1
    log.looked(4 * EVERY_RUNS)
    assert reads.count == 2
    clock.now += 1
    log.looked(5 * EVERY_RUNS)
    assert caplog.messages == [said] * 2
    (first, _) = caplog.records
    assert (first.levelname, first.name) == ("WARNING", "moe_triton.waits")


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 100)), max_size=60))
def test_whatever_the_pace_it_is_said_once_a_minute_at_most(steps: list[tuple[int, float]]) -> None:
    clock, reads, told = Clock(), Reads(pairs(SLOW)), list[float]()

    class Log:
        def warning(self, *_: object) -> None:
            told.append(clock.now)

    log, num_runs = SlowRankLog(reads, Log(), clock), 0  # type: ignore[arg-type]
    for runs, passed in steps:
        num_runs, clock.now = num_runs + runs, clock.now + passed
        log.looked(num_runs)
    assert all(later - before >= SAID_EVERY_S for before, later in itertools.pairwise(told))
    assert bool(told) == (num_runs >= EVERY_RUNS)
    assert reads.count == len(told)


def test_the_recorders_ring_holds_what_is_looked_at() -> None:
    assert 2 * NUM_ROUNDS <= NUM_RUNS
