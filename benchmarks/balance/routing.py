"""`Day`: which experts tokens go to, step by step, while what is popular changes.

Popularity follows Zipf's law: the n-th expert has n ** -exponent. Experts stand on a ring in an order that
follows from the seed; the head of the law moves along it, so that experts become popular and stop to be, each
in its time. Of K experts of a token, each is drawn in proportion to popularity among those not drawn before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SAMPLED_TOKENS = 1 << 14  # for what node-limited routing expects, which has no formula
POINTS = 16  # of a window, at which its popularity is looked at
KNOTS = 50  # of a day, at which node-limited routing is sampled
BEST_OF_GROUP = 2  # a group's score is that of its two best experts (DeepSeek-V3, technical report, 2.1.2)
_CLOSE = 1e-3


@dataclass(frozen=True)
class Burst:
    """Experts that are more popular for a while.

    Attributes:
        begin: step.
        steps: how many it lasts.
        experts: whose popularity is multiplied.
        factor: by which.
    """

    begin: int
    steps: int
    experts: tuple[int, ...]
    factor: float


BURSTS = (
    Burst(begin=12_000, steps=600, experts=(200,), factor=8.0),
    Burst(begin=33_000, steps=4_000, experts=(70, 71, 72, 73), factor=4.0),
)
"""Of a day of 50,000 steps and 256 experts."""


@dataclass(frozen=True)
class Day:
    """What tokens want over a day.

    Attributes:
        steps: of the day.
        experts: E.
        topk: K.
        exponent: of Zipf's law.
        travel: places on the ring that the head moves by in the day.
        bursts: beside that.
        groups, top_groups: a token's experts lie in so many of so many groups of neighbours; (1, 1) for any.
        seed: of all that is drawn.
    """

    steps: int = 50_000
    experts: int = 256
    topk: int = 8
    exponent: float = 0.75
    travel: float = 128.0
    bursts: tuple[Burst, ...] = BURSTS
    groups: int = 1
    top_groups: int = 1
    seed: int = 0
    _known: dict[int, Floats] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_node_limited(self) -> bool:
        """Whether the experts of a token are not any."""
        return self.top_groups < self.groups

    @cached_property
    def _places(self) -> Ints:
        """(E,) place of each expert on the ring."""
        return np.random.default_rng(self.seed).permutation(self.experts)

    def popularity(self, step: float) -> Floats:
        """(E,) float64, how popular experts are at a step, also before the day, against each other."""
        ahead = (self._places - self.travel * step / self.steps) % self.experts
        # As far behind the head as before it: places 0, 1, -1, 2, -2, ... have popularities 1, 2, 3, ...
        away = np.minimum(ahead, self.experts - ahead)
        popular = (1 + 2 * away) ** -self.exponent
        for burst in self.bursts:
            if burst.begin <= step < burst.begin + burst.steps:
                popular[list(burst.experts)] *= burst.factor
        return np.asarray(popular / popular.sum())

    def draw(self, step: int, ranks: int, tokens: int) -> Ints:
        """(ranks, tokens, K) int64, distinct experts of each token; the same for the same arguments."""
        rng = np.random.default_rng([self.seed, step + self.steps, ranks])
        popular = self.popularity(step)
        if self.is_node_limited:
            chosen = self._node_limited(rng, ranks * tokens, popular)
        else:
            chosen = _distinct(rng, ranks * tokens, self.topk, popular)
        return chosen.reshape(ranks, tokens, self.topk)

    def expected(self, step: float) -> Floats:
        """(E,) float64, rows of each expert that a token makes on average, K in all.

        An expert is among the K first of independent arrivals with popularities as rates, so about with
        ``1 - exp(-rate * t)``, with t such that there are K of them; node-limited routing is sampled.
        """
        if not self.is_node_limited:
            return _among_first(self.popularity(step), self.topk)
        knot = round(step * KNOTS / self.steps)
        if knot not in self._known:
            ids = self.draw(knot * self.steps // KNOTS, 1, SAMPLED_TOKENS)
            self._known[knot] = np.bincount(ids.ravel(), minlength=self.experts) / SAMPLED_TOKENS
        return self._known[knot]

    def counted(self, end: int, steps: int, tokens: int) -> Ints:
        """(E,) int64, rows of each expert as they are counted in a window of steps.

        Args:
            end: the step before which it ends.
            steps: of it.
            tokens: of all ranks in a step.
        """
        points = end - steps + (np.arange(POINTS) + 0.5) * steps / POINTS
        share = np.mean([self.expected(point) for point in points], axis=0)
        rng = np.random.default_rng([self.seed, end + self.steps, steps, tokens])
        rows: Ints = rng.poisson(share * tokens * steps)
        return rows

    def _node_limited(self, rng: np.random.Generator, rows: int, popular: Floats) -> Ints:
        """(rows, K) experts: the groups with the best scores, then in them the experts with the best ones."""
        scores = (np.log(popular) - np.log(rng.standard_exponential((rows, self.experts)))).astype(np.float32)
        size = self.experts // self.groups
        by_group = scores.reshape(rows, self.groups, size)
        of_group = np.partition(by_group, size - BEST_OF_GROUP, axis=2)[:, :, -BEST_OF_GROUP:].sum(axis=2)
        is_left_out = np.ones((rows, self.groups), dtype=bool)
        best = np.argpartition(-of_group, self.top_groups - 1, axis=1)[:, : self.top_groups]
        np.put_along_axis(is_left_out, best, False, axis=1)
        by_group[is_left_out] = -np.inf
        chosen: Ints = np.argpartition(-scores, self.topk - 1, axis=1)[:, : self.topk]
        return chosen


def _distinct(rng: np.random.Generator, rows: int, count: int, popular: Floats) -> Ints:
    """(rows, count) numbers: drawn one after the other, but for those that the row already has."""
    ends = popular.cumsum()
    drawn = np.full((rows, count), -1)
    found = np.zeros(rows, dtype=np.int64)
    open_rows = np.arange(rows)
    while len(open_rows):
        next_one = np.minimum(np.searchsorted(ends, rng.random(len(open_rows)) * ends[-1]), len(popular) - 1)
        is_new = ~(drawn[open_rows] == next_one[:, None]).any(axis=1)
        rows_found = open_rows[is_new]
        drawn[rows_found, found[rows_found]] = next_one[is_new]
        found[rows_found] += 1
        open_rows = open_rows[found[open_rows] < count]
    return drawn


def _among_first(rates: Floats, count: int) -> Floats:
    """Probabilities ``1 - exp(-rate * t)`` whose sum is ``count``, by Newton's method from below."""
    time = count / rates.sum()
    while True:
        missing = np.exp(-rates * time)
        lacking = count - (1 - missing).sum()
        if lacking < _CLOSE:
            return np.asarray((1 - missing) * (count / (1 - missing).sum()))
        time += lacking / (rates * missing).sum()


def with_skew(day: Day, wanted: float, ranks: int, points: int = 101) -> Day:
    """The day with the exponent by which the busiest of some ranks has so many times the mean, on average.

    Experts lie on ranks in their order, without replicas, and bursts do not count.

    Args:
        day: of which all else is kept.
        wanted: most rows over mean.
        ranks: W.
        points: of the day, at which it is looked at; so many that the head is not always on an expert.
    """
    quiet = replace(day, bursts=())

    def found(exponent: float) -> float:
        tried = replace(quiet, exponent=exponent, _known={})
        loads = [
            tried.expected(step).reshape(ranks, -1).sum(axis=1)
            for step in np.linspace(0, day.steps, points, endpoint=False)
        ]
        return float(np.mean([load.max() / load.mean() for load in loads]))

    low, high = 0.0, 4.0
    while high - low > _CLOSE:
        middle = (low + high) / 2
        low, high = (middle, high) if found(middle) < wanted else (low, middle)
    return replace(day, exponent=high, _known={})
