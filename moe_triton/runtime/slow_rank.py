"""Says which rank the others wait for, round after round.

Whether a rank is slow is seen by those that wait for it: it waits least itself. Every rank looks at its own
newest runs, now and then, and says what it finds in the log.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_triton.core.flight_file import Run
from moe_triton.core.logs import RankLog

NUM_ROUNDS = 100
"""The newest that are looked at."""
FEWEST_ROUNDS = 20
"""Of fewer nothing is said: a recorder's ring holds fewer rounds where one takes many runs."""
LEAST_SHARE = 0.8
"""Of the rounds, in which the slow rank is awaited longest."""
LEAST_US = 1000.0
"""That it is awaited then on average."""
LEAST_OF_ROUND = 0.2
"""Of the time of an average round, that it is awaited on average."""
COUNTED_US = LEAST_US / 10
"""A shorter wait is none for a slow rank: of two ranks each waits for the other one, if for anybody."""

EVERY_RUNS = 100
EVERY_S = 10.0
"""To look takes milliseconds of Python."""
SAID_EVERY_S = 60.0


@dataclass(frozen=True)
class Slow:
    """A rank that others wait for.

    Attributes:
        rank: it.
        num_longest: rounds in which it was awaited longest.
        num_rounds: of so many.
        average_us: that it was awaited in those, on average.
    """

    rank: int
    num_longest: int
    num_rounds: int
    average_us: float


def slow_rank(runs: Sequence[Run]) -> Slow | None:
    """The rank that was awaited longest in most of the last rounds, if there is one and it took long.

    A round is a dispatch and what follows it until the next one: who is late with its experts is awaited in
    a combine, and not in the dispatch before.

    Args:
        runs: the newest, oldest first; what lies before the first dispatch of them is left out.
    """
    rounds = rounds_of([run for run in runs if run.end_ns is not None])[-NUM_ROUNDS:]
    if len(rounds) < FEWEST_ROUNDS:
        return None
    longest = [max((run.awaited for run in each if run.awaited), key=_us, default=None) for each in rounds]
    counted = [(rank, us) for rank, us in filter(None, longest) if us >= COUNTED_US]
    ((rank, number),) = Counter(rank for rank, _ in counted).most_common(1) or [(-1, 0)]
    if number < LEAST_SHARE * len(rounds):
        return None
    average_us = sum(us for other, us in counted if other == rank) / number
    round_us = sum(_time_us(run) for each in rounds for run in each) / len(rounds)
    if average_us < max(LEAST_US, LEAST_OF_ROUND * round_us):
        return None
    return Slow(rank, number, len(rounds), average_us)


def rounds_of(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs by round, without those before the first dispatch.

    Args:
        runs: oldest first. Runs of one dispatch, where it has several, are of one round.
    """
    rounds: list[list[Run]] = []
    for run in runs:
        if run.operator == "dispatch" and not (rounds and rounds[-1][0].number == run.number):
            rounds.append([])
        if rounds:
            rounds[-1].append(run)
    return rounds


def _us(awaited: tuple[int, int]) -> int:
    return awaited[1]


def _time_us(run: Run) -> float:
    return ((run.end_ns or run.begin_ns) - run.begin_ns) / 1e3


class SlowRankLog:
    """Says of one buffer which rank is slow: a line a minute at most.

    Args:
        read: returns the newest runs, oldest first: two for each of `NUM_ROUNDS` are enough.
        log: of this rank, in the room "waits".
        clock: seconds.
        relays: whether ranks pass on what others send, so that who is awaited may itself have waited.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[Run]],
        log: RankLog,
        clock: Callable[[], float] = time.monotonic,
        *,
        relays: bool = False,
    ) -> None:
        self._relays = relays
        self._read, self._log, self._clock = read, log, clock
        self._next_run, self._next_s = EVERY_RUNS, clock()

    def looked(self, num_runs: int) -> None:
        """Runs have ended: looks at them if it is time to.

        Args:
            num_runs: how many have, since the buffer was constructed.
        """
        if num_runs >= self._next_run:
            self._look(num_runs)

    def _look(self, num_runs: int) -> None:
        self._next_run = num_runs + EVERY_RUNS
        now = self._clock()
        if now < self._next_s:
            return
        slow = slow_rank(self._read())
        self._next_s = now + (EVERY_S if slow is None else SAID_EVERY_S)
        if slow is not None:
            self._log.warning(
                "rank %d%s was awaited longest in %d of the last %d rounds, %.1f ms on average",
                slow.rank,
                ", or one that it passes on for," if self._relays else "",
                slow.num_longest,
                slow.num_rounds,
                slow.average_us / 1e3,
            )
