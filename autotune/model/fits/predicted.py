"""Published figures that no constant is fitted to: what the model says of them, and what a fit to them as
well would make of it and of the others.

Why they are left out: XCCL is another implementation, which reads rows from their senders, and its times are
read off a figure; normal mode is another operator, of which the model knows what the link takes and no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.model.constants import Machine
from autotune.model.fits import validate
from autotune.model.fits.validate import HIDDEN, OPERATORS, ROWS, TOPK, Operator, Published
from autotune.model.kernel_costs import movement
from autotune.model.topology import RANKS_PER_NODE, tiers

XCCL: tuple[Published, ...] = tuple(
    Published("XCCL, A3", operator, "A3", 128, tokens, us, on_stream=False)
    for tokens, *pair in ((4, 20, 25), (128, 100, 120))
    for operator, us in zip(OPERATORS, pair, strict=True)
)
"""Of xDeepServe; secondary, and read off a figure."""

TOKENS = 4096
"""Of each rank, in normal mode."""
_README, _TUNED, _ONE, _TWO = (
    "normal, A3",
    "normal, A3, tuned",
    "normal, A2, one server",
    "normal, A2, two servers",
)
_GB_PER_S = (
    (_README, "A3", 8, 146, 125, 1),
    (_README, "A3", 16, 107, 103, 1),
    (_README, "A3", 32, 102, 95, 1),
    (_README, "A3", 64, 81, 91, 1),
    (_README, "A3", 128, 57, 81, 1),
    (_TUNED, "A3", 16, 133, 101, 2),
    (_ONE, "A2", 8, 69.7, 80.0, 2),
    (_TWO, "A2", 16, 35.9, 52.9, 2),
)


@dataclass(frozen=True)
class Rate:
    """What sgl-kernel-npu publishes of its normal kernels: bytes of all rows, the own ones too, over a time.

    Attributes:
        system: whose.
        operator: "dispatch" or "combine".
        product: of the devices.
        ranks: EP.
        gb_per_s: the rate.
        row_bytes: of a row.
    """

    system: str
    operator: Operator
    product: str
    ranks: int
    gb_per_s: float
    row_bytes: int

    @property
    def us(self) -> float:
        """Microseconds that it says."""
        return TOKENS * TOPK * self.row_bytes / self.gb_per_s / 1e3

    @property
    def rows(self) -> str:
        """How they travel."""
        return "int8" if self.row_bytes == HIDDEN else "bf16"


RATES: tuple[Rate, ...] = tuple(
    Rate(system, operator, product, ranks, gb_per_s, HIDDEN * size)
    for system, product, ranks, dispatch, combine, dispatch_size in _GB_PER_S
    for operator, gb_per_s, size in zip(OPERATORS, (dispatch, combine), (dispatch_size, 2), strict=True)
)


def link_us(rate: Rate, machine: Machine) -> float:
    """What the links take, by the model: wires and hops, and nothing that cores do.

    Between two servers a token goes once to the other one, and from there to its experts; both in series.
    """
    cards = RANKS_PER_NODE["A2"]
    crosses = rate.product == "A2" and rate.ranks > cards
    ranks = cards if crosses else rate.ranks
    rows, reach = np.full(ranks, TOKENS * TOPK / ranks), tiers(rate.product, ranks, 0)
    inside = movement.written_remotely(machine, rows, rate.row_bytes, reach, int(machine.cores), 0.0)
    us = sum(inside.values())
    if crosses:
        us += movement.rdma_us(machine, float(TOKENS * rate.row_bytes), 0)
    return us


@dataclass(frozen=True)
class Refitted:
    """A fit to `ROWS` and to other figures as well.

    Attributes:
        values: of the constants.
        us: what it says of the other figures.
        errors: of `ROWS`.
    """

    values: Mapping[str, float]
    us: np.ndarray
    errors: np.ndarray


@dataclass(frozen=True)
class Predictions:
    """All that is predicted.

    Attributes:
        us, link_us: of `XCCL` and of `RATES`, by the constants in the data file.
        with_xccl, with_rates: what a fit to one or the other as well would say.
    """

    us: np.ndarray
    link_us: np.ndarray
    with_xccl: Refitted
    with_rates: Refitted


def predictions() -> Predictions:
    """What the model says of `XCCL` and `RATES`, before and after a fit to them."""
    known = validate.machines()
    us, links = (np.array([_us(each, known[each.product]) for each in rows]) for rows in (XCCL, RATES))
    return Predictions(us, links, _refitted(XCCL), _refitted(RATES))


def _refitted(others: Sequence[Published] | Sequence[Rate]) -> Refitted:
    measured = np.array([each.us for each in (*ROWS, *others)])

    def predicted(tried: Mapping[str, Machine]) -> list[float]:
        return [_us(each, tried[each.product]) for each in (*ROWS, *others)]

    found = validate.fit_to(measured, predicted)
    us = np.array(predicted(validate.with_values(validate.machines(), found.values)))
    return Refitted(found.values, us[len(ROWS) :], (us / measured - 1)[: len(ROWS)])


def _us(each: Published | Rate, machine: Machine) -> float:
    return link_us(each, machine) if isinstance(each, Rate) else validate.predict(each, machine)
