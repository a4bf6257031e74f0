"""From samples to figures: percentiles, ratios of one iteration's times, and records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.compare.cases import PHASES, Case, Phase
from benchmarks.compare.samples import Sample
from benchmarks.harness import Record, records_of

PERCENTILES = (10, 50, 90, 99)
BEST_OF_MPI = ("mpi_alltoallv", "mpi_allgather")


@dataclass(frozen=True)
class Spread:
    """Percentiles of some values."""

    p10: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Interpolated linearly between the values."""
        return Spread(*(float(p) for p in np.percentile(values, PERCENTILES)))


@dataclass(frozen=True)
class Metric:
    """One ratio of two routes' times, dispatch and combine together.

    Attributes:
        name: in the records.
        title: in tables.
        over, under: names of routes; several stand for the fastest of them (by median, in this case).
    """

    name: str
    title: str
    over: tuple[str, ...]
    under: tuple[str, ...]


METRICS = (
    Metric("vs_gloo_alltoallv", "gloo all-to-all-v / slots", ("gloo_alltoallv",), ("slots",)),
    Metric("vs_mpi_best", "best of MPI / slots", BEST_OF_MPI, ("slots",)),
    Metric("vs_mpi_native", "MPI with our kernels / slots", ("mpi_native",), ("slots",)),
    Metric("vs_nowait", "slots / without waiting", ("slots",), ("nowait",)),
    Metric("direct_vs_slots", "slots / direct", ("slots",), ("direct",)),
    Metric("blocks_vs_slots", "slots / blocks", ("slots",), ("blocks",)),
    Metric("fraction_of_memcpy", "memcpy / direct", ("memcpy_direct", "memcpy_whole"), ("direct",)),
)

# The peers once more, against direct: nothing is asked of these.
DIRECT_METRICS = (
    Metric("direct_vs_gloo_alltoallv", "gloo all-to-all-v / direct", ("gloo_alltoallv",), ("direct",)),
    Metric("direct_vs_mpi_best", "best of MPI / direct", BEST_OF_MPI, ("direct",)),
    Metric("direct_vs_mpi_native", "MPI with our kernels / direct", ("mpi_native",), ("direct",)),
)


MEMCPY_OF_SLOTS = ("memcpy_slots", "memcpy_slots_whole")

# What the ratios would be if slots took as long as memcpy of the bytes that they move.
PACE_METRICS = (
    Metric("gloo_alltoallv_vs_memcpy", "gloo all-to-all-v / memcpy", ("gloo_alltoallv",), MEMCPY_OF_SLOTS),
    Metric("mpi_best_vs_memcpy", "best of MPI / memcpy", BEST_OF_MPI, MEMCPY_OF_SLOTS),
    Metric("mpi_native_vs_memcpy", "MPI with our kernels / memcpy", ("mpi_native",), MEMCPY_OF_SLOTS),
    Metric("slots_fraction_of_memcpy", "memcpy / slots", MEMCPY_OF_SLOTS, ("slots",)),
)


class Samples:
    """Samples by case, route and phase."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_key: dict[tuple[Case, str, Phase], list[Sample]] = defaultdict(list)
        self.absent: dict[tuple[Case, str], str] = {}
        for sample in samples:
            if sample.us is None:
                self.absent[sample.case, sample.route] = sample.absent
            else:
                self._by_key[sample.case, sample.route, sample.phase].append(sample)
        self.cases = sorted({case for case, _, _ in self._by_key} | {case for case, _ in self.absent})

    def routes(self, case: Case) -> list[str]:
        """Routes with times, in the order in which they came."""
        return list(dict.fromkeys(route for have, route, _ in self._by_key if have == case))

    def times(self, case: Case, route: str, phase: Phase = "both") -> dict[int, float]:
        """Microseconds by iteration; empty where there are none."""
        samples = self._by_key.get((case, route, phase), [])
        return {s.iteration: s.us for s in samples if s.us is not None}

    def kernels(self, case: Case, route: str, phase: Phase = "both") -> list[float]:
        """Microseconds inside the kernels; empty for a route that does not know them."""
        samples = self._by_key.get((case, route, phase), [])
        return [s.kernels_us for s in samples if s.kernels_us is not None]

    def steps(self, case: Case, route: str) -> dict[str, float]:
        """Median microseconds of each step; empty for a route that does not know them."""
        samples = [s.steps for s in self._by_key.get((case, route, "both"), []) if s.steps]
        return {step: float(np.median([s[step] for s in samples])) for step in samples[0]} if samples else {}

    def core_us(self, case: Case, route: str) -> float:
        """Median microseconds that the ranks' threads took of their cores, all together; 0 if not known."""
        samples = self._by_key.get((case, route, "both"), [])
        return float(np.median([s.core_us for s in samples])) if samples else 0.0

    def median(self, case: Case, route: str, phase: Phase = "both") -> float:
        """The median of the times in microseconds, of which there must be some."""
        return float(np.median(list(self.times(case, route, phase).values())))

    def fastest(self, case: Case, routes: Sequence[str]) -> str | None:
        """The route of the lowest median; None where none of them has times."""
        there = [route for route in routes if self.times(case, route)]
        return min(there, key=lambda route: self.median(case, route), default=None)

    def ratios(self, case: Case, over: str, under: str, phase: Phase = "both") -> list[float]:
        """One route's time to another's, in each iteration that has both."""
        numerator, denominator = self.times(case, over, phase), self.times(case, under, phase)
        return [numerator[i] / denominator[i] for i in sorted(numerator.keys() & denominator.keys())]

    def metric(self, case: Case, metric: Metric) -> Spread | None:
        """A metric's spread over the iterations; None where a route is absent."""
        over, under = self.fastest(case, metric.over), self.fastest(case, metric.under)
        if over is None or under is None:
            return None
        return Spread.of(self.ratios(case, over, under))

    def why_absent(self, case: Case, metric: Metric) -> str:
        """The reason of the first of its routes that is absent, or that it was not asked for."""
        for side in (metric.over, metric.under):
            if self.fastest(case, side) is None:
                return next((r for n in side if (r := self.absent.get((case, n)))), "not measured")
        return ""


def records(samples: Samples) -> list[Record]:
    """Every metric, its spread, and the percentiles of every route and phase."""
    found: list[Record] = []
    for case in samples.cases:
        for metric in (*METRICS, *DIRECT_METRICS, *PACE_METRICS):
            spread = samples.metric(case, metric)
            if spread is not None:
                name = metric.name
                ratios = {name: spread.p50, f"{name}_p10": spread.p10, f"{name}_p90": spread.p90}
                found += records_of("compare", case.as_record(), ratios)
        for route in samples.routes(case):
            for phase in PHASES:
                found += _times(samples, case, route, phase)
    return found


def _times(samples: Samples, case: Case, route: str, phase: Phase) -> list[Record]:
    times = list(samples.times(case, route, phase).values())
    if not times:
        return []
    figures = {f"{percentile}_us": us for percentile, us in asdict(Spread.of(times)).items()}
    kernels = samples.kernels(case, route, phase)
    if kernels:
        figures["kernels_p50_us"] = float(np.median(kernels))
    return records_of("compare", {**case.as_record(), "route": route, "phase": phase}, figures)
