"""From samples to figures: percentiles, ratios of one iteration's times with what is asked of them, time per
byte of a scaling run, shares of steps; as records, and as tables.

A step's share is what its launches took, summed over the ranks, of the call's time on all cores that ranks
can have. It is known where each rank has a core to itself: elsewhere a step goes on while its rank waits for
its turn. How busy the cores are is known everywhere, from what ranks' threads took of them; a rank that waits
awake is busy. What no step takes is the rest: waiting, Python, and what comes before and after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Literal, cast

import numpy as np
from rich.text import Text

from benchmarks.compare.cases import (
    OF_DIRECT,
    OF_SLOTS,
    PHASES,
    ROUTES,
    TEMPERATURES,
    Case,
    Phase,
    Sample,
)
from benchmarks.compare.traffic import Scheme, group_bytes
from benchmarks.harness import Record, interval_text, marked, records_of, with_interval
from benchmarks.sizes import HIDDEN, TOPK
from moe_triton.tools.text_table import TextTable, names, numbers

PERCENTILES = (10, 50, 90, 99)
BEST_OF_MPI = ("mpi_alltoallv", "mpi_allgather")
STYLES = {"met": "green", "missed": "red", "absent": "yellow"}
ABSENT = "absent"
# Columns, and the steps that each of them is; any other step is small. Earlier runs have a launch for packing
# alone, and another one, keep, for this rank's own rows, which arrange takes now.
STEPS = {
    "pack": ("dispatch: route + pack", "dispatch: pack"),
    "send": ("dispatch: send",),
    "arrange": ("dispatch: arrange", "dispatch: keep"),
    "send back": ("combine: send",),
    "sum": ("combine: sum",),
}
PROFILED = ("slots", "direct")
_COLUMN_OF = {step: column for column, steps in STEPS.items() for step in steps}
BUSY, SMALL, REST = "busy", "small", "rest"
COLUMNS = (BUSY, *STEPS, SMALL, REST)
SweepKind = Literal["tokens", "ranks"]
SWEEPS: tuple[SweepKind, ...] = ("tokens", "ranks")
SCALED = ("slots", "direct")
# By tokens per rank.
BY_TOKENS: dict[str, tuple[dict[int, float], bool]] = {
    "vs_gloo_alltoallv": ({16: 10.0, 64: 6.0, 256: 5.0}, False),
    "vs_mpi_best": ({16: 3.0, 64: 3.0, 256: 3.0}, False),
    "vs_mpi_native": ({16: 2.0, 64: 2.0, 256: 2.0}, False),
    "vs_nowait": ({16: 1.3, 64: 1.25, 256: 1.25}, True),
    "direct_vs_slots": ({16: 1.2, 64: 1.5, 256: 1.8}, False),
}
RANKS = (2, 4, 8)
# More ranks than cores take turns on them, which memcpy on as many ranks does not need to wait for.
MEMCPY_CASE, MEMCPY_FRACTION = (2, 256), 0.75


@dataclass(frozen=True)
class Target:
    """A bound on one figure.

    Attributes:
        bound: the worst that is good enough.
        at_most: whether less is better.
    """

    bound: float
    at_most: bool = False

    def is_met(self, value: float) -> bool:
        """Whether a figure is good enough."""
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g}"


# Of the scaling run.
TIME_PER_BYTE_SPREAD = Target(1.2, at_most=True)
GROWTH_PER_BYTE = Target(1.0, at_most=True)
ASKED: dict[SweepKind, Target] = {"tokens": TIME_PER_BYTE_SPREAD, "ranks": GROWTH_PER_BYTE}


def target_of(metric: str, case: Case) -> Target | None:
    """The target of a metric in a case, where there is one."""
    if metric == "fraction_of_memcpy":
        return Target(MEMCPY_FRACTION) if (case.ranks, case.tokens) == MEMCPY_CASE else None
    by_tokens, at_most = BY_TOKENS.get(metric, ({}, False))
    bound = by_tokens.get(case.tokens) if case.ranks in RANKS else None
    return None if bound is None else Target(bound, at_most)


def verdict(metric: str, case: Case, value: float | None) -> str:
    """ "met", "missed" or "", the latter where nothing is asked; "absent" where there is no figure."""
    if value is None:
        return "absent"
    target = target_of(metric, case)
    return "" if target is None else "met" if target.is_met(value) else "missed"


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
    Metric("fraction_of_memcpy", "memcpy / direct", OF_DIRECT, ("direct",)),
)

# The peers once more, against direct: nothing is asked of these.
DIRECT_METRICS = (
    Metric("direct_vs_gloo_alltoallv", "gloo all-to-all-v / direct", ("gloo_alltoallv",), ("direct",)),
    Metric("direct_vs_mpi_best", "best of MPI / direct", BEST_OF_MPI, ("direct",)),
    Metric("direct_vs_mpi_native", "MPI with our kernels / direct", ("mpi_native",), ("direct",)),
)

# What the ratios would be if slots took as long as memcpy of the bytes that they move.
PACE_METRICS = (
    Metric("gloo_alltoallv_vs_memcpy", "gloo all-to-all-v / memcpy", ("gloo_alltoallv",), OF_SLOTS),
    Metric("mpi_best_vs_memcpy", "best of MPI / memcpy", BEST_OF_MPI, OF_SLOTS),
    Metric("mpi_native_vs_memcpy", "MPI with our kernels / memcpy", ("mpi_native",), OF_SLOTS),
    Metric("slots_fraction_of_memcpy", "memcpy / slots", OF_SLOTS, ("slots",)),
)


# Also of runs from warm and from cold memory.
MEMCPY_METRICS = tuple(
    metric
    for metric in (*PACE_METRICS, *METRICS)
    if metric.name in ("slots_fraction_of_memcpy", "fraction_of_memcpy")
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
        return {s.iteration: s.us for s in self._by_key.get((case, route, phase), []) if s.us is not None}

    def kernels(self, case: Case, route: str, phase: Phase = "both") -> list[float]:
        """Microseconds inside the kernels; empty for a route that does not know them."""
        return [s.kernels_us for s in self._by_key.get((case, route, phase), []) if s.kernels_us is not None]

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

    def fastest(self, case: Case, routes: Sequence[str], phase: Phase = "both") -> str | None:
        """The route of the lowest median; None where none of them has times."""
        there = [route for route in routes if self.times(case, route, phase)]
        return min(there, key=lambda route: self.median(case, route, phase), default=None)

    def is_shared(self, case: Case, route: str, phase: Phase = "both") -> bool:
        """Whether ranks shared a core in most runs, so that the median is of such a run."""
        shared = [s.shared for s in self._by_key.get((case, route, phase), [])]
        return 2 * sum(shared) > len(shared)

    def ratios(self, case: Case, over: str, under: str, phase: Phase = "both") -> list[float]:
        """One route's time to another's, in each iteration that has both."""
        numerator, denominator = self.times(case, over, phase), self.times(case, under, phase)
        return [numerator[i] / denominator[i] for i in sorted(numerator.keys() & denominator.keys())]

    def pair(self, case: Case, metric: Metric, phase: Phase = "both") -> tuple[str, str] | None:
        """The two routes that a metric divides in a case; None where one is absent."""
        over, under = (self.fastest(case, routes, phase) for routes in (metric.over, metric.under))
        return None if over is None or under is None else (over, under)

    def metric(self, case: Case, metric: Metric) -> Spread | None:
        """A metric's spread over the iterations; None where a route is absent."""
        pair = self.pair(case, metric)
        return None if pair is None else Spread.of(self.ratios(case, *pair))

    def at_temperature(self, case: Case, metric: Metric, phase: Phase) -> dict[str, float]:
        """A metric's median over runs of one temperature, with its interval; empty without such runs."""
        pair = self.pair(case, metric, phase)
        return {} if pair is None else with_interval(metric.name, self.ratios(case, *pair, phase))

    def is_marked(self, case: Case, metric: Metric, phase: Phase = "both") -> bool:
        """Whether ranks shared a core in a route that a metric divides."""
        return any(self.is_shared(case, route, phase) for route in self.pair(case, metric, phase) or ())


