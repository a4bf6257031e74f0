"""``moe-triton model validate``: the model against published times, in one table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from autotune.cli.model import predicted
from autotune.cli.model.options import Markdown
from autotune.model.fits.predicted import predictions
from autotune.model.fits.validate import (
    FEW_CORES,
    MANY_CORES,
    MOST_GAIN,
    MOST_MEAN,
    MOST_WORST,
    OPERATORS,
    ROWS,
    LeftOut,
    Published,
    Validation,
    phases,
    predict,
)
from autotune.model.fits.validate import validate as compare
from autotune.model.kernel_costs.movement import merged
from autotune.model.sensitivity import Judged, Sensitivity, judged
from moe_triton.tools.plots import COLOURS, draw, legend, write_plots
from moe_triton.tools.progress import progress
from moe_triton.tools.text_table import TextTable, markdown_of, names, numbers, print_parts, texts

COLUMNS = (
    texts("operator", alone="of"),
    numbers("EP"),
    numbers("BS"),
    names("", alone="operator"),
    numbers("published us"),
    numbers("model us"),
    numbers("may lie in"),
    numbers("error"),
    numbers("left out", spare=2, alone="error, left out"),
    numbers("null model", spare=2, alone="error of the null model"),
    texts("most of it", spare=1),
)
FITTED_COLUMNS = (
    names("fitted constant", code=True),
    texts("value"),
    numbers("range"),
    numbers("standard error"),
    numbers("left out", spare=1, alone="value with a row left out"),
    texts("source"),
)
CONSTANT_COLUMNS = (
    names("constant", code=True),
    numbers("value"),
    numbers("range"),
    names("kind"),
    numbers("largest elasticity"),
    numbers("moves an answer by"),
)
MORE = "--json"
ERRORS, PARTS = "published.svg", "published_parts.svg"


def validate(
    as_json: Annotated[bool, typer.Option("--json", help="everything, as JSON")] = False,
    as_markdown: Markdown = False,
    plot: Annotated[Path | None, typer.Option(help="folder for the plots")] = None,
) -> None:
    """Compare the model with published times of Ascend's own operators; exits with 1 out of bounds."""
    console = Console()
    with progress("predicting what is published"):
        validation = compare()
        bars, others = error_bars(validation), predictions()
    if as_json:
        console.print_json(
            json.dumps({**document(validation, bars), "predicted": predicted.document(others)})
        )
    else:
        print_parts((*parts(validation, bars), *predicted.parts(others, MORE)), console, as_markdown)
    if plot is not None:
        write_plots(console, lambda: plot_validation(validation, bars, plot))
    raise typer.Exit(0 if validation.is_within_bounds else 1)


def error_bars(validation: Validation) -> list[Judged]:
    """Error bars of all published times, from the ranges of the constants that predictions depend on."""
    return [judged(partial(predict, row), validation.machines[row.product]) for row in ROWS]


def parts(validation: Validation, bars: list[Judged]) -> tuple[TextTable | str, ...]:
    """The table, what follows from it, and the constants."""
    return (
        TextTable(COLUMNS, _rows(validation, bars), more=MORE),
        _summary(validation),
        TextTable(FITTED_COLUMNS, _fitted(validation), more=MORE),
        _cores(validation),
        TextTable(CONSTANT_COLUMNS, _all(bars), more=MORE),
    )


def page_text(validation: Validation, bars: list[Judged]) -> str:
    """The same in Markdown."""
    return markdown_of(parts(validation, bars))


def document(validation: Validation, bars: list[Judged]) -> dict[str, Any]:
    """The same as JSON's types."""
    rows = [
        {
            **asdict(row),
            "model_us": bar.value,
            "low_us": bar.value - bar.below,
            "high_us": bar.value + bar.above,
            "error": error,
            "null_error": null,
            "left_out_error": left.error,
            "left_out_constants": dict(left.values),
            "elasticities": {each.name: each.elasticity for each in bar.sensitivities},
        }
        for row, bar, error, null, left in _compared(validation, bars)
    ]
    return {
        "rows": rows,
        "fitted": dict(validation.refitted.values),
        "standard_errors": validation.refitted.standard_errors,
        "gains_from_24_to_48_cores": {row.name: gain for row, gain in validation.gains.items()},
        "may_choose_core_splits": validation.may_choose_core_splits,
        "is_within_bounds": validation.is_within_bounds,
    }


def _compared(
    validation: Validation, bars: list[Judged]
) -> Iterator[tuple[Published, Judged, float, float, LeftOut]]:
    """Each published time with what the model says of it, its errors, and the fit without it."""
    errors, null_errors = validation.errors.tolist(), validation.null_errors.tolist()
    return zip(ROWS, bars, errors, null_errors, validation.left_out, strict=True)


def _rows(validation: Validation, bars: list[Judged]) -> list[tuple[object, ...]]:
    lines: list[tuple[object, ...]] = []
    for row, bar, error, null, left in _compared(validation, bars):
        by_part = merged(*phases(row, validation.machines[row.product]).values())
        most = sorted(by_part, key=lambda part: -by_part[part])[:2]
        shares = ", ".join(f"{part} {by_part[part] / bar.value:.0%}" for part in most)
        low, high = bar.value - bar.below, bar.value + bar.above
        lines.append(
            (
                row.system,
                row.ranks,
                row.tokens,
                row.operator,
                f"{row.us:.0f}",
                f"{bar.value:.0f}",
                f"{low:.0f} to {high:.0f}",
                f"{error:+.1%}",
                f"{left.error:+.1%}",
                f"{null:+.0%}",
                shares,
            )
        )
    return lines


