"""`Group`: ranks, what each of them brings to a call, and how it is dispatched. All prices are of one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from autotune.model.clusters.routing import GROUPS, TOP_GROUPS, draw_ids
from autotune.model.constants import Machine
from autotune.model.timelines.timeline import Mode
from autotune.model.topology import tiers, tiers_between
from autotune.model.traffic import Traffic, traffic_of
from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config, Product
from moe_triton.core.errors import ArgumentError
from moe_triton.core.group_sizes import RANKS_PER_SERVER, RanksPerServer
from moe_triton.core.plan import Plan
from moe_triton.core.row_formats import row_format_of
from moe_triton.core.topology import check_ranks_per_server
from moe_triton.core.tuning import POSTS, Posts, Tuning
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes import SCHEMES, class_at, make_scheme, scheme_type
from moe_triton.schemes.rank_context import RankContext
from moe_triton.schemes.rules import check_config
from moe_triton.schemes.scheme import Scheme
from moe_triton.tables import FOLDER, KernelSettings, machine_of

PLANNED: tuple[Product, ...] = ("A3",)
"""Products whose groups are priced by their plans; those of A2 have closed forms, hierarchy's among them."""
INSIDE: dict[Product, tuple[str, ...]] = {
    product: tuple(name for name, place in SCHEMES[product].items() if class_at(place).sums_alike)
    for product in PLANNED
}
"""Their schemes that take the same groups with the same bits, so that prices choose. Hierarchy goes between
machines, and A3's network has no constants.
"""
MOST_RANKS = 768
EXPERTS = 256
"""Experts of DeepSeek-V3: a group has as many by default, or the next multiple of its ranks."""
DTYPE = torch.bfloat16
IDS = torch.int32  # of the ids that callers give
TIMEOUT_US = 60_000_000  # of waits in plans; it makes no difference here

OperatorName = Literal["dispatch", "combine"]
OPERATORS: tuple[OperatorName, ...] = ("dispatch", "combine")

OPTIONS = {
    "num_ranks": "ranks",
    "num_max_tokens_per_rank": "tokens",
    "num_topk": "topk",
    "num_experts": "experts",
    "tuning.posts": "posts",
    "tuning.message_tokens": "message_tokens",
    "tuning.return_pieces": "return_pieces",
}
"""What commands call the sizes of a `Config`, and settings of a `Tuning`."""
BETWEEN_SERVERS = ("posts", "message_tokens", "return_pieces")
"""Settings of a group that are those of its ranks' `Tuning`."""


@dataclass(frozen=True)
class Routing:
    """How experts are drawn: see `autotune.model.clusters.routing.draw_ids`."""

    kind: str = "uniform"
    seed: int = 0
    groups: int = GROUPS
    top_groups: int = TOP_GROUPS
    exponent: float = 1.0