def records(samples: Samples) -> list[Record]:
    """Every metric, its spread, and the percentiles of every route and phase."""
    all_records: list[Record] = []
    for case in samples.cases:
        for metric in (*METRICS, *DIRECT_METRICS, *PACE_METRICS):
            if (spread := samples.metric(case, metric)) is not None:
                name = metric.name
                ratios = {name: spread.p50, f"{name}_p10": spread.p10, f"{name}_p90": spread.p90}
                all_records += records_of("compare", case.as_record(), ratios)
        all_records += _at_temperatures(samples, case)
        for route in samples.routes(case):
            for phase in (*PHASES, *TEMPERATURES):
                all_records += _times(samples, case, route, phase)
    return all_records


def _at_temperatures(samples: Samples, case: Case) -> list[Record]:
    """The ratios to memcpy from warm and from cold memory, by what stands behind the metric's name."""
    figures = {
        f"{phase}_{name}": value
        for phase in TEMPERATURES
        for metric in MEMCPY_METRICS
        for name, value in samples.at_temperature(case, metric, phase).items()
    }
    return records_of("compare", case.as_record(), figures)


def _times(samples: Samples, case: Case, route: str, phase: Phase) -> list[Record]:
    times = list(samples.times(case, route, phase).values())
    if not times:
        return []
    figures = {f"{percentile}_us": us for percentile, us in asdict(Spread.of(times)).items()}
    if kernels := samples.kernels(case, route, phase):
        figures["kernels_p50_us"] = float(np.median(kernels))
    about = {"route": route, "phase": phase, "shared": samples.is_shared(case, route, phase)}
    return records_of("compare", {**case.as_record(), **about}, figures)


