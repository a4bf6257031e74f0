"""Least squares between bounds, by Gauss-Newton steps with damping (Levenberg and Marquardt)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Residuals = Callable[[np.ndarray], np.ndarray]

STEP = 0.01  # of a difference quotient: predictions are smooth, or straight lines with kinks
MOST_STEPS, MOST_TRIES = 60, 12
DAMPING, LESS, MORE = 1e-3, 0.2, 4.0  # the usual ones; the result does not depend on them
SMALLEST_GAIN = 1e-12  # of the sum of squares, relative: nothing is left to gain


def jacobian(residuals: Residuals, at: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """(m, n) derivatives by central differences, one-sided at a bound.

    Args:
        residuals: (m,) from (n,).
        at: (n,), n at least 1.
        low, high: (n,) bounds, low below high, with `at` between them.
    """
    columns = []
    for i in range(len(at)):
        above, below = at.copy(), at.copy()
        above[i], below[i] = min(at[i] + STEP, high[i]), max(at[i] - STEP, low[i])
        columns.append((residuals(above) - residuals(below)) / (above[i] - below[i]))
    return np.stack(columns, axis=1)


def minimise(residuals: Residuals, start: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Where the sum of squares is smallest, near a start.

    Args:
        residuals: (m,) from (n,).
        start: (n,) between the bounds.
        low, high: (n,) bounds.
    """
    at, damping = start.copy(), DAMPING
    found = residuals(at)
    for _ in range(MOST_STEPS):
        slopes = jacobian(residuals, at, low, high)
        downhill = -slopes.T @ found
        # A constant at its bound that would leave it stays there.
        is_free = ~(((at <= low) & (downhill < 0)) | ((at >= high) & (downhill > 0)))
        if not is_free.any():
            break
        for _ in range(MOST_TRIES):
            step = _step(slopes[:, is_free], downhill[is_free], damping)
            there = at.copy()
            there[is_free] += step
            there = there.clip(low, high)
            new = residuals(there)
            if new @ new < found @ found:
                break
            damping *= MORE
        else:
            break
        gain = 1 - (new @ new) / (found @ found)
        at, found, damping = there, new, damping * LESS
        if gain < SMALLEST_GAIN:
            break
    return at


def _step(slopes: np.ndarray, downhill: np.ndarray, damping: float) -> np.ndarray:
    normal = slopes.T @ slopes
    scale = np.diag(normal)
    # What no residual depends on does not move.
    scale = np.where(scale > 0, scale, 1.0)
    return np.asarray(np.linalg.solve(normal + damping * np.diag(scale), downhill))
