"""Plots from samples: speed-ups with their spread, times against sizes with memcpy's limit drawn in."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.cases import ROUTES, Case
from benchmarks.compare.figures import ASKED, Samples, Spread, SweepKind, sweeps_of
from benchmarks.harness import Record
from moe_triton.tools.plots import draw, legend

PEERS = ("gloo_alltoallv", "gloo_allgather", "mpi_alltoallv", "mpi_allgather", "mpi_native")
LINES = ("slots", "direct", *PEERS)
BARS = ("direct", *PEERS)
RATIO_TICKS = (0.25, 0.5, 1, 2, 5, 10, 20)
# Each route looks the same in every plot. Colours from the palette of Okabe and Ito.
COLOURS = {
    "slots": "#0072B2",
    "direct": "#009E73",
    "gloo_alltoallv": "#D55E00",
    "gloo_allgather": "#E69F00",
    "mpi_alltoallv": "#CC79A7",
    "mpi_allgather": "#882255",
    "mpi_native": "#56B4E9",
    "memcpy_slots": "#888888",
    "memcpy_direct": "#888888",
}
LIMITS = {"memcpy_slots": ":", "memcpy_direct": "--"}
SPEEDUPS, BY_TOKENS, BY_RANKS, SCALING = "speedups.svg", "by_tokens.svg", "by_ranks.svg", "scaling.svg"
GLANCE = "glance.svg"
GLANCE_CASE = Case(ranks=4, tokens=64, quantize="")
# What is said of it to readers who know none of the routes' names, by the record of the ratio.
GLANCE_BARS = {
    "vs_gloo_alltoallv": ("gloo all-to-all-v", COLOURS["gloo_alltoallv"]),
    "vs_mpi_best": ("the faster of two ways by Open MPI", COLOURS["mpi_allgather"]),
    "vs_mpi_native": ("Open MPI all-to-all-v, with our kernels", COLOURS["mpi_native"]),
}


def is_available() -> bool:
    """Whether there is matplotlib."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_comparison(samples: Samples, folder: Path) -> list[Path]:
    """Speed-ups, and times against tokens and against ranks."""
    return [
        draw(folder / SPEEDUPS, lambda figure: _speedups(figure, samples)),
        draw(folder / BY_TOKENS, lambda figure: _times(figure, samples, "tokens")),
        draw(folder / BY_RANKS, lambda figure: _times(figure, samples, "ranks")),
    ]


def plot_glance(records: Sequence[Record], cores: int, folder: Path) -> Path:
    """One case in five bars, for who has not read anything yet.

    Args:
        records: of a report.
        cores: of the machine that they are from.
        folder: to draw into.
    """
    return draw(folder / GLANCE, lambda figure: _glance(figure, records, cores))


def plot_scaling(sweeps: Mapping[SweepKind, Samples], folder: Path) -> list[Path]:
    """Time per byte against both sizes."""
    return [draw(folder / SCALING, lambda figure: _scaling(figure, sweeps))]


def _panels(figure: Any, rows: int, columns: int, width: float, height: float) -> Any:
    figure.set_size_inches(max(width * columns, 7.5), height * rows + 0.6)
    return figure.subplots(max(rows, 1), max(columns, 1), squeeze=False, sharey=True)


def _variants(samples: Samples) -> list[str]:
    return sorted({case.quantize for case in samples.cases})


def _rows_of(quantize: str) -> str:
    return f"rows as {quantize or 'bf16'}"


def _speedups(figure: Any, samples: Samples) -> None:
    """How many times as long as slots each route takes; bars are p50, whiskers p10 to p90."""
    variants = _variants(samples)
    axes = _panels(figure, len(variants), 1, 10.0, 2.8)
    for axis, quantize in zip(axes[:, 0], variants, strict=True):
        cases = [case for case in samples.cases if case.quantize == quantize]
        for number, route in enumerate(BARS):
            for place, case in enumerate(cases):
                _bar(axis, samples, case, route, place + (number - (len(BARS) - 1) / 2) * 0.14)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log")
        axis.set_yticks(RATIO_TICKS, [f"{tick:g}" for tick in RATIO_TICKS])
        axis.set_xticks(range(len(cases)), [f"W {c.ranks}\nBS {c.tokens}" for c in cases])
        axis.set_title(f"time / time of slots, {_rows_of(quantize)}")
    legend(figure, columns=3)


def _glance(figure: Any, records: Sequence[Record], cores: int) -> None:
    """Bars are p50, whiskers p10 to p90; of our own two routes one is 1."""
    of = {record["metric"]: record["value"] for record in records if _case_of(record) == GLANCE_CASE}
    figure.set_size_inches(7.5, 2.3)
    axis = figure.subplots()
    names = []
    for place, (metric, (name, colour)) in enumerate(GLANCE_BARS.items()):
        low, middle, high = (of[f"{metric}{suffix}"] for suffix in ("_p10", "", "_p90"))
        _glance_bar(axis, place, (low, middle, high), colour)
        names.append(name)
    _glance_bar(axis, len(names), (1, 1, 1), COLOURS["slots"])
    names.append("EPBuffer()")
    direct = [of[f"direct_vs_slots{suffix}"] for suffix in ("_p90", "", "_p10")]
    _glance_bar(axis, len(names), [1 / ratio for ratio in direct], COLOURS["direct"])
    names.append('EPBuffer(comm_alg="direct")')
    axis.set_yticks(range(len(names)), names)
    axis.margins(x=0.08)
    axis.set_title(
        f"Time of dispatch + combine, EPBuffer() = 1: {GLANCE_CASE.ranks} ranks on {cores} cores, "
        f"{GLANCE_CASE.tokens} tokens each",
        loc="right",
    )


