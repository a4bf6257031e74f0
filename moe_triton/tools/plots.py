"""Figures as SVG: the same bytes for the same figures, readable on light and dark pages."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_triton.core.errors import ToolchainError
from moe_triton.core.installing import install

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#882255", "#F0E442")
"""Colours of plots: all but "#882255" are of the palette of Okabe and Ito."""

STYLE = {
    "svg.hashsalt": "moe_triton",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "axes.titlesize": 10,
}


def draw(path: Path, paint: Callable[[Any], None]) -> Path:
    """Paints a figure and writes it.

    Args:
        path: of the file; its folder is made.
        paint: draws on a matplotlib figure.

    Raises:
        ToolchainError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ToolchainError(f"matplotlib is missing, which plots need. Run: {install('bench')}")
    matplotlib: Any = importlib.import_module("matplotlib")
    figures: Any = importlib.import_module("matplotlib.figure")
    with matplotlib.rc_context(STYLE):
        figure = figures.Figure(layout="constrained")
        figure.patch.set_facecolor("white")
        paint(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path


def legend(figure: Any, columns: int) -> None:
    """One legend below all axes of a figure: each name once."""
    shown: dict[str, Any] = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=columns, frameon=False)


def write_plots(console: Console, plots: Callable[[], Iterable[Path]]) -> None:
    """Draws, and says which files there are now.

    Args:
        console: to say it on.
        plots: draws them.

    Raises:
        ToolchainError: matplotlib is missing.
    """
    for path in plots():
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
