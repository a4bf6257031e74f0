"""Rows of text for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields

from rich.text import Text

from benchmarks.compare.cases import PHASES, ROUTES, Case
from benchmarks.compare.figures import METRICS, Metric, Samples, Spread
from benchmarks.compare.targets import target_of, verdict
from moe_triton.tools.text_table import TextTable, names, numbers

STYLES = {"met": "green", "missed": "red", "absent": "yellow"}
ABSENT = "absent"


def text_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> TextTable:
    """Rows of text under a title, verdicts in colour; the first ``left`` columns are words."""
    kinds = [(names if i < left else numbers)(column) for i, column in enumerate(columns)]
    return TextTable(kinds, [[_coloured(cell) for cell in row] for row in rows], title)


def _coloured(cell: str) -> Text:
    return Text(cell, style=STYLES.get(cell.split(" ")[-1], ""))


def metric_table(samples: Samples, metric: Metric) -> TextTable:
    """One ratio in all cases, against what is asked of it."""
    rows = []
    for case in samples.cases:
        spread = samples.metric(case, metric)
        target = target_of(metric.name, case)
        rows.append(
            (
                *case_cells(case),
                *_spread_cells(spread),
                "" if target is None else str(target),
                verdict(metric.name, case, None if spread is None else spread.p50),
            )
        )
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
            shown = "" if value is None else f"{value:.2f}"
            cells.append(f"{shown} {verdict(metric.name, case, value)}".strip())
        rows.append((*case_cells(case), *cells))
    columns = ("ranks", "tokens", "rows", *(metric.title for metric in metrics))
    title = "Medians of the ratios in each iteration; met or missed where something is asked"
    return text_table(title, columns, rows, left=0)


def time_table(samples: Samples, case: Case) -> TextTable:
    """Every route of one case."""
    rows = []
    for route in ROUTES:
        if samples.times(case, route):
            spread = Spread.of(list(samples.times(case, route).values()))
            shown = [f"{value:.0f}" for value in astuple(spread)]
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


def _spread_cells(spread: Spread | None) -> tuple[str, str, str]:
    if spread is None:
        return "", "", ""
    return f"{spread.p10:.2f}", f"{spread.p50:.2f}", f"{spread.p90:.2f}"


def _median(values: Sequence[float]) -> str:
    return f"{Spread.of(values).p50:.0f}" if values else "-"
