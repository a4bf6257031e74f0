"""Rows whose places are not their own numbers: where in-band rows go, and where results lie."""

from __future__ import annotations

import numpy as np

from .memory import Guarded

SPARE_ROWS = 3  # places that no row has
NOWHERE = -1


def draw_places(seed: int, rank: int, number: int, absent: float = 0.0) -> np.ndarray:
    """(rows,) the place of each of a rank's rows, all of them different.

    Args:
        number: of rows.
        absent: chance that a row goes nowhere.
    """
    rng = np.random.default_rng((seed, rank, number))
    places = rng.permutation(number + SPARE_ROWS)[:number].astype(np.int32)
    places[rng.random(number) < absent] = NOWHERE
    return places


def at_places(rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """(rows and spare ones, bytes) with each of these rows at its place, if that is one."""
    placed = Guarded((len(rows) + SPARE_ROWS, rows.shape[1])).array
    is_inside = (places >= 0) & (places < len(placed))
    placed[places[is_inside]] = rows[is_inside]
    return placed