def text_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> TextTable:
    """Rows of text under a title, verdicts in colour; the first ``left`` columns are words."""
    kinds = [(names if i < left else numbers)(column) for i, column in enumerate(columns)]
    cells = [[Text(cell, style=STYLES.get(cell.split(" ")[-1], "")) for cell in row] for row in rows]
    return TextTable(kinds, cells, title)


def metric_table(samples: Samples, metric: Metric) -> TextTable:
    """One ratio in all cases, against what is asked of it."""
    rows = []
    for case in samples.cases:
        spread, asked = samples.metric(case, metric), str(target_of(metric.name, case) or "")
        is_marked = samples.is_marked(case, metric)
        shown = [marked(f"{value:.2f}", is_marked) for value in astuple(spread)[:3]] if spread else [""] * 3
        judged = verdict(metric.name, case, spread.p50 if spread else None)
        rows.append((*case_cells(case), *shown, asked, judged))
    columns = ("ranks", "tokens", "rows", "p10", "p50", "p90", "asked", "")
    return text_table(metric.title, columns, rows, left=0)


def summary_table(samples: Samples, metrics: Sequence[Metric] = METRICS) -> TextTable:
    """Several ratios, a row for each case; each with its verdict."""
    rows = []
    for case in samples.cases:
        cells = []
        for metric in metrics:
            spread = samples.metric(case, metric)
            value = None if spread is None else spread.p50
            shown = "" if value is None else marked(f"{value:.2f}", samples.is_marked(case, metric))
            cells.append(f"{shown} {verdict(metric.name, case, value)}".strip())
        rows.append((*case_cells(case), *cells))
    columns = ("ranks", "tokens", "rows", *(metric.title for metric in metrics))
    title = "Medians of the ratios in each iteration; met or missed where something is asked"
    return text_table(title, columns, rows, left=0)


def temperature_table(samples: Samples) -> TextTable:
    """How close schemes come to memcpy from warm and from cold memory, with the median's interval."""
    rows = []
    for case in samples.cases:
        cells = [
            cell
            for metric in MEMCPY_METRICS
            for phase in TEMPERATURES
            for cell in _with_interval(samples, case, metric, phase)
        ]
        if any(cells):
            rows.append((*case_cells(case), *cells))
    of = [f"{metric.title}, {phase}" for metric in MEMCPY_METRICS for phase in TEMPERATURES]
    columns = ("ranks", "tokens", "rows", *(each for title in of for each in (title, "95 %")))
    return text_table("memcpy over our time, both from warm or both from cold memory", columns, rows, left=0)