@dataclass(frozen=True)
class Group:
    """A group, what its ranks bring, and how it is dispatched.

    Attributes:
        ranks: EP.
        tokens: T, of each rank, in a call (BS).
        hidden: H, elements of a row.
        topk: K.
        experts: M; 0 for `EXPERTS`, or the next multiple of the ranks.
        quantize: how dispatched rows travel, as `EPBuffer.dispatch` takes it; combine's are 16 bits.
        comm_alg: the scheme.
        product: whose scheme it is.
        mode: how launches come to the device.
        parts: that operators are cut into, where they can be; as buffers do by themselves if None.
        communication_blocks: blocks that communicate while the others compute; if None, none of them, or half
            of them where parts are asked for.
        routing: how experts are drawn.
        ranks_per_server: see `Config`.
        posts: who posts to other servers, where a scheme has a choice: see `Tuning`. An AICPU that posts has
            a price too, though no buffer on an NPU has it yet.
        message_tokens, return_pieces: of a hierarchy that cores post for: see `Tuning`.

    Raises:
        ArgumentError: what no group has, whatever its scheme.
    """

    ranks: int = 16
    tokens: int = 128
    hidden: int = 7168
    topk: int = 8
    experts: int = 0
    quantize: str | None = "int8"
    comm_alg: str = "fullmesh_v1"
    product: Product = "A3"
    mode: Mode = "graph"
    parts: int | None = None
    communication_blocks: int | None = None
    routing: Routing = field(default_factory=Routing)
    ranks_per_server: RanksPerServer = None
    posts: Posts | None = None
    message_tokens: int | None = None
    return_pieces: int | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MOST_RANKS:
            rule = f"a group has 2 to {MOST_RANKS} ranks"
            raise ArgumentError("ranks", self.ranks, rule, "Pass a size in between.")
        if self.tokens < 1:
            raise ArgumentError("tokens", self.tokens, "it must be at least 1", "Pass 1 or more.")
        if self.experts < 0 or self.experts % self.ranks:
            rule = f"experts are shared evenly by {self.ranks} ranks"
            raise ArgumentError("experts", self.experts, rule, "Pass a multiple of the ranks, or 0.")
        if self.mode not in ("graph", "stream"):
            rule = "launches come from a captured graph or from the host's stream"
            raise ArgumentError("mode", repr(self.mode), rule, "Pass 'graph' or 'stream'.")
        if self.parts is not None and not 1 <= self.parts <= self.tokens:
            rule = f"it must be 1 to the {self.tokens} tokens"
            raise ArgumentError("parts", self.parts, rule, "Name a number of parts.")
        object.__setattr__(self, RANKS_PER_SERVER, check_ranks_per_server(self.ranks_per_server))

    @property
    def num_experts(self) -> int:
        """M."""
        return self.experts or -(-EXPERTS // self.ranks) * self.ranks

    @property
    def document(self) -> dict[str, Any]:
        """The group as JSON's types."""
        return {**asdict(self), "experts": self.num_experts}

    @cached_property
    def config(self) -> Config:
        """The configuration of a buffer of this group.

        Raises:
            ArgumentError: it is none that the scheme takes, or the product has no plans.
        """
        sizes = self.ranks, self.tokens, self.hidden, self.topk, self.num_experts
        config = Config(
            *sizes,
            product=self.product,
            scheme=self.comm_alg,
            relaxed=True,
            ranks_per_server=self.ranks_per_server,
        )
        try:
            check_config(config)
            offered = scheme_type(config).settings
            self._between_servers.check_poster(config.scheme, offered, POSTS)
            self._between_servers.check_messages(config.scheme, offered, config.topology.num_servers)
        except ArgumentError as error:
            raise error.renamed(OPTIONS) from None
        return config

    @property
    def _between_servers(self) -> Tuning:
        return Tuning(posts=self.posts, message_tokens=self.message_tokens, return_pieces=self.return_pieces)

    def draw(self) -> np.ndarray:
        """(EP, T, K) int32 experts; see `draw_ids`."""
        r, sizes = self.routing, (self.ranks, self.tokens, self.topk, self.num_experts)
        nodes = {"groups": r.groups, "top_groups": r.top_groups}
        return draw_ids(r.kind, *sizes, r.seed, **nodes, exponent=r.exponent)

    def received(self, ids: np.ndarray) -> np.ndarray:
        """(EP,) rows that each rank receives in a dispatch."""
        return np.bincount(ids.ravel() // (self.num_experts // self.ranks), minlength=self.ranks)

    def traffic(self, ids: np.ndarray, rank: int) -> Traffic:
        """What a rank sends and receives, of drawn experts."""
        servers = self.config.topology
        if servers.num_servers == 1:
            return traffic_of(self.config, rank, ids, tiers(self.product, self.ranks, rank))
        return traffic_of(self.config, rank, ids, tiers_between(servers.servers, rank))

    def scheme(self, machine: Machine, rank: int = 0) -> Scheme:
        """How tokens travel from a rank, on as many cores as the machine has."""
        blocks, communicating = int(machine.cores), self.communication_blocks or 0
        if not 0 <= communicating < blocks:
            rule = f"of {blocks} cores 0 to {blocks - 1} may only communicate"
            raise ArgumentError("communication_blocks", communicating, rule, "Pass fewer.")
        tuning = Tuning(communication_blocks=communicating)
        if self.parts is not None:
            each = -(-self.tokens // self.parts)
            half = blocks // 2 if self.parts > 1 and self.communication_blocks is None else 0
            tuning = Tuning(each, each, half or communicating)
        between = {name: getattr(self._between_servers, name) for name in BETWEEN_SERVERS}
        tuning = replace(tuning, **between, tables=FOLDER)  # a user's own are no part of the model
        tuning.check(blocks)
        return make_scheme(
            RankContext(self.config, rank, blocks, TIMEOUT_US, CAPABILITIES["npu"], tuning=tuning)
        )

    def variants(self) -> dict[OperatorName, Variant]:
        """Dispatch of bfloat16 tokens without routing weights, and combine of their weighted results.

        Where a scheme has a place for results in its window, experts leave them there.
        """
        scheme = make_scheme(RankContext(self.config, 0, 1, TIMEOUT_US, CAPABILITIES["npu"]))
        in_place = scheme.place("results", DTYPE.itemsize) is not None
        dispatch = DispatchVariant(DTYPE, row_format_of(self.quantize), given_ids=IDS)
        return {"dispatch": dispatch, "combine": CombineVariant(DTYPE, weights=True, in_place=in_place)}

    def may_be_captured(self, machine: Machine) -> bool:
        """Whether a graph may hold the scheme's operators."""
        return not self.scheme(machine).rounds.no_graph

    def plans(self, machine: Machine, rank: int = 0) -> dict[OperatorName, Plan]:
        """A rank's plans.

        Raises:
            ArgumentError: the scheme's operators cannot be in a graph, or it is for several servers.
        """
        scheme = self.scheme(machine, rank)
        if scheme.between_servers and self.config.topology.num_servers == 1:
            rule = "a group inside one server has its product's first scheme instead"
            raise ArgumentError("comm_alg", repr(self.comm_alg), rule, "Name the ranks of each server.")
        if self.mode == "graph" and scheme.rounds.no_graph:
            rule = scheme.rounds.no_graph.removesuffix(".")
            raise ArgumentError("mode", repr(self.mode), rule, "Or take mode 'stream'.")
        parts, tables = scheme.context.parts, scheme.context.tuning.tables
        settings = KernelSettings(machine_of("npu", self.config.product), self.config, tables)
        return {
            operator: settings.tuned(scheme.whole(variant, 0, parts(operator, self.tokens)))
            for operator, variant in self.variants().items()
        }


def middle(numbers: np.ndarray) -> int:
    """The place of the median: the typical rank, by what each one receives."""
    return int(np.argsort(numbers, kind="stable")[len(numbers) // 2])
