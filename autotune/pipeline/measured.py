"""Candidates on this machine's CPU: ranks as processes, each candidate against the default."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from autotune.pipeline.candidate import Candidate, Sizes
from autotune.pipeline.race import Race, Result, compare
from autotune.search.task import WrongBitsError
from moe_triton import __version__
from moe_triton.core.cpu_family import cpu_family
from moe_triton.processes import RankFailedError, RankGroup

LATE_S = 300.0
"""Seconds beyond a race's own until its ranks are given up: they make windows and compile kernels first."""


@dataclass(frozen=True)
class Effort:
    """How long to look.

    Attributes:
        budget: candidates of one scheme at one size, at most.
        seconds: of one race, at most.
        most: iterations of one race, at most.
        seed: of inputs and of the order.
    """

    budget: int = 24
    seconds: float = 20.0
    most: int = 400
    seed: int = 0


def cores() -> int:
    """Cores that the ranks share."""
    return len(os.sched_getaffinity(0))


def source() -> str:
    """Where measured figures come from."""
    return f"measured by moe_triton {__version__} on {cores()} cores of {cpu_family()}"


class Measured:
    """The ranks of one group, which compare candidates; started for the first. A context manager.

    One candidate is measured at a time: its ranks share all cores, so that another one beside it would be
    measured as well.

    Args:
        sizes: the group.
        effort: how long to look.
    """

    def __init__(self, sizes: Sizes, effort: Effort) -> None:
        self.sizes, self.effort = sizes, effort
        self._ranks: RankGroup | None = None

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *error: object) -> None:
        if self._ranks:
            self._ranks.close()

    def price(self, default: Candidate, candidate: Candidate, seed: int = 0) -> Result:
        """Compares a candidate with a default, or times the default by itself.

        Raises:
            WrongBitsError: the candidate gives other bits than the default.
            RankFailedError: a rank failed.
        """
        both = dict.fromkeys((str(default), str(candidate)))
        candidates = (default, candidate)[: len(both)]
        race = Race(self.sizes, candidates, self.effort.most, seconds=self.effort.seconds, seed=seed)
        if self._ranks is None:
            self._ranks = RankGroup(self.sizes.ranks, imports_main=False)
            self._ranks.run(_ignore_interrupts)
        try:
            results: list[Result] = self._ranks.run(compare, race, timeout_s=race.seconds + LATE_S)[0]
        except RankFailedError as error:
            raise _as_wrong_bits(error) or error from None
        return results[-1]


def _ignore_interrupts(rank: int, num_ranks: int) -> None:
    """Ctrl-C reaches every process of a terminal: the first one decides, and ends the ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _as_wrong_bits(error: RankFailedError) -> WrongBitsError | None:
    """The error that every rank has raised because a candidate gives other bits, if that is it."""
    name, _, said = error.failures[min(error.failures)].strip().rpartition("\n")[2].partition(": ")
    return WrongBitsError(said) if name.endswith(WrongBitsError.__name__) else None
