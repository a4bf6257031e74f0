"""Candidates on this machine's CPU: ranks as processes, each candidate against the default."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.pipeline.candidate import Candidate, Sizes
from autotune.pipeline.intervals import Interval
from autotune.pipeline.race import Race, Result, compare
from moe_triton import Tuning, __version__
from moe_triton.backends.cpu.tuning import settings_of
from moe_triton.core.cpu_family import cpu_family
from moe_triton.processes import RankGroup
from moe_triton.schemes import SCHEMES, scheme_type
from moe_triton.schemes.part_tokens import CPU_TOKENS

PRODUCT = "A3"
WORTH = 0.97
"""The ratio to the default from which on a candidate is worth a row: less is within a bad day's noise."""
RACED = 3
"""Candidates beside the default in one race: each holds a window."""
LATE_S = 300.0
"""Seconds beyond a race's own until its ranks are given up: they make windows and compile kernels first."""

Report = Callable[[Sizes, Result], None]


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


def default_settings(sizes: Sizes) -> dict[str, int]:
    """What a rank is set to where nobody says anything."""
    usual = settings_of(Tuning(), sizes.ranks)
    part = min(CPU_TOKENS, sizes.tokens)
    return {
        "dispatch_tokens": part,
        "combine_tokens": part,
        "communication_blocks": 0,
        "num_blocks": max(1, cores() // sizes.ranks),
        "cached_bytes": usual.cached_bytes,
        "spins": usual.spins,
        "yields": usual.yields,
    }


def is_better(result: Result) -> bool:
    """Whether a candidate is faster than the default beyond doubt, and by enough to matter."""
    return not result.refused and result.ratio.high < 1 and result.ratio.median <= WORTH


class Measured:
    """The ranks of one group, which compare candidates. A context manager.

    Args:
        sizes: the group.
        effort: how long to look.
        report: told each result but the default's.
    """

    def __init__(self, sizes: Sizes, effort: Effort, report: Report = lambda *_: None) -> None:
        self.sizes, self.effort, self._report = sizes, effort, report
        self._ranks = RankGroup(sizes.ranks)

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *error: object) -> None:
        self._ranks.close()

    def race(self, default: Candidate, others: Sequence[Candidate], seed: int = 0) -> list[Result]:
        """Compares candidates with a default; its own result comes first.

        Raises:
            RankFailedError: a rank failed. Candidates that give other bits fail with `WrongBitsError`.
        """
        e, found = self.effort, list[Result]()
        for first in range(0, len(others), RACED):
            candidates = (default, *others[first : first + RACED])
            race = Race(self.sizes, candidates, e.most, seconds=e.seconds, seed=e.seed + seed)
            own, *results = self._ranks.run(compare, race, timeout_s=e.seconds + LATE_S)[0]
            for result in results:
                self._report(self.sizes, result)
            found = [*(found or [own]), *results]
        return found

    def schemes(self) -> list[Result]:
        """Every scheme with its defaults, the product's own one first."""
        default, *others = (Candidate(name) for name in SCHEMES[PRODUCT])
        return self.race(default, others)

    def settings(self, scheme: str) -> Result:
        """The best settings of a scheme against its defaults: setting by setting, from the best so far.

        What is found is measured once more, with other inputs: the best of many is in part the luckiest.
        """
        default = best = Candidate(scheme)
        space, left = scheme_type(self.sizes.config(scheme)).space, self.effort.budget
        found = space(self.sizes.config(scheme), "cpu", cores())
        for name, values in found.choices.items():
            now = {**default_settings(self.sizes), **best.settings}
            tried = [
                best.with_(**{name: v}) for v in values if v != now[name] and found.allows({**now, name: v})
            ]
            if not tried[:left]:
                continue
            good = [each for each in self.race(best, tried[:left])[1:] if is_better(each)]
            left -= len(tried[:left])
            best = min(good, key=lambda each: each.ratio.median).candidate if good else best
        if best == default:
            return Result(default, 0, Interval.exact(1.0))
        own, again = self.race(default, [best], seed=1)
        return again if is_better(again) else own
