"""From what ranks on hosts have measured: ratios to gloo and Open MPI, and times against bytes and link."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.compare.cases import Case, Phase, Sample
from benchmarks.compare.figures import BEST_OF_MPI, Metric, Samples
from benchmarks.harness import with_interval
from benchmarks.hosts.rounds import FORMATS, GLOO, NATIVE, OURS, key

BY_MPI = (*BEST_OF_MPI, NATIVE)
VS_GLOO = Metric("vs_gloo_alltoallv", "gloo / best of ours", (GLOO,), tuple(OURS))
VS_MPI = Metric("vs_mpi_best", "best of MPI / best of ours", BEST_OF_MPI, tuple(OURS))
VS_NATIVE = Metric(
    "fullmesh_v1_vs_mpi_native", "MPI, our kernels / fullmesh_v1", (NATIVE,), ("A3 fullmesh_v1",)
)
RATIOS = VS_GLOO, VS_MPI, VS_NATIVE
BITS_PER_US = 1e3
"""Of a link, for each Gbit/s."""
HIERARCHIES = {"A3 hierarchy": "A3 fullmesh_v1", "A2 hierarchy": "A2 fullmesh"}
"""And the scheme of the same product that each is held against."""


def goal(metric: Metric, tokens: int) -> float:
    """What a ratio has to be at least."""
    if metric is VS_GLOO:
        return 3.0 if tokens <= 16 else 2.0
    return 1.5 if metric is VS_MPI else 1.0


@dataclass(frozen=True)
class Measured:
    """What ranks on hosts have found.

    Attributes:
        hosts: ranks of each.
        tokens: T, of each rank.
        gbits: of each host's link, per second; None for any.
        runs: samples of all ranks together, of each run. Each of our routes is in one run.
        posted: of each rank, bytes to other hosts of a dispatch and of a combine, by route and rows.
        idle: of a core, what an idle NIC took on the rank where it took most.
    """

    hosts: Sequence[int]
    tokens: int
    gbits: float | None
    runs: Sequence[Sequence[Sample]]
    posted: Sequence[Mapping[str, Sequence[int]]]
    idle: float = 0.0

    @cached_property
    def _runs(self) -> list[Samples]:
        return [Samples(samples) for samples in self.runs]

    def case(self, quantize: str) -> Case:
        """Of samples."""
        return Case(sum(self.hosts), self.tokens, quantize)

    def routes(self, quantize: str) -> list[str]:
        """Those that have run."""
        return list(dict.fromkeys(name for run in self._runs for name in run.routes(self.case(quantize))))

    def times(self, route: str, quantize: str, phase: Phase = "both") -> list[float]:
        """Microseconds of a route in each iteration of the first run with it; none without one."""
        of_runs = [run.times(self.case(quantize), route, phase) for run in self._runs]
        return list(next((times for times in of_runs if times), {}).values())

    def as_record(self, **more: object) -> dict[str, object]:
        """What figures are of."""
        return {"hosts": list(self.hosts), "tokens": self.tokens, "gbits": self.gbits, **more}

    def most_bytes(self, route: str, quantize: str) -> tuple[int, ...]:
        """Of a dispatch and of a combine, from the host that sends most."""
        of_ranks = [each[key(route, quantize)] for each in self.posted]
        ends = [sum(self.hosts[: number + 1]) for number in range(len(self.hosts))]
        of_hosts = [of_ranks[end - ranks : end] for end, ranks in zip(ends, self.hosts, strict=True)]
        return tuple(max(sum(rank[phase] for rank in host) for host in of_hosts) for phase in (0, 1))

    def link_us(self, num_bytes: int) -> float:
        """That a link has bytes."""
        assert self.gbits is not None
        return 8 * num_bytes / (BITS_PER_US * self.gbits)

    def ratios(self, quantize: str) -> dict[str, float]:
        """Of rounds, with intervals, and of the fastest ones; nothing of routes that nobody has run.

        A ratio is of routes in one run. Of several runs it is the largest: that of the best of our schemes.
        """
        found: dict[str, float] = {}
        for metric in RATIOS:
            of_runs = [self._ratio(run, metric, quantize) for run in self._runs]
            if present := [figures for figures in of_runs if figures]:
                found |= max(present, key=lambda figures: figures[metric.name])
        return found

    def _ratio(self, run: Samples, metric: Metric, quantize: str) -> dict[str, float]:
        case = self.case(quantize)
        if (pair := run.pair(case, metric)) is None:
            return {}
        over, under = (_fastest(list(run.times(case, route).values())) for route in pair)
        return {
            **with_interval(metric.name, run.ratios(case, *pair)),
            f"{metric.name}_fastest": over / under,
        }

    def both_us(self, route: str, quantize: str) -> list[float]:
        """A dispatch and a combine that were timed apart, in each iteration."""
        dispatch, combine = (self.times(route, quantize, phase) for phase in ("dispatch", "combine"))
        return [sum(us) for us in zip(dispatch, combine, strict=True)]

    def vs_link(self, route: str, quantize: str) -> dict[str, float]:
        """A round's time over its bytes' on the link."""
        link_us = self.link_us(sum(self.most_bytes(route, quantize)))
        return with_interval("time_vs_link", [us / link_us for us in self.both_us(route, quantize)])

    def gain_of_int8(self, route: str) -> dict[str, float]:
        """Of a dispatch, in time and in bytes."""
        plain, quantized = (self.times(route, each, "dispatch") for each in FORMATS)
        gains = [without / by for without, by in zip(plain, quantized, strict=True)]
        bytes_of = [self.most_bytes(route, each)[0] for each in FORMATS]
        return {**with_interval("int8_gain", gains), "int8_bytes_ratio": bytes_of[0] / bytes_of[1]}

    def gain_of_hierarchy(self, route: str, quantize: str) -> dict[str, float]:
        """Of a round, in time and in bytes."""
        other = HIERARCHIES[route]
        pairs = zip(self.both_us(other, quantize), self.both_us(route, quantize), strict=True)
        bytes_of = [sum(self.most_bytes(each, quantize)) for each in (other, route)]
        gains = with_interval("hierarchy_gain", [without / by for without, by in pairs])
        return {**gains, "hierarchy_bytes_ratio": bytes_of[0] / bytes_of[1]}


def _fastest(times: Sequence[float]) -> float:
    """The median of the fastest quarter, which other work has disturbed least."""
    return statistics.median(sorted(times)[: -(-len(times) // 4)])