def _case_of(record: Record) -> Case:
    case: Any = record["case"]
    return Case(case["ranks"], case["tokens"], case["quantize"] or "")  # of older files False as they are


def _glance_bar(axis: Any, place: int, spread: Sequence[float], colour: str) -> None:
    low, middle, high = spread
    axis.barh(place, middle, 0.62, color=colour)
    axis.errorbar(
        middle, place, xerr=[[middle - low], [high - middle]], color="black", linewidth=0.7, capsize=2
    )
    axis.text(high + 0.1, place, f"{middle:.1f}", va="center")


def _bar(axis: Any, samples: Samples, case: Case, route: str, x: float) -> None:
    if ratios := samples.ratios(case, route, "slots"):
        spread = Spread.of(ratios)
        # From 1, where a route takes as long as slots: up is slower, down is faster.
        axis.bar(x, spread.p50 - 1, 0.13, bottom=1, color=COLOURS[route], label=ROUTES[route])
        error = [[spread.p50 - spread.p10], [spread.p90 - spread.p50]]
        axis.errorbar(x, spread.p50, error, color="black", linewidth=0.7, capsize=1.5)


def _times(figure: Any, samples: Samples, along: str) -> None:
    """Time of one call pair against one size, a panel for each value of the other one."""
    across = "ranks" if along == "tokens" else "tokens"
    values = sorted({getattr(case, across) for case in samples.cases})
    variants = _variants(samples)
    axes = _panels(figure, len(variants), len(values), 3.6, 2.9)
    for row, quantize in zip(axes, variants, strict=True):
        for axis, value in zip(row, values, strict=True):
            cases = [c for c in samples.cases if (c.quantize, getattr(c, across)) == (quantize, value)]
            for route in (*LINES, *LIMITS):
                _line(axis, samples, [c for c in cases if samples.times(c, route)], route, along)
            _log_axis(axis, sorted({getattr(case, along) for case in cases}))
            axis.set_title(f"{'W' if across == 'ranks' else 'BS'} {value}, {_rows_of(quantize)}")
            axis.set_xlabel("tokens per rank" if along == "tokens" else "ranks")
        row[0].set_ylabel("dispatch + combine, ms")
    legend(figure, columns=3)


def _line(axis: Any, samples: Samples, cases: Sequence[Case], route: str, along: str) -> None:
    if not cases:
        return
    x = [getattr(case, along) for case in cases]
    spreads = [Spread.of([us / 1e3 for us in samples.times(case, route).values()]) for case in cases]
    colour, is_limit = COLOURS[route], route in LIMITS
    axis.plot(
        x,
        [spread.p50 for spread in spreads],
        LIMITS.get(route, "-"),
        marker=None if is_limit else "o",
        markersize=3,
        linewidth=2.0 if route in ("slots", "direct") else 1.2,
        color=colour,
        label=ROUTES[route],
    )
    if not is_limit:
        lowest, highest = [s.p10 for s in spreads], [s.p90 for s in spreads]
        axis.fill_between(x, lowest, highest, color=colour, alpha=0.15, linewidth=0)


def _log_axis(axis: Any, values: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(values, [str(value) for value in values])
    axis.grid(visible=True, which="major", axis="y", linewidth=0.4, alpha=0.6)


def _scaling(figure: Any, sweeps: Mapping[SweepKind, Samples]) -> None:
    """Time per byte against that of the smallest size, with what is asked as a line."""
    axes = _panels(figure, 1, len(sweeps), 4.6, 3.0)
    for axis, (kind, samples) in zip(axes[0], sweeps.items(), strict=True):
        for sweep in sweeps_of(kind, samples):
            x = [getattr(case, kind) for case in sweep.cases]
            spreads = [sweep.per_byte[case] for case in sweep.cases]
            errors = [[s.p50 - s.p10 for s in spreads], [s.p90 - s.p50 for s in spreads]]
            axis.errorbar(
                x,
                [spread.p50 for spread in spreads],
                errors,
                fmt="s--" if sweep.quantize else "o-",
                markersize=4,
                capsize=2,
                color=COLOURS[sweep.route],
                label=f"{ROUTES[sweep.route]}, {_rows_of(sweep.quantize)}",
            )
        axis.axhline(ASKED[kind].bound, color="black", linewidth=0.8, linestyle=":")
        axis.set_xscale("log", base=2)
        sizes = sorted({getattr(case, kind) for case in samples.cases})
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_xlabel("tokens per rank, 2 ranks" if kind == "tokens" else "ranks")
        axis.set_title("time per byte / that of the smallest size")
        axis.set_ylim(bottom=0)
    legend(figure, columns=3)
