"""Time per byte over batch sizes and over numbers of ranks: figures and tables of a scaling run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from benchmarks.compare.cases import ROUTES, Case
from benchmarks.compare.figures import Samples, Spread
from benchmarks.compare.tables import ABSENT, text_table
from benchmarks.compare.targets import GROWTH_PER_BYTE, TIME_PER_BYTE_SPREAD, Target
from benchmarks.compare.traffic import Scheme, group_bytes
from benchmarks.harness import Record, records_of
from benchmarks.sizes import HIDDEN, TOPK
from moe_triton.tools.text_table import TextTable

SweepKind = Literal["tokens", "ranks"]
SWEEPS: tuple[SweepKind, ...] = ("tokens", "ranks")
SCALED = ("slots", "direct")
ASKED: dict[SweepKind, Target] = {"tokens": TIME_PER_BYTE_SPREAD, "ranks": GROWTH_PER_BYTE}


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
    def unevenness(self) -> float:
        """The slowest time per byte to the fastest one."""
        medians = [spread.p50 for spread in self.per_byte.values()]
        return max(medians) / min(medians)

    @property
    def growth(self) -> float:
        """The largest time per byte against the smallest case's, without what divisions leave behind."""
        return round(max(spread.p50 for spread in self.per_byte.values()), 9)

    @property
    def figure(self) -> tuple[str, float]:
        """The metric that something is asked of, and its value."""
        if self.kind == "tokens":
            return "time_per_byte_spread", self.unevenness
        return "time_per_byte_growth", self.growth

    def verdict(self) -> str:
        """Whether time grows with the bytes and no faster."""
        _, value = self.figure
        return "met" if ASKED[self.kind].is_met(value) else "missed"


def bytes_of(route: str, case: Case) -> int:
    """Bytes that all ranks of a case move together."""
    return group_bytes(
        cast(Scheme, route),
        "both",
        ranks=case.ranks,
        tokens=case.tokens,
        topk=TOPK,
        hidden=HIDDEN,
        quantize=case.quantize,
    )


def sweeps_of(kind: SweepKind, samples: Samples) -> list[Sweep]:
    """Every route's sweep, of the samples of one kind."""
    found = []
    for quantize in sorted({case.quantize for case in samples.cases}):
        for route in SCALED:
            cases = [c for c in samples.cases if c.quantize == quantize and samples.times(c, route)]
            if cases:
                found.append(Sweep(kind, route, quantize, tuple(cases), _per_byte(samples, route, cases)))
    return found


def _per_byte(samples: Samples, route: str, cases: Sequence[Case]) -> dict[Case, Spread]:
    first, base = samples.times(cases[0], route), bytes_of(route, cases[0])
    found = {}
    for case in cases:
        times, grown = samples.times(case, route), bytes_of(route, case) / base
        found[case] = Spread.of([times[i] / first[i] / grown for i in sorted(times.keys() & first.keys())])
    return found


def scaling_table(kind: SweepKind, samples: Samples) -> TextTable:
    """Every route and size."""
    rows: list[tuple[str, ...]] = []
    for sweep in sweeps_of(kind, samples):
        for case, spread in sweep.per_byte.items():
            last = case == sweep.cases[-1]
            percentiles = [f"{value:.2f}" for value in (spread.p10, spread.p50, spread.p90)]
            time = f"{samples.median(case, sweep.route):.0f}"
            rows.append((*_cells(sweep.route, case), time, *percentiles, sweep.verdict() if last else ""))
    rows += [(*_cells(route, case), "", "", "", "", ABSENT) for case, route in samples.absent]
    asked = f"{'slowest / fastest' if kind == 'tokens' else 'each'} {ASKED[kind]}"
    title = f"Time per byte over {kind}, against the smallest size in the same iteration; asked: {asked}"
    columns = ("route", "rows", "ranks", "tokens", "us", "p10", "p50", "p90", "")
    return text_table(title, columns, rows, left=2)


def _cells(route: str, case: Case) -> tuple[str, ...]:
    return ROUTES[route], case.quantize or "bf16", str(case.ranks), str(case.tokens)


def scaling_records(kind: SweepKind, samples: Samples) -> list[Record]:
    """A figure for every size, and one for every sweep."""
    found: list[Record] = []
    for sweep in sweeps_of(kind, samples):
        about = {"route": sweep.route, "sweep": kind}
        for case, spread in sweep.per_byte.items():
            times = {
                "time_per_byte_vs_smallest": spread.p50,
                "p50_us": samples.median(case, sweep.route),
            }
            found += records_of("compare_scaling", {**case.as_record(), **about}, times)
        found += records_of("compare_scaling", {"quantize": sweep.quantize, **about}, dict([sweep.figure]))
    return found
