"""Pictures of what figures measure: a panel for each operator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.servers.runs import OPERATORS
from moe_triton.tools.plots import draw, legend

Line = list[tuple[int, float]]
Lines = dict[tuple[str, str], Line]
"""By operator, and what it is of."""


def draw_lines(path: Path, lines: Lines, looks: Mapping[str, tuple[str, str]], **axes: Any) -> None:
    """Draws lines over the tokens of a rank.

    Args:
        path: of the picture.
        lines: of all operators.
        looks: style and colour, by what lines are of.
        axes: what else is set of them.
    """

    def paint(figure: Any) -> None:
        figure.set_size_inches(9.0, 3.8)
        for axis, operator in zip(figure.subplots(1, len(OPERATORS)), OPERATORS, strict=True):
            for of, (style, colour) in looks.items():
                x, y = zip(*lines[operator, of], strict=True)
                axis.plot(x, y, style, color=colour, label=of)
            axis.set(title=operator, xscale="log", xlabel="tokens of a rank", **axes)
        legend(figure, len(looks))

    draw(path, paint)
