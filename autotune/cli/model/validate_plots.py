"""Plots of the comparison with published times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.model.bodies.movement import merged
from autotune.model.fits.published import OPERATORS, ROWS, phases
from moe_triton.tools.plots import COLOURS, draw, legend

if TYPE_CHECKING:
    from autotune.model.fits.validate import Validation
    from autotune.model.sensitivity import Judged

ERRORS, PARTS = "published.svg", "published_parts.svg"


def plot_validation(found: Validation, bars: list[Judged], folder: Path) -> list[Path]:
    """Predictions with their error bars beside the published times, and what they are made of."""
    return [
        draw(folder / ERRORS, lambda figure: _errors(figure, found, bars)),
        draw(folder / PARTS, lambda figure: _parts(figure, found)),
    ]


def _errors(figure: Any, found: Validation, bars: list[Judged]) -> None:
    """Model over published; 1 is right."""
    figure.set_size_inches(8.5, 5.2)
    axis = figure.subplots()
    published = np.array([row.us for row in ROWS])
    places = np.arange(len(ROWS))[::-1]
    spread = np.array([[bar.below for bar in bars], [bar.above for bar in bars]]) / published
    axis.axvspan(0.75, 1.25, color="#888888", alpha=0.15, linewidth=0)
    axis.axvline(1, color="#888888", linewidth=1)
    shown = {
        "model, with its error bar": (found.us / published, "o", COLOURS[0], spread),
        "the same, fitted without this row": (_left_out(found) / published, "x", COLOURS[1], None),
        "null model: bytes and a constant": (found.null_us / published, "s", COLOURS[2], None),
    }
    for name, (ratios, marker, colour, error) in shown.items():
        axis.errorbar(
            ratios, places, xerr=error, fmt=marker, color=colour, label=name, markersize=5, capsize=2
        )
    axis.set_yticks(places, [row.name for row in ROWS])
    axis.set_xlabel("predicted / published")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)


def _left_out(found: Validation) -> np.ndarray:
    return np.array([left.us for left in found.left_out])


def _parts(figure: Any, found: Validation) -> None:
    """What the predictions are made of, as shares of the published times."""
    figure.set_size_inches(8.5, 5.6)
    us_of = {row: merged(*phases(row, found.machines[row.product]).values()) for row in ROWS}
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
