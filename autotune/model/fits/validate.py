"""The model against published times: fit, errors, each time left out once, a null model, cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.model.bodies import movement
from autotune.model.clusters import a2
from autotune.model.constants import Machine, machine_named
from autotune.model.fits.fit import Fit, fit
from autotune.model.fits.published import HIDDEN, ROWS, TOPK, Published, predict
from autotune.model.topology import RANKS_PER_NODE

FITTED = (
    "fused_start_us",
    "sync_all_us",
    "remote_writes_in_flight",
    "rdma_gb_per_s",
    "post_aiv_us",
)
"""Constants whose values in ``constants.toml`` are this fit's."""

MOST_MEAN, MOST_WORST = 0.10, 0.25
"""Relative errors that the model must stay within."""

FEW_CORES, MANY_CORES, MOST_GAIN = 24, 48, 0.10
"""Published: from 24 to 48 vector cores A3's operators gain almost nothing."""


@dataclass(frozen=True)
class LeftOut:
    """A fit to all published times but one.

    Attributes:
        row: that was left out.
        us: what that fit says of it.
        values: of the constants.
    """

    row: Published
    us: float
    values: Mapping[str, float]

    @property
    def error(self) -> float:
        """The error of the prediction, relative to the published time."""
        return self.us / self.row.us - 1


@dataclass(frozen=True)
class Validation:
    """What the comparison says.

    Attributes:
        machines: by product, as they are in the data file.
        us: predictions of `ROWS` with them.
        null_us: those of the null model.
        refitted: the fit, again.
        left_out: one for each of `ROWS`.
        gains: by A3's rows, how much faster 48 cores are than 24.
    """

    machines: Mapping[str, Machine]
    us: np.ndarray
    null_us: np.ndarray
    refitted: Fit
    left_out: tuple[LeftOut, ...]
    gains: Mapping[Published, float]

    @property
    def errors(self) -> np.ndarray:
        """The errors of the predictions, relative to the published times."""
        errors: np.ndarray = self.us / _measured(ROWS) - 1
        return errors

    @property
    def null_errors(self) -> np.ndarray:
        """The same of the null model."""
        errors: np.ndarray = self.null_us / _measured(ROWS) - 1
        return errors

    @property
    def is_within_bounds(self) -> bool:
        """Whether its errors are as small as they have to be."""
        errors = np.abs(self.errors)
        return bool(errors.mean() <= MOST_MEAN and errors.max() <= MOST_WORST)

    @property
    def may_choose_core_splits(self) -> bool:
        """Whether it says of cores what is published."""
        return max(self.gains.values()) <= MOST_GAIN


def machines() -> dict[str, Machine]:
    """Those that times are published of, by product."""
    return {product: machine_named(product) for product in ("A2", "A3")}


def with_values(known: Mapping[str, Machine], values: Mapping[str, float]) -> dict[str, Machine]:
    """Machines with other values of the constants that they have."""
    return {
        product: machine.replaced(
            {name: value for name, value in values.items() if name in machine.constants}
        )
        for product, machine in known.items()
    }


def refit(rows: Sequence[Published] = ROWS) -> Fit:
    """Fits `FITTED` to published times, within the constants' ranges."""
    known = machines()
    constants = {name: known["A2"].constants[name] for name in FITTED}

    def times(values: Mapping[str, float]) -> np.ndarray:
        changed = with_values(known, values)
        return np.array([predict(row, changed[row.product]) for row in rows])

    return fit(times, _measured(rows), constants)


def validate() -> Validation:
    """All of the comparison."""
    known = machines()
    return Validation(
        known,
        np.array([predict(row, known[row.product]) for row in ROWS]),
        null_model(known),
        refit(),
        tuple(_without(row) for row in ROWS),
        {row: _gain(row, known["A3"]) for row in ROWS if row.product == "A3"},
    )


def bytes_between(row: Published) -> float:
    """Bytes that a rank sends to other ranks' experts, on average."""
    row_bytes = HIDDEN if row.operator == "dispatch" else 2 * HIDDEN
    away = 1 - 1 / row.ranks
    return row.tokens * TOPK * away * row_bytes


def null_model(known: Mapping[str, Machine]) -> np.ndarray:
    """A model that knows bytes, the published rate of the link, and one constant, which is fitted."""
    wires = np.array([_wire(row, known[row.product]) for row in ROWS])
    measured = _measured(ROWS)
    # the constant with the least mean error, among all that make one row exact
    candidates = measured - wires
    errors = [np.abs((wires + start) / measured - 1).mean() for start in candidates]
    return np.asarray(wires + candidates[int(np.argmin(errors))])


def _wire(row: Published, machine: Machine) -> float:
    if not row.crosses_servers:
        return movement.wire(machine, bytes_between(row))
    if not a2.FORMS[row.scheme].relays:
        return a2.rdma_us(bytes_between(row), machine)
    # once to each other server, and from there to the experts
    crossing = bytes_between(row) * (row.ranks // RANKS_PER_NODE["A2"] - 1) / TOPK
    return a2.rdma_us(crossing, machine) + movement.wire(machine, bytes_between(row))


def _without(row: Published) -> LeftOut:
    found = refit([other for other in ROWS if other is not row])
    changed = with_values(machines(), found.values)
    return LeftOut(row, predict(row, changed[row.product]), found.values)


def _gain(row: Published, machine: Machine) -> float:
    few, many = (predict(row, machine, cores) for cores in (FEW_CORES, MANY_CORES))
    return few / many - 1


def _measured(rows: Sequence[Published]) -> np.ndarray:
    return np.array([row.us for row in rows], float)