def _summary(validation: Validation) -> str:
    left = [each.error for each in validation.left_out]
    figures = (
        ("model", validation.errors),
        ("each left out", np.array(left)),
        ("null model", validation.null_errors),
    )
    said = "; ".join(
        f"{of}: {np.abs(errors).mean():.1%} mean, {np.abs(errors).max():.1%} worst" for of, errors in figures
    )
    verdict = "within" if validation.is_within_bounds else "OUT OF"
    return f"{said}. That is {verdict} the bounds of {MOST_MEAN:.0%} mean and {MOST_WORST:.0%} worst."


def _fitted(validation: Validation) -> list[tuple[object, ...]]:
    errors = validation.refitted.standard_errors
    lines: list[tuple[object, ...]] = []
    for constant, value in validation.refitted.values.items():
        entry = validation.machines["A2"].constants[constant]
        values = [left.values[constant] for left in validation.left_out]
        at_end = "" if entry.low * 1.001 < value < entry.high / 1.001 else " (an end of its range)"
        lines.append(
            (
                constant,
                f"{value:.4g}{at_end}",
                f"{entry.low:g} to {entry.high:g}",
                f"{errors[constant]:.0%}",
                f"{min(values):.4g} to {max(values):.4g}",
                entry.source,
            )
        )
    return lines


def _cores(validation: Validation) -> str:
    low, high = min(validation.gains.values()), max(validation.gains.values())
    may = "may" if validation.may_choose_core_splits else "may NOT"
    return (
        f"From {FEW_CORES} to {MANY_CORES} cores the model says that A3's operators gain {low:.0%} to "
        f"{high:.0%}; published is almost nothing, taken as {MOST_GAIN:.0%} at most. So it {may} choose core "
        "splits."
    )


def _all(bars: list[Judged]) -> list[tuple[object, ...]]:
    """Every constant that the answers depend on, those that move them most first."""
    by_name: dict[str, list[tuple[Sensitivity, float]]] = {}
    for bar in bars:
        for each in bar.sensitivities:
            by_name.setdefault(each.name, []).append((each, each.swing / bar.value))
    lines = []
    for constant, sensitivities in by_name.items():
        entry, swing = sensitivities[0][0].constant, max(moved for _, moved in sensitivities)
        elasticity = max((each.elasticity for each, _ in sensitivities), key=abs)
        ends = f"{entry.low:g} to {entry.high:g}"
        line = constant, f"{entry.value:g}", ends, entry.kind, f"{elasticity:+.2f}", f"{swing:.0%}"
        lines.append((swing, line))
    return [line for _, line in sorted(lines, key=lambda each: -each[0])]


def plot_validation(validation: Validation, bars: list[Judged], folder: Path) -> list[Path]:
    """Predictions with their error bars beside the published times, and what they are made of."""
    return [
        draw(folder / ERRORS, lambda figure: _errors(figure, validation, bars)),
        draw(folder / PARTS, lambda figure: _parts(figure, validation)),
    ]


def _errors(figure: Any, validation: Validation, bars: list[Judged]) -> None:
    """Model over published; 1 is right."""
    figure.set_size_inches(8.5, 5.2)
    axis = figure.subplots()
    published = np.array([row.us for row in ROWS])
    places = np.arange(len(ROWS))[::-1]
    spread = np.array([[bar.below for bar in bars], [bar.above for bar in bars]]) / published
    axis.axvspan(0.75, 1.25, color="#888888", alpha=0.15, linewidth=0)
    axis.axvline(1, color="#888888", linewidth=1)
    left_out = np.array([left.us for left in validation.left_out])
    shown = {
        "model, with its error bar": (validation.us / published, "o", COLOURS[0], spread),
        "the same, fitted without this row": (left_out / published, "x", COLOURS[1], None),
        "null model: bytes and a constant": (validation.null_us / published, "s", COLOURS[2], None),
    }
    for name, (ratios, marker, colour, error) in shown.items():
        axis.errorbar(
            ratios, places, xerr=error, fmt=marker, color=colour, label=name, markersize=5, capsize=2
        )
    axis.set_yticks(places, [row.name for row in ROWS])
    axis.set_xlabel("predicted / published")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)


def _parts(figure: Any, validation: Validation) -> None:
    """What the predictions are made of, as shares of the published times."""
    figure.set_size_inches(8.5, 5.6)
    us_of = {row: merged(*phases(row, validation.machines[row.product]).values()) for row in ROWS}
    names = list(dict.fromkeys(name for parts in us_of.values() for name in parts))
    for axis, operator in zip(figure.subplots(1, len(OPERATORS), sharey=False), OPERATORS, strict=True):
        rows = [row for row in ROWS if row.operator == operator]
        for place, row in enumerate(rows):
            bottom = 0.0
            for name in names:
                share = us_of[row].get(name, 0.0) / row.us
                colour = COLOURS[names.index(name) % len(COLOURS)]
                hatch = None if names.index(name) < len(COLOURS) else "//"
                axis.bar(place, share, 0.7, bottom, color=colour, label=name, hatch=hatch)
                bottom += share
        labels = [f"{row.system}, EP {row.ranks}" for row in rows]
        axis.set_xticks(range(len(rows)), labels, rotation=60, ha="right")
        axis.set_title(operator)
        axis.axhline(1, color="#888888", linewidth=1)
        axis.set_ylabel("of the published time")
    legend(figure, columns=6)
