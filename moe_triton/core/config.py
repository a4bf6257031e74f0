"""The settings of a communicator: sizes and ranks, the same on every rank of the group."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

from moe_triton.core.checks import check_flag, check_integer, check_text, integers_of, shown
from moe_triton.core.errors import ArgumentError
from moe_triton.core.group_sizes import MAX_RANKS, RanksPerServer
from moe_triton.core.records import UB_ALIGN
from moe_triton.core.topology import Topology, check_ranks_per_server

Product = Literal["A2", "A3"]
Generation = Literal["v3", "v4"]
# Ranks of a server, where nobody says, 0 for all of a group: an A2 has 8. On A3 a super node's ranks reach
# each other's memory, and what crosses super nodes goes by machines, which have 16 dies.
_RANKS_PER_SERVER: dict[str, int] = {"A2": 8, "A3": 0}
_RANKS_PER_MACHINE: dict[tuple[str, str], int] = {("A3", "hierarchy"): 16}

ROW_STEP = UB_ALIGN
"""Rows of kernels have whole units of so many elements: int8 ones move in units of as many bytes."""

_END = 1 << 63


def usual_ranks_per_server(product: str, scheme: str = "") -> int:
    """How many ranks a server has where nobody says; 0 for all of a group.

    Args:
        product: whose.
        scheme: how tokens travel, "" for the product's own.
    """
    return _RANKS_PER_MACHINE.get((product, scheme), _RANKS_PER_SERVER.get(product, 0))


def check_experts_per_rank(value: object) -> tuple[int, ...] | None:
    """Checks what says how many routed experts each rank has, and returns it with Python's own numbers.

    Raises:
        ArgumentError: it is neither a sequence, an array or a tensor of integers, nor None; or one is
            negative.
    """
    name = "experts_per_rank"
    if value is None:
        return None
    remedy = "Pass a list of how many routed experts each rank has, as [3, 0, 2]; None for as many on each."
    numbers = integers_of(name, value, MAX_RANKS, remedy)
    if min(numbers, default=0) < 0 or max(numbers, default=0) >= _END:
        raise ArgumentError(name, shown(list(numbers)), "it counts experts", remedy)
    return numbers


@dataclass(frozen=True)
class Config:
    """Settings that every rank of a group shares; a rank's own number is not part of it.

    Attributes:
        num_ranks: ranks in the expert-parallel group (EP).
        num_max_tokens_per_rank: most tokens a rank passes to one dispatch (maxBs).
        hidden: elements of a token's row (H).
        num_topk: routed experts per token (K).
        num_experts: routed experts in the whole group (M).
        num_shared_experts: shared experts that every token goes to as well (S).
        num_shared_ranks: ranks that hold shared experts and nothing else, [0, R).
        product: whose limits apply.
        scheme: how tokens travel (``comm_alg``).
        relaxed: allow sizes below the product's minimum, for tests and demos.
        version: of the operators: 1 for ``dispatch`` and ``combine``, 2 for ``..._v2``. It decides how tokens
            reach shared experts and how combine finds its results (docs/operators.md, "Where experts live"
            and "Meaning of the outputs").
        num_special_experts: zero, copy and constant experts, whose ids follow the routed ones. No rank
            holds them.
        generation: of the published limits: "v3", "v4", or None for what either of them accepts, rule by
            rule. It changes what is refused, never what is computed.
        ranks_per_server: how many ranks each server has: one number for all, of which the last may have
            fewer, or one number for each, in the order of the ranks; None for what the product's have: 8 on
            A2, on A3 all ranks, or 16 with hierarchy.
        servers_are_hosts: whether they are what the group really runs on, in whatever sizes; products' own
            servers are not asked for then.
        experts_per_rank: how many routed experts each rank has, in the order of the ranks, 0 for those of
            shared experts; None where all ranks of routed experts have as many.
        is_of_buffer: whether it is an `EPBuffer`'s, which takes sizes that torch_npu's functions do not
            (docs/limits.md). It changes what is refused, never what is computed.

    Examples:
        >>> config = Config(8, 64, 7168, 8, 32)
        >>> config.num_local_experts
        4
    """

    num_ranks: int
    num_max_tokens_per_rank: int
    hidden: int
    num_topk: int
    num_experts: int
    num_shared_experts: int = 0
    num_shared_ranks: int = 0
    product: Product = "A3"
    scheme: str = "fullmesh_v1"
    relaxed: bool = False
    version: int = 2
    num_special_experts: int = 0
    generation: Generation | None = None
    ranks_per_server: RanksPerServer = None
    servers_are_hosts: bool = False
    experts_per_rank: Sequence[int] | None = None
    is_of_buffer: bool = False

    def __post_init__(self) -> None:
        """Makes every integer and flag Python's.

        Raises:
            ArgumentError: a size is no integer, or another field of a wrong type.
        """
        for name in _INTEGERS:
            value = check_integer(name, getattr(self, name))
            if not -_END <= value < _END:
                raise ArgumentError(name, value, "it must fit 64 bits", "Pass a size that exists.")
            object.__setattr__(self, name, value)
        for name in ("relaxed", "servers_are_hosts", "is_of_buffer"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        check_text("product", self.product)
        check_text("comm_alg", self.scheme)
        if self.generation is not None:
            check_text("generation", self.generation)
        object.__setattr__(self, "ranks_per_server", check_ranks_per_server(self.ranks_per_server))
        object.__setattr__(self, "experts_per_rank", check_experts_per_rank(self.experts_per_rank))

    def normalized(self) -> Config:
        """The same, with torch_npu's default (S, R) = (1, 0), which means no shared experts, made (0, 0).

        And with None for `experts_per_rank` that says what None would.
        """
        config = self
        if (self.num_shared_experts, self.num_shared_ranks) == (1, 0):
            config = replace(self, num_shared_experts=0)
        if self.experts_per_rank is not None and self._is_even:
            config = replace(config, experts_per_rank=None)
        return config

    @property
    def _is_even(self) -> bool:
        if not 0 <= self.num_shared_ranks < self.num_ranks <= MAX_RANKS:
            return False
        each, rest = divmod(self.num_experts, self.num_moe_ranks)
        even = (0,) * self.num_shared_ranks + (each,) * self.num_moe_ranks
        return rest == 0 and self.experts_per_rank == even

    @cached_property
    def padded(self) -> Config:
        """The same as windows and kernels have it. Itself where nothing is to be padded.

        Rows have whole units, and all ranks of routed experts as many as the one with most: to kernels expert
        e of rank r is number ``(r - R) * localE`` and on, whatever its number in the group.

        Examples:
            >>> config = Config(3, 64, 1000, 8, 8, experts_per_rank=(5, 0, 3)).padded
            >>> config.hidden, config.num_experts
            (1024, 15)
        """
        hidden = -(-self.hidden // ROW_STEP) * ROW_STEP
        if hidden == self.hidden and self.experts_per_rank is None:
            return self
        num_experts = self.num_local_experts * self.num_moe_ranks
        return replace(self, hidden=hidden, num_experts=num_experts, experts_per_rank=None)

    @cached_property
    def topology(self) -> Topology:
        """Which ranks share a server, of sizes that keep every rule."""
        return Topology.of(self.num_ranks, self.ranks_per_server, self._usual_ranks_per_server)

    def servers_of(self, members: Sequence[int]) -> int:
        """How many servers these ranks are on, of sizes that may break a rule."""
        topology = Topology.or_usual(self.num_ranks, self.ranks_per_server, self._usual_ranks_per_server)
        known = [member for member in members[:MAX_RANKS] if member < len(topology.servers)]
        return topology.left(known).num_servers

    @property
    def _usual_ranks_per_server(self) -> int:
        return usual_ranks_per_server(self.product, self.scheme)

    @property
    def has_any_servers(self) -> bool:
        """Whether it need not have the product's own servers, nor whole ones."""
        return self.relaxed or self.servers_are_hosts

    @property
    def num_moe_ranks(self) -> int:
        """Ranks that hold routed experts (EP - R)."""
        return self.num_ranks - self.num_shared_ranks

    @property
    def num_local_experts(self) -> int:
        """Routed experts on each MoE rank (localE), or on the one with most of them."""
        if self.experts_per_rank is not None:
            return max(self.experts_per_rank)
        return self.num_experts // self.num_moe_ranks

    @property
    def num_results_per_token(self) -> int:
        """Rows that come back for one token (K + S)."""
        return self.num_topk + self.num_shared_experts

    def is_shared_rank(self, rank: int) -> bool:
        """Whether this rank holds a shared expert instead of routed ones.

        Examples:
            >>> Config(8, 64, 7168, 8, 28, num_shared_experts=1, num_shared_ranks=1).is_shared_rank(0)
            True
        """
        return rank < self.num_shared_ranks

    def experts_on(self, rank: int) -> int:
        """Experts whose rows this rank receives: localE, or 1 on a shared rank.

        Examples:
            >>> Config(8, 64, 7168, 8, 32).experts_on(3)
            4
        """
        if self.is_shared_rank(rank):
            return 1
        return self.num_local_experts if self.experts_per_rank is None else self.experts_per_rank[rank]

    def first_expert_on(self, rank: int) -> int:
        """The first of the routed experts of a rank, or where they would stand if it had any.

        Examples:
            >>> Config(3, 64, 7168, 8, 8, experts_per_rank=(5, 0, 3)).first_expert_on(2)
            5
        """
        if self.experts_per_rank is not None:
            return sum(self.experts_per_rank[:rank])
        return max(0, rank - self.num_shared_ranks) * self.num_local_experts

    def rank_of_expert(self, expert: int) -> int:
        """The rank that holds a routed expert.

        Examples:
            >>> Config(8, 64, 7168, 8, 32).rank_of_expert(13)
            3
        """
        if self.experts_per_rank is not None:
            return bisect.bisect_right(list(itertools.accumulate(self.experts_per_rank)), expert)
        return self.num_shared_ranks + expert // self.num_local_experts

    def rank_of_shared_expert(self, shared_expert: int, source_rank: int) -> int:
        """The replica of a shared expert that a source rank sends its tokens to (V2's rule).

        Examples:
            >>> config = Config(8, 64, 7168, 8, 28, num_shared_experts=1, num_shared_ranks=1)
            >>> config.rank_of_shared_expert(0, source_rank=5)
            0
        """
        replicas = self.num_shared_ranks // self.num_shared_experts
        return shared_expert * replicas + source_rank % replicas

    @property
    def shared_capacity(self) -> int:
        """Rows that a dispatch can deliver to a rank of shared experts at most; 0 where there are none."""
        if not self.num_shared_ranks:
            return 0
        if self.version == 1:
            return self.num_max_tokens_per_rank * self.num_ranks // self.num_shared_ranks
        replicas = self.num_shared_ranks // self.num_shared_experts
        return self.num_max_tokens_per_rank * -(-self.num_ranks // replicas)

    @property
    def routed_capacity(self) -> int:
        """Rows that a dispatch can deliver to a rank of routed experts at most."""
        return self.num_max_tokens_per_rank * self.num_ranks * min(self.num_local_experts, self.num_topk)

    def receive_capacity(self, rank: int) -> int:
        """Rows that a dispatch can deliver to this rank at most (A in docs/operators.md, "Symbols").

        Examples:
            >>> Config(8, 64, 7168, 8, 32).receive_capacity(3)
            2048
        """
        if self.is_shared_rank(rank) or self.experts_per_rank is None:
            return self.shared_capacity if self.is_shared_rank(rank) else self.routed_capacity
        return self.num_max_tokens_per_rank * self.num_ranks * min(self.experts_on(rank), self.num_topk)


_INTEGERS = tuple(field.name for field in fields(Config) if field.type == "int")
