"""``moe-triton model validate``: the model against published times, in one table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from autotune.cli.model.options import Markdown
from moe_triton.tools.plots import write_plots
from moe_triton.tools.progress import progress
from moe_triton.tools.text_table import TextTable, markdown_of, names, numbers, print_parts, texts

if TYPE_CHECKING:
    from autotune.model.fits.published import Published
    from autotune.model.fits.validate import LeftOut, Validation
    from autotune.model.sensitivity import Judged, Sensitivity

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


def validate(
    as_json: Annotated[bool, typer.Option("--json", help="everything, as JSON")] = False,
    as_markdown: Markdown = False,
    plot: Annotated[Path | None, typer.Option(help="folder for the plots")] = None,
) -> None:
    """Compare the model with published times of Ascend's own operators; exits with 1 out of bounds."""
    from autotune.model.fits.validate import validate as compare

    console = Console()
    with progress("predicting what is published"):
        found = compare()
        bars = error_bars(found)
    if as_json:
        console.print_json(json.dumps(document(found, bars)))
    else:
        print_parts(parts(found, bars), console, as_markdown)
    if plot is not None:
        from autotune.cli.model.validate_plots import plot_validation

        write_plots(console, lambda: plot_validation(found, bars, plot))
    raise typer.Exit(0 if found.is_within_bounds else 1)


def error_bars(found: Validation) -> list[Judged]:
    """Error bars of all published times, from the ranges of the constants that predictions depend on."""
    from autotune.model.fits.published import ROWS, predict
    from autotune.model.sensitivity import judged

    return [judged(partial(predict, row), found.machines[row.product]) for row in ROWS]


def parts(found: Validation, bars: list[Judged]) -> tuple[TextTable | str, ...]:
    """The table, what follows from it, and the constants."""
    return (
        TextTable(COLUMNS, _rows(found, bars), more=MORE),
        _summary(found),
        TextTable(FITTED_COLUMNS, _fitted(found), more=MORE),
        _cores(found),
        TextTable(CONSTANT_COLUMNS, _all(bars), more=MORE),
    )


def page_text(found: Validation, bars: list[Judged]) -> str:
    """The same in Markdown."""
    return markdown_of(parts(found, bars))


def document(found: Validation, bars: list[Judged]) -> dict[str, Any]:
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
        for row, bar, error, null, left in _compared(found, bars)
    ]
    return {
        "rows": rows,
        "fitted": dict(found.refitted.values),
        "standard_errors": found.refitted.standard_errors,
        "gains_from_24_to_48_cores": {row.name: gain for row, gain in found.gains.items()},
        "may_choose_core_splits": found.may_choose_core_splits,
        "is_within_bounds": found.is_within_bounds,
    }


def _compared(
    found: Validation, bars: list[Judged]
) -> Iterator[tuple[Published, Judged, float, float, LeftOut]]:
    """Each published time with what the model says of it, its errors, and the fit without it."""
    from autotune.model.fits.published import ROWS

    errors, null_errors = found.errors.tolist(), found.null_errors.tolist()
    return zip(ROWS, bars, errors, null_errors, found.left_out, strict=True)


def _rows(found: Validation, bars: list[Judged]) -> list[tuple[object, ...]]:
    from autotune.model.bodies.movement import merged
    from autotune.model.fits.published import phases

    lines: list[tuple[object, ...]] = []
    for row, bar, error, null, left in _compared(found, bars):
        by_part = merged(*phases(row, found.machines[row.product]).values())
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


def _summary(found: Validation) -> str:
    import numpy as np

    from autotune.model.fits.validate import MOST_MEAN, MOST_WORST

    left = [each.error for each in found.left_out]
    figures = (("model", found.errors), ("each left out", np.array(left)), ("null model", found.null_errors))
    said = "; ".join(
        f"{of}: {np.abs(errors).mean():.1%} mean, {np.abs(errors).max():.1%} worst" for of, errors in figures
    )
    verdict = "within" if found.is_within_bounds else "OUT OF"
    return f"{said}. That is {verdict} the bounds of {MOST_MEAN:.0%} mean and {MOST_WORST:.0%} worst."


def _fitted(found: Validation) -> list[tuple[object, ...]]:
    errors = found.refitted.standard_errors
    lines: list[tuple[object, ...]] = []
    for constant, value in found.refitted.values.items():
        entry = found.machines["A2"].constants[constant]
        values = [left.values[constant] for left in found.left_out]
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


def _cores(found: Validation) -> str:
    from autotune.model.fits.validate import FEW_CORES, MANY_CORES, MOST_GAIN

    low, high = min(found.gains.values()), max(found.gains.values())
    may = "may" if found.may_choose_core_splits else "may NOT"
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
    for constant, found in by_name.items():
        entry, swing = found[0][0].constant, max(moved for _, moved in found)
        elasticity = max((each.elasticity for each, _ in found), key=abs)
        ends = f"{entry.low:g} to {entry.high:g}"
        line = constant, f"{entry.value:g}", ends, entry.kind, f"{elasticity:+.2f}", f"{swing:.0%}"
        lines.append((swing, line))
    return [line for _, line in sorted(lines, key=lambda each: -each[0])]