def _with_interval(samples: Samples, case: Case, metric: Metric, phase: Phase) -> tuple[str, str]:
    figures = samples.at_temperature(case, metric, phase)
    if not figures:
        return "", ""
    shown = marked(f"{figures[metric.name]:.2f}", samples.is_marked(case, metric, phase))
    return shown, interval_text(figures, metric.name)


def time_table(samples: Samples, case: Case) -> TextTable:
    """Every route of one case."""
    rows = []
    for route in ROUTES:
        if samples.times(case, route):
            spread = Spread.of(list(samples.times(case, route).values()))
            is_shared = samples.is_shared(case, route)
            shown = [marked(f"{value:.0f}", is_shared) for value in astuple(spread)]
            medians = [_median(list(samples.times(case, route, p).values())) for p in PHASES[1:]]
            kernels = [_median(samples.kernels(case, route, phase)) for phase in PHASES]
            rows.append((ROUTES[route], *shown, *medians, *kernels))
        elif (case, route) in samples.absent:
            rows.append((ROUTES[route], ABSENT, *[""] * 8))
    percentiles = (each.name for each in fields(Spread))
    columns = ("route", *percentiles, "dispatch", "combine", "kernels", "its dispatch", "its combine")
    return text_table(f"{case}: microseconds", columns, rows)


def absences(samples: Samples) -> list[str]:
    """Every route that is absent somewhere, with the reason and the cases."""
    cases: dict[tuple[str, str], list[Case]] = {}
    for (case, route), reason in samples.absent.items():
        cases.setdefault((route, reason), []).append(case)
    return [
        f"{ROUTES[route]}: absent: {reason} ({_list(where, len(samples.cases))})"
        for (route, reason), where in cases.items()
    ]


def _list(cases: Sequence[Case], total: int) -> str:
    return "in all cases" if len(cases) == total else "; ".join(str(case) for case in sorted(cases))


def case_cells(case: Case) -> tuple[str, str, str]:
    """Ranks, tokens and rows."""
    return str(case.ranks), str(case.tokens), case.quantize or "bf16"


def _median(values: Sequence[float]) -> str:
    return f"{Spread.of(values).p50:.0f}" if values else "-"


def shares(samples: Samples, case: Case, route: str, cores: int) -> dict[str, float]:
    """Shares of the cores' time by column; all but the first add up to 1. Empty if the route has no times."""
    steps = samples.steps(case, route)
    if not steps:
        return {}
    total = samples.median(case, route) * min(cores, case.ranks)
    share_by_column: dict[str, float] = defaultdict(float, {BUSY: samples.core_us(case, route) / total})
    if case.ranks > cores:
        return {BUSY: share_by_column[BUSY]}
    for step, us in steps.items():
        if not is_wait(step):
            share_by_column[_COLUMN_OF.get(step, SMALL)] += us * case.ranks / total
    share_by_column[REST] = 1 - sum(share for column, share in share_by_column.items() if column != BUSY)
    return {column: share_by_column[column] for column in COLUMNS}


def is_wait(step: str) -> bool:
    """Whether nothing but waiting happens in it."""
    return "wait" in step


def shares_table(samples: Samples, route: str, cores: int) -> TextTable:
    """All cases of a route, in percent."""
    rows = []
    for case in samples.cases:
        if share_by_column := shares(samples, case, route, cores):
            percents = [
                f"{100 * share_by_column[column]:.0f}" if column in share_by_column else ""
                for column in COLUMNS
            ]
            rows.append((*case_cells(case), *percents))
    title = f"{ROUTES[route]}: percent of {cores} cores' time"
    return text_table(title, ("ranks", "tokens", "rows", *COLUMNS), rows, left=0)


def share_records(samples: Samples, cores: int, routes: Sequence[str] = PROFILED) -> list[Record]:
    """Every share as a figure."""
    of_shares: list[Record] = []
    for case in samples.cases:
        for route in routes:
            of = shares(samples, case, route, cores)
            figures = {f"share_{column.replace(' ', '_')}": share for column, share in of.items()}
            of_shares += records_of("compare", {**case.as_record(), "route": route}, figures)
    return of_shares


