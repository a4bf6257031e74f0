"""When enough was measured: intervals of ratios, and whether they decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

FEWEST = 12
"""Ratios before an interval means anything: below, its ends would be the extremes or beyond."""
NORMAL_95 = 1.96
LOOKING = 3.0
"""Standard deviations of the intervals that end a race: who looks many times at 95% is wrong many times."""


class Interval(NamedTuple):
    """The median of some ratios, and its 95% interval."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(ratios: Sequence[float], deviations: float = NORMAL_95) -> Interval:
        """From order statistics, which assume nothing of how ratios are distributed.

        The number of values below the median is binomial; its normal approximation gives the ranks of the
        ends (Conover, Practical Nonparametric Statistics, section 3.2).

        Args:
            ratios: in any order.
            deviations: half of the interval's width, in standard deviations of that number.
        """
        ordered, count = sorted(ratios), len(ratios)
        if count < FEWEST:
            return Interval(0.0, ordered[count // 2] if ordered else 1.0, math.inf)
        half = deviations * math.sqrt(count) / 2
        low, high = math.floor(count / 2 - half), math.ceil(count / 2 + half)
        middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
        return Interval(ordered[max(low, 0)], middle, ordered[min(high, count - 1)])

    @staticmethod
    def exact(ratio: float) -> Interval:
        """The interval of a ratio that is computed, not measured: both ends are the ratio itself."""
        return Interval(ratio, ratio, ratio)

    def decides(self, precision: float) -> bool:
        """Whether the ratio is known to lie on one side of 1, or as precisely as is asked for."""
        return self.low > 1 or self.high < 1 or self.high - self.low < precision

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.2f} to {self.high:.2f})"
