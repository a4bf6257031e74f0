"""Plots of schemes on groups: times over tokens for each group, and over ranks for each number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_triton.tools.plots import COLOURS, draw, legend

if TYPE_CHECKING:
    from autotune.model.clusters.cluster import Point

BY_TOKENS, BY_RANKS = "cluster_by_tokens.svg", "cluster_by_ranks.svg"
STYLES = {"dispatch": ("-", "o"), "combine": ("--", "s")}
SIZES = {"ranks": "ranks (EP)", "tokens": "tokens of each rank (BS)"}
PANEL_WIDTH, PANEL_HEIGHT, MOST_IN_A_ROW = 3.4, 3.0, 3


def plot_cluster(points: Sequence[Point], folder: Path) -> list[Path]:
    """Both plots."""
    return [
        draw(folder / BY_TOKENS, lambda figure: _panels(figure, points, "tokens", "ranks")),
        draw(folder / BY_RANKS, lambda figure: _panels(figure, points, "ranks", "tokens")),
    ]


def _panels(figure: Any, points: Sequence[Point], along: str, across: str) -> None:
    """A panel for each size across; lines over the other one, by scheme and operator."""
    values = sorted({getattr(point.group, across) for point in points})
    columns = min(len(values), MOST_IN_A_ROW)
    rows = -(-len(values) // columns)
    figure.set_size_inches(max(PANEL_WIDTH * columns, 7.5), PANEL_HEIGHT * rows + 0.7)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axis, value in zip(axes, values, strict=False):
        _lines(axis, [point for point in points if getattr(point.group, across) == value], along)
        axis.set_title(f"{'EP' if across == 'ranks' else 'BS'} {value}")
        axis.set_xlabel(SIZES[along])
    for axis in axes[len(values) :]:
        axis.set_visible(False)
    for axis in axes[::columns]:
        axis.set_ylabel("us, slowest rank")
    legend(figure, len(STYLES))


def _lines(axis: Any, points: Sequence[Point], along: str) -> None:
    schemes = list(dict.fromkeys(point.group.comm_alg for point in points))
    for number, scheme in enumerate(schemes):
        of = sorted(
            (point for point in points if point.group.comm_alg == scheme),
            key=lambda point: int(getattr(point.group, along)),
        )
        for operator, (line, marker) in STYLES.items():
            axis.plot(
                [getattr(point.group, along) for point in of],
                [point.operators[operator].us for point in of],
                line,
                marker=marker,
                markersize=3,
                color=COLOURS[number],
                # The same operator of two schemes may take the same: the first one shows around the others.
                linewidth=1.2 + 1.6 * (len(schemes) - 1 - number),
                label=f"{scheme}, {operator}",
            )
    sizes = sorted({getattr(point.group, along) for point in points})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.grid(visible=True, which="major", axis="y", linewidth=0.4, alpha=0.6)