@dataclass(frozen=True)
class Sweep:
    """One route over one size, quantised or not.

    Attributes:
        kind: which size varies.
        route: a name.
        quantize: of all cases.
        cases: those with times, the smallest first.
        per_byte: by case, the time per byte against that of the smallest case in the same iteration.
    """

    kind: SweepKind
    route: str
    quantize: str
    cases: tuple[Case, ...]
    per_byte: dict[Case, Spread]

    @property
    def figure(self) -> tuple[str, float]:
        """The metric that something is asked of, and its value: the slowest time per byte to the fastest one,
        or the largest one against the smallest case's, without what divisions leave behind.
        """
        medians = [spread.p50 for spread in self.per_byte.values()]
        if self.kind == "tokens":
            return "time_per_byte_spread", max(medians) / min(medians)
        return "time_per_byte_growth", round(max(medians), 9)

    def verdict(self) -> str:
        """Whether time grows with the bytes and no faster."""
        _, value = self.figure
        return "met" if ASKED[self.kind].is_met(value) else "missed"


def bytes_of(route: str, case: Case) -> int:
    """Bytes that all ranks of a case move together."""
    return group_bytes(cast(Scheme, route), "both", topk=TOPK, hidden=HIDDEN, **asdict(case))


def sweeps_of(kind: SweepKind, samples: Samples) -> list[Sweep]:
    """Every route's sweep, of the samples of one kind."""
    sweeps = []
    for quantize in sorted({case.quantize for case in samples.cases}):
        for route in SCALED:
            if cases := [c for c in samples.cases if c.quantize == quantize and samples.times(c, route)]:
                sweeps.append(Sweep(kind, route, quantize, tuple(cases), _per_byte(samples, route, cases)))
    return sweeps


def _per_byte(samples: Samples, route: str, cases: Sequence[Case]) -> dict[Case, Spread]:
    first, base = samples.times(cases[0], route), bytes_of(route, cases[0])
    spreads = {}
    for case in cases:
        times, grown = samples.times(case, route), bytes_of(route, case) / base
        spreads[case] = Spread.of([times[i] / first[i] / grown for i in sorted(times.keys() & first.keys())])
    return spreads


def scaling_table(kind: SweepKind, samples: Samples) -> TextTable:
    """Every route and size."""
    rows: list[tuple[str, ...]] = []
    for sweep in sweeps_of(kind, samples):
        for case, spread in sweep.per_byte.items():
            last = case == sweep.cases[-1]
            time = f"{samples.median(case, sweep.route):.0f}"
            figures = (time, *(f"{value:.2f}" for value in (spread.p10, spread.p50, spread.p90)))
            shown = [marked(figure, samples.is_shared(case, sweep.route)) for figure in figures]
            rows.append((*_cells(sweep.route, case), *shown, sweep.verdict() if last else ""))
    rows += [(*_cells(route, case), "", "", "", "", ABSENT) for case, route in samples.absent]
    asked = f"{'slowest / fastest' if kind == 'tokens' else 'each'} {ASKED[kind]}"
    title = f"Time per byte over {kind}, against the smallest size in the same iteration; asked: {asked}"
    columns = ("route", "rows", "ranks", "tokens", "us", "p10", "p50", "p90", "")
    return text_table(title, columns, rows, left=2)


def _cells(route: str, case: Case) -> tuple[str, ...]:
    return ROUTES[route], case.quantize or "bf16", str(case.ranks), str(case.tokens)


def scaling_records(kind: SweepKind, samples: Samples) -> list[Record]:
    """A figure for every size, and one for every sweep."""
    of_sweeps: list[Record] = []
    for sweep in sweeps_of(kind, samples):
        about = {"route": sweep.route, "sweep": kind}
        for case, spread in sweep.per_byte.items():
            times = {"time_per_byte_vs_smallest": spread.p50, "p50_us": samples.median(case, sweep.route)}
            of_sweeps += records_of("compare_scaling", {**case.as_record(), **about}, times)
        of_sweeps += records_of(
            "compare_scaling", {"quantize": sweep.quantize, **about}, dict([sweep.figure])
        )
    return of_sweeps
