"""`Cluster`: what dispatch and combine take on a group of ranks, EP 2 to 768, of sampled routing.

An operator takes as long as it does on its slowest rank, and each rank's waits end when the slowest sender's
data is there. Not every rank has to be walked for that. All have as many tokens, experts and peers; they
differ in how many rows they send and receive, to and from how far away, and a launch takes no less with more
or farther rows. So the slowest rank, and the slowest sender, are first in one of six numbers, or near it:
rows received, rows received from other ranks, rows sent to them, the hops of the rows sent and received, and
the rows of the busiest core where cores share senders instead of rows (in-band flags). `representatives`
names the first ranks of each, and one in the middle (docs/model.md).

Bytes come from what the launches of a plan send (`Cost.sent`). A2's schemes have no plans yet; every rank of
theirs is computed, in closed form (`moe_triton.model.cluster_a2`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from moe_triton.core.config import Config, Product
from moe_triton.core.errors import ArgumentError
from moe_triton.core.plan import Plan
from moe_triton.core.row_formats import row_format_of
from moe_triton.model.constants import Machine
from moe_triton.model.prices import DTYPE, Sizes
from moe_triton.model.pulls import is_pulling, with_pulls
from moe_triton.model.remembered import Bodies
from moe_triton.model.routing import GROUPS, TOP_GROUPS, draw_ids
from moe_triton.model.timeline import Mode, Timeline, walk_some
from moe_triton.model.topology import hop_us, tiers
from moe_triton.model.traffic import Traffic, traffic_of
from moe_triton.operators.variants import CombineVariant

MOST_RANKS = 768
EXPERTS = 256
"""Of DeepSeek-V3: as many, or the next multiple of a group's ranks."""
FIRST = 2
"""Ranks that stand for the others, for each number that ranks differ in."""

OperatorName = Literal["dispatch", "combine"]
OPERATORS: tuple[OperatorName, ...] = ("dispatch", "combine")

_NAMES = {
    "num_ranks": "ep",
    "num_max_tokens_per_rank": "tokens",
    "num_topk": "topk",
    "num_experts": "experts",
}


