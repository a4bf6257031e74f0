"""Published times of Ascend's own fused operators, and what the model says of them.

H = 7168 and topk = 8 throughout; dispatch sends int8 rows, combine bf16. The tables do not say how tokens
were
routed or how many experts there were: uniformly among 256 is taken here, as in the tests of these libraries.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autotune.model.clusters import a2, fused
from autotune.model.clusters.fused import Call
from autotune.model.clusters.routing import draw_ids
from autotune.model.constants import Machine
from autotune.model.topology import RANKS_PER_NODE

HIDDEN, TOPK, EXPERTS = 7168, 8, 256
DRAWS = 4
"""Routings over which the busiest rank's rows are averaged."""


Operator = Literal["dispatch", "combine"]
OPERATORS: tuple[Operator, ...] = ("dispatch", "combine")


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
        found = _between_servers(row, call, ids, machine)
    else:
        found = (fused.dispatch if row.operator == "dispatch" else fused.combine)(call, machine)
    if row.on_stream:
        found = {"launch": {"launch": machine.launch_stream_us}, **found}
    return found


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
