"""Where the lines of two schemes cross: from which size on another one is faster."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Crossing:
    """Two lines that cross.

    Attributes:
        size: where, by straight lines between the sizes that were computed.
        below, above: which one is lower before, and after.
    """

    size: float
    below: str
    above: str


def crossings(sizes: Sequence[float], lines: Mapping[str, Sequence[float]]) -> list[Crossing]:
    """All crossings of each two lines, by size.

    Lines that only touch do not cross.

    Args:
        sizes: increasing.
        lines: by name, a value for each size.
    """
    found: list[Crossing] = []
    for first, second in itertools.combinations(lines, 2):
        gaps = [a - b for a, b in zip(lines[first], lines[second], strict=True)]
        found += [_named(size, falls, first, second) for size, falls in _roots(sizes, gaps)]
    return sorted(found, key=lambda crossing: crossing.size)


def _named(size: float, falls: bool, first: str, second: str) -> Crossing:
    return Crossing(size, second, first) if falls else Crossing(size, first, second)


def _roots(sizes: Sequence[float], gaps: Sequence[float]) -> list[tuple[float, bool]]:
    """Where a line changes its sign, and whether it falls there; a stretch at 0 counts once, at its begin."""
    found = []
    points = [(size, gap) for size, gap in zip(sizes, gaps, strict=True)]
    signed = [index for index, (_, gap) in enumerate(points) if gap]
    for before, after in itertools.pairwise(signed):
        (a, low), (b, high) = points[before], points[after]
        if (low > 0) == (high > 0):
            continue
        size = points[before + 1][0] if after - before > 1 else a + (b - a) * low / (low - high)
        found.append((size, low > 0))
    return found
