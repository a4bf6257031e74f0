"""`Cluster`: what dispatch and combine take on a group of ranks, EP 2 to 768, of sampled routing.

An operator takes as long as it does on its slowest rank, and each rank's waits end when the slowest sender's
data is there. Not every rank has to be walked for that. All have as many tokens, experts and peers; they
differ in how many rows they send and receive, to and from how far away, and a launch takes no less with more
or farther rows. So the slowest rank, and the slowest sender, are first in one of six numbers, or near it:
rows received, rows received from other ranks, rows sent to them, the hops of the rows sent and received, and
the rows of the busiest core where cores share senders instead of rows (in-band flags). `representatives`
names the first ranks of each, and one in the middle (docs/model.md).

Bytes come from what the launches of a plan send (`Cost.leaving`). A2's schemes, of which only fullmesh has
one, are computed for every rank, in closed form (`autotune.model.clusters.a2`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autotune.model.clusters.group import OPERATORS, Group, middle
from autotune.model.clusters.prices import Call
from autotune.model.constants import Machine
from autotune.model.kernel_costs.pulls import is_pulling
from autotune.model.kernel_costs.remembered import KernelCosts
from autotune.model.timelines.timeline import Timeline
from autotune.model.topology import hop_us, tiers
from autotune.model.traffic import Traffic

FIRST = 2
"""Ranks that stand for the others, for each number that ranks differ in."""


@dataclass(frozen=True)
class OperatorPoint:
    """One operator on a group.

    Attributes:
        us: on the slowest rank.
        slowest: that rank.
        parts: what its time is made of.
        egress_bytes, ingress_bytes: between one rank and the others, of the rank with most of them.
    """

    us: float
    slowest: int
    parts: dict[str, float]
    egress_bytes: int
    ingress_bytes: int


@dataclass(frozen=True)
class Point:
    """Dispatch and combine on a group.

    Attributes:
        group: the group.
        operators: by name.
        imbalance: rows that the most loaded rank receives, over the mean.
        walked: ranks that were computed.
    """

    group: Group
    operators: dict[str, OperatorPoint]
    imbalance: float
    walked: tuple[int, ...] = ()

    @property
    def us(self) -> float:
        """Microseconds that dispatch and combine take together."""
        return sum(operator.us for operator in self.operators.values())


@dataclass(frozen=True)
class Load:
    """What the ranks of a group send each other in a dispatch; combine returns it.

    Attributes:
        sent: (EP, EP) rows by sender and receiver.
        hops_us: (EP, EP) of a write between them.
        busiest: (EP,) received rows of the core with most of them, where cores share (localE, EP) entries.
    """

    sent: np.ndarray
    hops_us: np.ndarray = field(repr=False)
    busiest: np.ndarray = field(repr=False)

    @staticmethod
    def of(group: Group, ids: np.ndarray, machine: Machine) -> Load:
        """That of drawn experts."""
        ranks, experts = group.ranks, group.num_experts
        entries = ids * ranks + np.arange(ranks)[:, None, None]
        counts = np.bincount(entries.ravel(), minlength=experts * ranks).reshape(ranks, -1, ranks)
        hops = {tier: hop_us(machine, tier) for tier in set(tiers(group.product, ranks, 0))}
        rows = [[hops[tier] for tier in tiers(group.product, ranks, rank)] for rank in range(ranks)]
        return Load(counts.sum(axis=1).T, np.array(rows), _busiest(counts, int(machine.cores)))

    @cached_property
    def away(self) -> np.ndarray:
        """(EP, EP) rows between different ranks."""
        return self.sent * (1 - np.eye(len(self.sent), dtype=np.int64))

    @property
    def received(self) -> np.ndarray:
        """(EP,) rows that each rank receives in a dispatch."""
        rows: np.ndarray = self.sent.sum(axis=0)
        return rows

    @property
    def imbalance(self) -> float:
        """Rows that the most loaded rank receives, over the mean."""
        return float(self.received.max() / self.received.mean())

    def representatives(self, first: int = FIRST) -> tuple[int, ...]:
        """Ranks that stand for all: the first of each number that ranks differ in, and one in the middle.

        Args:
            first: how many for each.
        """
        numbers = (
            self.received,
            self.away.sum(axis=0),
            self.away.sum(axis=1),
            (self.away * self.hops_us).sum(axis=0),
            (self.away * self.hops_us).sum(axis=1),
            self.busiest,
        )
        ranks = {int(rank) for number in numbers for rank in np.argsort(-number, kind="stable")[:first]}
        ranks.add(middle(self.received))
        return tuple(sorted(ranks))

    def most(self, operator: str, row_bytes: float) -> tuple[int, int]:
        """Bytes of rows that leave a rank, and reach one: of the rank with most of each."""
        out, back = self.away.sum(axis=1).max(), self.away.sum(axis=0).max()
        leaving, entering = (out, back) if operator == "dispatch" else (back, out)
        return round(leaving * row_bytes), round(entering * row_bytes)


def _busiest(counts: np.ndarray, cores: int) -> np.ndarray:
    """(EP,) rows of the busiest core, of (EP, localE, EP) rows by receiver, its expert, and sender."""
    entries = counts.reshape(len(counts), -1)
    ends = np.pad(entries.cumsum(axis=1), ((0, 0), (1, 0)))
    bounds = entries.shape[1] * np.arange(cores + 1) // cores
    most: np.ndarray = np.diff(ends[:, bounds], axis=1).max(axis=1)
    return most


def price(
    group: Group,
    machine: Machine,
    kernel_costs: KernelCosts,
    ids: np.ndarray | None = None,
    ranks: Sequence[int] | None = None,
) -> Point:
    """What operators of a scheme with plans take.

    Args:
        group: the group.
        machine: that each rank is.
        kernel_costs: of kernels.
        ids: (EP, T, K) experts, if they are drawn already.
        ranks: that are walked; `Load.representatives` if not given.

    Raises:
        ArgumentError: sizes that the scheme does not take, or a routing that cannot be drawn.
    """
    ids = group.draw() if ids is None else ids
    load = Load.of(group, ids, machine)
    walked = load.representatives() if ranks is None else tuple(ranks)
    call = Call.of(group, kernel_costs, ids, *walked)
    operators: dict[str, OperatorPoint] = {}
    for operator in OPERATORS:
        lines = [priced.timeline for priced in call.priced(operator, machine)]
        slowest = max(lines, key=lambda line: line.total_us)
        leaving, entering = load.most(operator, _row_bytes(operator, lines, call.traffics))
        operators[operator] = OperatorPoint(slowest.total_us, slowest.rank, slowest.parts, leaving, entering)
    return Point(group, operators, load.imbalance, walked)


def _row_bytes(operator: str, lines: Sequence[Timeline], traffics: Sequence[Traffic]) -> float:
    """Bytes between ranks for each row, flags and counts included: what launches send, or read from peers."""
    total, rows = 0, 0
    for line, traffic in zip(lines, traffics, strict=True):
        is_other = np.array(traffic.tiers) != "self"
        counts = traffic.sent if operator == "dispatch" else traffic.received
        total += sum(span.cost.leaving for span in line.spans)
        if any(is_pulling(span.launch.kernel) for span in line.spans):
            counts = traffic.sent
        rows += int(counts[is_other].sum())
    return total / rows if rows else 0.0
