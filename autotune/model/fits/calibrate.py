"""Refits constants to measured times: those that the times determine, by least squares on logarithms.

Constants and times are taken by their logarithms, so that an error is a share, whatever its size. A constant
is known, before any time is looked at, to lie somewhere between its low and its high; the times say more
about it, or they do not (`Verdict`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

import numpy as np

from autotune.model.constants import Constant, Machine
from autotune.model.fits.fit import fit, slopes_of
from moe_triton.core.errors import ArgumentError

M = TypeVar("M")
Predict = Callable[[Machine, M], float]
"""Microseconds that the model gives for a measurement on a machine, above 0."""

NOISE = 0.02
"""Times are taken to repeat within 2 %, unless they do not fit any better than that."""

ENOUGH = 1e-3  # of the sum of squares: no fit to times with noise is worth another step for less
DEVIATIONS = 2  # to each side: 95 % of a normal distribution
HALF = 0.5  # a constant is determined if the times leave no more than this of what was unknown of it
ALIKE = 0.9  # correlation from which on two constants cannot be told apart

Verdict = Literal["measured", "fitted", "alike", "weak", "unused", "fixed"]
"""Measured directly; fitted; or left: it cannot be told apart from another one; the times say too little of
it; no time depends on it; or its range has no width."""


@dataclass(frozen=True)
class Outcome:
    """What became of a constant.

    Attributes:
        before, after: the constant.
        verdict: why it is what it is.
        interval: between what it lies with 95 %, by the times and by what was known before.
        alike: the constant that it cannot be told apart from, or "".
        is_at_bound: its fit ended at the end of its range.
    """

    before: Constant
    after: Constant
    verdict: Verdict
    interval: tuple[float, float]
    alike: str = ""
    is_at_bound: bool = False


@dataclass(frozen=True)
class Calibration(Generic[M]):
    """A fit.

    Attributes:
        machine: with the constants that were fitted.
        outcomes: of each constant.
        measurements: what was measured.
        measured, before, after: (m,) us of each measurement, and what the model gives.
        condition: of the fitted constants' Jacobian: how much larger the error of their worst combination is
            than that of their best one. 1 if nothing was fitted.
    """

    machine: Machine
    outcomes: Mapping[str, Outcome]
    measurements: Sequence[M]
    measured: np.ndarray
    before: np.ndarray
    after: np.ndarray
    condition: float

    @property
    def fitted(self) -> list[str]:
        """Names of what was fitted."""
        return [name for name, outcome in self.outcomes.items() if outcome.verdict == "fitted"]


def errors(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """(m,) relative errors: how far the model is off, as a share of what was measured."""
    return np.asarray(predicted / measured - 1)


def calibrate(
    machine: Machine,
    measurements: Sequence[M],
    us: Sequence[float],
    predict: Predict[M],
    where: str,
    noise: float = NOISE,
) -> Calibration[M]:
    """Fits the constants of a machine that the times determine.

    Args:
        machine: what was believed; what was measured of it stays.
        measurements: at least one.
        us: how long each took.
        predict: what the model says.
        where: of the measurements: SoC and date, for the source of what is fitted.
        noise: share by which times repeat.

    Raises:
        ArgumentError: there is no measurement, or a time is not above 0.
    """
    measured = np.array(us, dtype=float)
    if not len(measured) or not (measured > 0).all() or not np.isfinite(measured).all():
        raise ArgumentError("us", us, "there must be times, all above 0", "Pass what a selftest measured.")
    model = _Model(machine, measurements, measured, predict)
    slopes = model.slopes(model.start)
    chosen = model.kept(model.determined(slopes, noise), slopes, noise)
    while True:
        at = model.fit(chosen)
        left, slopes = model.residuals(at), model.slopes(at)
        sigma = max(noise, float(np.sqrt(left @ left / max(1, len(left) - len(chosen)))))
        kept = model.kept(chosen, slopes, sigma)
        if kept == chosen:
            return model.calibration(at, chosen, slopes, sigma, where)
        chosen = kept


@dataclass(frozen=True)
class _Spread:
    """What is unknown of each constant, in logarithms: deviations, and who each one is alike."""

    deviation: Mapping[str, float]
    alike: Mapping[str, str]


class _Model(Generic[M]):
    """The constants that may be fitted, as one vector of logarithms in the order of `names`."""

    def __init__(
        self, machine: Machine, measurements: Sequence[M], measured: np.ndarray, predict: Predict[M]
    ) -> None:
        self.machine, self._measurements, self._predict = machine, measurements, predict
        self.measured = measured
        self.names = [
            name
            for name, entry in machine.constants.items()
            if entry.kind != "measured" and 0 < entry.low < entry.high
        ]
        entries = [machine.constants[name] for name in self.names]
        self.start, self.low, self.high = (
            np.log([getattr(entry, key) for entry in entries]) for key in ("value", "low", "high")
        )
        # Root mean square distance from the value, if anything in the range is as likely.
        middle = (self.low + self.high) / 2
        widths = np.sqrt((self.high - self.low) ** 2 / 12 + (middle - self.start) ** 2)
        self.widths = dict(zip(self.names, widths.tolist(), strict=True))

    def predicted(self, values: Mapping[str, float]) -> np.ndarray:
        """(m,) us, with other values of some constants."""
        machine = self.machine.replaced(values)
        return np.array([self._predict(machine, measurement) for measurement in self._measurements])

    def residuals(self, at: np.ndarray) -> np.ndarray:
        """(m,) logarithms of predicted over measured."""
        moved = {
            name: float(np.exp(is_at))
            for name, was, is_at in zip(self.names, self.start, at, strict=True)
            if is_at != was
        }
        return np.asarray(np.log(self.predicted(moved) / self.measured))

    def fit(self, chosen: Sequence[str]) -> np.ndarray:
        """The best values of some constants, the others as they were."""
        log_values: np.ndarray = self.start.copy()
        if chosen:
            constants = {name: self.machine.constants[name] for name in chosen}
            best = fit(self.predicted, self.measured, constants, ENOUGH)
            index = [self.names.index(name) for name in best.values]
            log_values[index] = np.log(list(best.values.values())).clip(self.low[index], self.high[index])
        return log_values

    def slopes(self, at: np.ndarray) -> np.ndarray:
        """(m, n) derivatives of `residuals`."""
        if not self.names:
            return np.zeros((len(self.measured), 0))
        return slopes_of(self.residuals, at, self.residuals(at))

    def determined(self, slopes: np.ndarray, sigma: float) -> list[str]:
        """What the times determine, if nothing else is known of the other constants than their ranges."""
        spread = self.spread(slopes, (), sigma)
        return [name for name in self.names if spread.deviation[name] <= HALF * self.widths[name]]

    def kept(self, chosen: Sequence[str], slopes: np.ndarray, sigma: float) -> list[str]:
        """Those whose fit is worth it, with the others as they were: the worst ones leave, one at a time."""
        kept = list(chosen)
        while kept:
            deviation = self.spread(slopes, kept, sigma).deviation
            worst = max(kept, key=lambda name: deviation[name] / self.widths[name])
            if deviation[worst] <= HALF * self.widths[worst]:
                break
            kept.remove(worst)
        return kept

    def spread(self, slopes: np.ndarray, chosen: Sequence[str], sigma: float) -> _Spread:
        """What the times leave unknown, where nothing else is known of constants than their ranges.

        Args:
            slopes: of the residuals.
            chosen: what is fitted; the others are as they were, which the fit takes for true.
            sigma: share by which times repeat.
        """
        if not self.names:
            return _Spread({}, {})
        widths = np.array([self.widths[name] for name in self.names])
        covariance = np.linalg.inv(slopes.T @ slopes / sigma**2 + np.diag(1 / widths**2))
        deviation = np.sqrt(np.diag(covariance))
        correlation = np.abs(covariance / np.outer(deviation, deviation))
        np.fill_diagonal(correlation, 0)
        alike = {
            name: self.names[int(row.argmax())]
            for name, row in zip(self.names, correlation, strict=True)
            if row.max() >= ALIKE
        }
        if chosen:
            is_chosen = np.isin(self.names, chosen)
            fit = np.linalg.pinv(slopes[:, is_chosen])
            by_times, by_others = sigma * fit, fit @ slopes[:, ~is_chosen] * widths[~is_chosen]
            deviation[is_chosen] = np.sqrt((by_times**2).sum(axis=1) + (by_others**2).sum(axis=1))
        return _Spread(dict(zip(self.names, deviation.tolist(), strict=True)), alike)

    def calibration(
        self, at: np.ndarray, chosen: Sequence[str], slopes: np.ndarray, sigma: float, where: str
    ) -> Calibration[M]:
        """The result, with `chosen` fitted."""
        spread = self.spread(slopes, chosen, sigma)
        outcomes = {name: _unmoved(entry) for name, entry in self.machine.constants.items()}
        for name, is_at, column in zip(self.names, at.tolist(), slopes.T, strict=True):
            if name in chosen:
                outcomes[name] = self._fitted(name, is_at, spread, where)
            else:
                outcomes[name] = self._left(name, column.any(), spread)
        machine = Machine(self.machine.name, {name: outcome.after for name, outcome in outcomes.items()})
        of_chosen = slopes[:, [self.names.index(name) for name in chosen]]
        condition = float(np.linalg.cond(of_chosen)) if chosen else 1.0
        before, after = (np.exp(self.residuals(x)) * self.measured for x in (self.start, at))
        return Calibration(machine, outcomes, self._measurements, self.measured, before, after, condition)

    def _fitted(self, name: str, at: float, spread: _Spread, where: str) -> Outcome:
        entry, index = self.machine.constants[name], self.names.index(name)
        interval = _interval(at, spread.deviation[name])
        value = min(max(float(np.exp(at)), entry.low), entry.high)
        source = f"to {len(self.measured)} step times on {where}"
        after = Constant(value, "fitted", source, min(interval[0], value), max(interval[1], value))
        is_at_bound = at in (self.low[index], self.high[index])
        return Outcome(entry, after, "fitted", interval, is_at_bound=is_at_bound)

    def _left(self, name: str, is_used: bool, spread: _Spread) -> Outcome:
        entry, alike = self.machine.constants[name], spread.alike.get(name, "")
        if not is_used:
            return Outcome(entry, entry, "unused", (entry.low, entry.high))
        interval = _interval(float(np.log(entry.value)), spread.deviation[name])
        return Outcome(entry, entry, "alike" if alike else "weak", interval, alike=alike)


def _interval(at: float, deviation: float) -> tuple[float, float]:
    width = DEVIATIONS * deviation
    return float(np.exp(at - width)), float(np.exp(at + width))


def _unmoved(entry: Constant) -> Outcome:
    verdict: Verdict = "measured" if entry.kind == "measured" else "fixed"
    return Outcome(entry, replace(entry), verdict, (entry.low, entry.high))
