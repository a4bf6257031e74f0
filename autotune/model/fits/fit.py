"""Fitting constants to measured times: least squares of logarithms, so that each time counts by its ratio."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from autotune.model.constants import Constant

Predict = Callable[[Mapping[str, float]], np.ndarray]
"""Predicted times, (N,) microseconds, from values by constant."""

MOST_STEPS = 60
ENOUGH = 1e-9
STEP = 1e-4  # of a logarithm, for differences
LEAST_SINGULAR = 1e-3  # of the largest: less, and the data cannot tell constants apart


@dataclass(frozen=True)
class Fit:
    """What a fit has found.

    Attributes:
        values: by constant, within its range. log_errors: (N,) log(predicted / measured). jacobian: (N, P)
            derivative of log(predicted) by the logarithm of each constant, in the order of ``values``.
    """

    values: Mapping[str, float]
    log_errors: np.ndarray
    jacobian: np.ndarray

    @property
    def standard_errors(self) -> dict[str, float]:
        """By constant, relative: of the fit, from its errors and the jacobian; inf where the data do not
        tell.
        """
        left, right = self.jacobian.shape
        variance = float(self.log_errors @ self.log_errors) / max(1, left - right)
        _, singular, rows = np.linalg.svd(self.jacobian, full_matrices=False)
        known = singular > LEAST_SINGULAR * max(float(singular.max(initial=0.0)), ENOUGH)
        unknown = (rows[~known] ** 2).sum(axis=0) > LEAST_SINGULAR
        spread = ((rows[known] / singular[known, None]) ** 2).sum(axis=0)
        errors = np.where(unknown, np.inf, np.sqrt(variance * spread))
        return dict(zip(self.values, errors.tolist(), strict=True))


def fit(
    predict: Predict, measured: np.ndarray, constants: Mapping[str, Constant], enough: float = ENOUGH
) -> Fit:
    """Values within their ranges whose predictions are nearest to measured times (Levenberg and Marquardt's
    steps).

    Args:
        predict: the model.
        measured: (N,) microseconds, above 0.
        constants: where to begin, and the ranges.
        enough: share of the sum of squares; a step that gains less is the last.
    """
    low = np.log([entry.low for entry in constants.values()])
    high = np.log([entry.high for entry in constants.values()])

    def errors(at: np.ndarray) -> np.ndarray:
        values = dict(zip(constants, np.exp(at).tolist(), strict=True))
        log_ratios: np.ndarray = np.log(predict(values) / measured)
        return log_ratios

    at = np.log([entry.value for entry in constants.values()])
    damping, now = 1e-3, errors(at)
    slopes = slopes_of(errors, at, now)
    for _ in range(MOST_STEPS):
        free = _free(at, slopes.T @ now, low, high)
        normal = slopes.T @ slopes
        step = np.zeros_like(at)
        if free.any():
            inner = np.ix_(free, free)
            damped = normal[inner] + damping * (
                np.diag(normal[inner].diagonal()) + ENOUGH * np.eye(free.sum())
            )
            step[free] = -np.linalg.solve(damped, (slopes.T @ now)[free])
        tried = np.clip(at + step, low, high)
        then = errors(tried)
        if then @ then < now @ now:
            is_done = now @ now - then @ then < enough * (now @ now)
            at, now, damping = tried, then, damping / 5
            slopes = slopes_of(errors, at, now)
            if is_done:
                break
        else:
            damping *= 10
            if damping > 1e9 or not free.any():
                break
    return Fit(dict(zip(constants, np.exp(at).tolist(), strict=True)), now, slopes)


def slopes_of(errors: Callable[[np.ndarray], np.ndarray], at: np.ndarray, now: np.ndarray) -> np.ndarray:
    """(N, P) derivatives of (N,) errors by the logarithms of (P,) constants, P at least 1.

    Args:
        errors: by the logarithms.
        at: (P,) where.
        now: (N,) the errors there.
    """
    return np.stack([(errors(at + STEP * unit) - now) / STEP for unit in np.eye(at.size)], axis=1)


def _free(at: np.ndarray, gradient: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Which constants are not held at an end of their range by the slope towards it."""
    held = ((at <= low) & (gradient > 0)) | ((at >= high) & (gradient < 0))
    return ~held & (high > low)