@dataclass(frozen=True)
class Setting:
    """One group and its routing.

    Attributes:
        scheme: ``comm_alg``.
        ranks: EP.
        tokens: T, of each rank.
        product: "A3", or "A2" for its closed forms.
        routing: as `draw_ids` takes it, with seed, groups, top_groups and exponent.
        quantize: how dispatched rows travel; combine's are 16 bits.
        hidden: H.
        topk: K.
        experts: M; 0 for `EXPERTS`, or the next multiple of the ranks.
        mode: how launches come to the device.
    """

    scheme: str
    ranks: int
    tokens: int
    product: Product = "A3"
    routing: str = "uniform"
    quantize: str | None = "int8"
    hidden: int = 7168
    topk: int = 8
    experts: int = 0
    mode: Mode = "graph"
    seed: int = 0
    groups: int = GROUPS
    top_groups: int = TOP_GROUPS
    exponent: float = 1.0

    def __post_init__(self) -> None:
        """Checks the group.

        Raises:
            ArgumentError: too few or too many ranks, or experts that they do not share evenly.
        """
        if not 2 <= self.ranks <= MOST_RANKS:
            rule = f"a group has 2 to {MOST_RANKS} ranks"
            raise ArgumentError("ep", self.ranks, rule, "Pass a size in between.")
        if self.tokens < 1:
            raise ArgumentError("tokens", self.tokens, "it must be at least 1", "Pass 1 or more.")
        if self.experts < 0 or self.experts % self.ranks:
            rule = f"experts are shared evenly by {self.ranks} ranks"
            raise ArgumentError("experts", self.experts, rule, "Pass a multiple of the ranks, or 0.")
        if self.mode not in ("graph", "stream"):
            rule = "launches come from a captured graph or from the host's stream"
            raise ArgumentError("mode", repr(self.mode), rule, "Pass 'graph' or 'stream'.")

    @property
    def num_experts(self) -> int:
        """M."""
        return self.experts or -(-EXPERTS // self.ranks) * self.ranks

    @property
    def sizes(self) -> Sizes:
        """As one rank's plans are priced from them; operators are in one part."""
        return Sizes(
            self.ranks,
            self.tokens,
            self.hidden,
            self.topk,
            self.num_experts,
            self.quantize,
            self.scheme,
            routing=self.routing,
            seed=self.seed,
        )

    @cached_property
    def config(self) -> Config:
        """Of a buffer of this group, whose scheme has plans.

        Raises:
            ArgumentError: its sizes are none that the scheme takes.
        """
        try:
            config = self.sizes.config
        except ArgumentError as error:
            raise error.renamed(_NAMES) from None
        row_format_of(self.quantize, self.hidden)
        return config

    def draw(self) -> np.ndarray:
        """(EP, T, K) int32 experts; see `draw_ids`."""
        return draw_ids(
            self.routing,
            self.ranks,
            self.tokens,
            self.topk,
            self.num_experts,
            self.seed,
            groups=self.groups,
            top_groups=self.top_groups,
            exponent=self.exponent,
        )


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
        setting: the group.
        operators: by name.
        imbalance: rows that the most loaded rank receives, over the mean.
        walked: ranks that were computed.
    """

    setting: Setting
    operators: dict[str, OperatorPoint]
    imbalance: float
    walked: tuple[int, ...] = ()

    @property
    def us(self) -> float:
        """Of both operators."""
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
    def of(setting: Setting, ids: np.ndarray, machine: Machine) -> Load:
        """That of drawn experts."""
        ranks, experts = setting.ranks, setting.num_experts
        entries = ids * ranks + np.arange(ranks)[:, None, None]
        counts = np.bincount(entries.ravel(), minlength=experts * ranks).reshape(ranks, -1, ranks)
        hops = {tier: hop_us(machine, tier) for tier in set(tiers(setting.product, ranks, 0))}
        rows = [[hops[tier] for tier in tiers(setting.product, ranks, rank)] for rank in range(ranks)]
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
        found = {int(rank) for number in numbers for rank in np.argsort(-number, kind="stable")[:first]}
        found.add(int(np.argsort(self.received, kind="stable")[len(self.received) // 2]))
        return tuple(sorted(found))

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
    setting: Setting,
    machine: Machine,
    bodies: Bodies,
    ids: np.ndarray | None = None,
    ranks: Sequence[int] | None = None,
) -> Point:
    """What an operator of a scheme with plans takes.

    Args:
        setting: the group.
        machine: that each rank is.
        bodies: of kernels.
        ids: (EP, T, K) experts, if they are drawn already.
        ranks: that are walked; `Load.representatives` if not given.

    Raises:
        ArgumentError: sizes that the scheme does not take, or a routing that cannot be drawn.
    """
    config = setting.config
    ids = setting.draw() if ids is None else ids
    load = Load.of(setting, ids, machine)
    walked = load.representatives() if ranks is None else tuple(ranks)
    traffics = [traffic_of(config, rank, ids, tiers(setting.product, setting.ranks, rank)) for rank in walked]
    operators: dict[str, OperatorPoint] = {}
    for operator, plan in plans(setting, machine).items():
        lines = walk_some(plan, traffics, machine, mode=setting.mode, bodies=with_pulls(bodies))
        slowest = max(lines, key=lambda line: line.total_us)
        leaving, entering = load.most(operator, _row_bytes(operator, lines, traffics))
        operators[operator] = OperatorPoint(slowest.total_us, slowest.rank, slowest.parts, leaving, entering)
    return Point(setting, operators, load.imbalance, walked)


def may_be_captured(setting: Setting, machine: Machine) -> bool:
    """Whether a graph may hold the scheme's operators."""
    return not setting.sizes.scheme(machine, 0).rounds.no_graph


def plans(setting: Setting, machine: Machine) -> dict[OperatorName, Plan]:
    """The plans of both operators, on as many cores as the machine has.

    Raises:
        ArgumentError: the scheme's operators cannot be in a graph.
    """
    scheme = setting.sizes.scheme(machine, 0)
    if setting.mode == "graph" and scheme.rounds.no_graph:
        rule = scheme.rounds.no_graph.removesuffix(".")
        raise ArgumentError("mode", repr(setting.mode), rule, "Or take mode 'stream'.")
    dispatch, combine = setting.sizes.variants()
    assert isinstance(combine, CombineVariant)
    # Where a scheme has a place for results in its window, experts leave them there.
    combine = replace(combine, in_place=scheme.place("results", DTYPE.itemsize) is not None)
    return {"dispatch": scheme.whole(dispatch, 0), "combine": scheme.whole(combine, 0)}


def _row_bytes(operator: str, lines: Sequence[Timeline], traffics: Sequence[Traffic]) -> float:
    """Bytes between ranks for each row, flags and counts included: what launches send, or read from peers."""
    total, rows = 0, 0
    for line, traffic in zip(lines, traffics, strict=True):
        is_other = np.array(traffic.tiers) != "self"
        counts = traffic.sent if operator == "dispatch" else traffic.received
        total += sum(span.cost.sent for span in line.spans)
        if any(is_pulling(span.launch.kernel) for span in line.spans):
            counts = traffic.sent
        rows += int(counts[is_other].sum())
    return total / rows if rows else 0.0
