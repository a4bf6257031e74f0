"""The model against published times of Ascend's own fused operators: fit, errors, each time left out once, a
null model, cores.

H = 7168 and topk = 8 throughout; dispatch sends int8 rows, combine bf16. The tables do not say how tokens
were routed or how many experts there were: uniformly among 256 is taken here, as in the tests of these
libraries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autotune.model.clusters import a2, fused
from autotune.model.clusters.fused import Call
from autotune.model.clusters.routing import draw_ids
from autotune.model.constants import Machine, machine_named
from autotune.model.fits.fit import Fit, fit
from autotune.model.kernel_costs import movement
from autotune.model.topology import RANKS_PER_NODE

HIDDEN, TOPK, EXPERTS = 7168, 8, 256
DRAWS = 4
"""Routings over which the busiest rank's rows are averaged."""


Operator = Literal["dispatch", "combine"]
OPERATORS: tuple[Operator, ...] = ("dispatch", "combine")
FITTED = ("fused_start_us", "sync_all_us", "remote_writes_in_flight", "post_aiv_us")
"""Constants whose values in ``constants.toml`` are this fit's."""

MOST_MEAN, MOST_WORST = 0.08, 0.20
"""Relative errors that the model must stay within, also of times that a fit has not seen."""

FEW_CORES, MANY_CORES, MOST_GAIN = 24, 48, 0.10
"""Published: from 24 to 48 vector cores A3's operators gain almost nothing."""
_CANN = "CANN on CloudMatrix384"
_SGL = "sgl-kernel-npu, A3"
_PAIRS = (
    (_CANN, "A3", 8, 128, 116, 118, "fullmesh", False),
    (_CANN, "A3", 256, 128, 152, 149, "fullmesh", False),
    (_SGL, "A3", 8, 128, 132, 126, "fullmesh", True),
    (_SGL, "A3", 16, 128, 139, 135, "fullmesh", True),
    (_SGL, "A3", 32, 128, 153, 151, "fullmesh", True),
    ("A2, one server", "A2", 8, 256, 307, 442, "fullmesh", True),
    ("A2, two servers, fullmesh", "A2", 16, 256, 865, 1305, "fullmesh", True),
    ("A2, two servers, hierarchy", "A2", 16, 256, 748, 948, "hierarchy-aiv", True),
)


@dataclass(frozen=True)
class Published:
    """One published time.

    Attributes:
        system: whose.
        operator: "dispatch" or "combine".
        product: of the devices.
        ranks: EP.
        tokens: of each rank.
        us: microseconds.
        scheme: "fullmesh", or "hierarchy-aiv", the hierarchy whose posts come from the vector cores.
        on_stream: whether the time of a launch by the host is in it: taken around the call, not in a graph.
    """

    system: str
    operator: Operator
    product: str
    ranks: int
    tokens: int
    us: float
    scheme: str = "fullmesh"
    on_stream: bool = True

    @property
    def crosses_servers(self) -> bool:
        """Whether its ranks are cards of several servers, between which there is a network."""
        return self.product == "A2" and self.ranks > RANKS_PER_NODE["A2"]

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.system}, EP {self.ranks}, BS {self.tokens}, {self.operator}"


ROWS: tuple[Published, ...] = tuple(
    Published(system, operator, product, ranks, tokens, us, scheme, on_stream)
    for system, product, ranks, tokens, dispatch, combine, scheme, on_stream in _PAIRS
    for operator, us in zip(OPERATORS, (dispatch, combine), strict=True)
)
"""CANN's are secondary: taken from notes about the paper, not from its table."""


def phases(row: Published, machine: Machine, cores: int = 0) -> fused.Phases:
    """What the model says of one of them.

    Args:
        row: the published time.
        machine: of its product.
        cores: that take part; the machine's if 0.
    """
    ids = _routing(row.ranks, row.tokens, 0)
    call = Call(
        row.product, row.ranks, row.tokens, TOPK, EXPERTS, HIDDEN, _most_rows(row.ranks, row.tokens), cores
    )
    if row.crosses_servers:
        us_by_phase = _between_servers(row, call, ids, machine)
    else:
        us_by_phase = (fused.dispatch if row.operator == "dispatch" else fused.combine)(call, machine)
    if row.on_stream:
        us_by_phase = {"launch": {"launch": machine.launch_stream_us}, **us_by_phase}
    return us_by_phase


def predict(row: Published, machine: Machine, cores: int = 0) -> float:
    """Microseconds, by `phases`."""
    return fused.total(phases(row, machine, cores))


def _between_servers(row: Published, call: Call, ids: np.ndarray, machine: Machine) -> fused.Phases:
    """A2's schemes across servers, by their closed forms, on the slowest rank."""
    flows = a2.flows_of(ids, EXPERTS, RANKS_PER_NODE["A2"])
    return max((a2.phases(row.scheme, row.operator, call, flow, machine) for flow in flows), key=fused.total)


@functools.cache
def _routing(ranks: int, tokens: int, seed: int) -> np.ndarray:
    return draw_ids("uniform", ranks, tokens, TOPK, EXPERTS, seed)


@functools.cache
def _most_rows(ranks: int, tokens: int) -> float:
    """Rows that the busiest rank receives, on average over some routings."""
    most = [
        np.bincount(_routing(ranks, tokens, seed).ravel() // (EXPERTS // ranks)).max()
        for seed in range(DRAWS)
    ]
    return float(np.mean(most))


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
    return fit_to(_measured(rows), lambda tried: [predict(row, tried[row.product]) for row in rows])


def fit_to(measured: np.ndarray, predicted: Callable[[Mapping[str, Machine]], Sequence[float]]) -> Fit:
    """Fits `FITTED` to some times, within the constants' ranges.

    Args:
        measured: (N,) us.
        predicted: the model's, on machines by product.
    """
    known = machines()
    constants = {name: known["A2"].constants[name] for name in FITTED}
    return fit(lambda values: np.array(predicted(with_values(known, values))), measured, constants)


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
        return movement.rdma_us(machine, bytes_between(row), row.ranks - 1)
    # once to each other server, and from there to the experts
    crossing = bytes_between(row) * (row.ranks // RANKS_PER_NODE["A2"] - 1) / TOPK
    return movement.rdma_us(machine, crossing) + movement.wire(machine, bytes_between(row))


def _without(row: Published) -> LeftOut:
    refitted = refit([other for other in ROWS if other is not row])
    changed = with_values(machines(), refitted.values)
    return LeftOut(row, predict(row, changed[row.product]), refitted.values)


def _gain(row: Published, machine: Machine) -> float:
    few, many = (predict(row, machine, cores) for cores in (FEW_CORES, MANY_CORES))
    return few / many - 1


def _measured(rows: Sequence[Published]) -> np.ndarray:
    return np.array([row.us for row in rows], float)
