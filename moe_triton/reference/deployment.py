"""Who holds what: ranks, routed experts and shared experts of a whole deployment.

See docs/operators.md, "Where experts live" and "Lost ranks". Sizes have torch_npu's names; the letters of
docs/operators.md, "Symbols", are in brackets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What every rank passes alike.

    Processes are numbered ``ep_rank * max(tp_world_size, 1) + tp_rank``: tensor-parallel peers are
    neighbours.

    Attributes:
        ep_world_size: ranks of the expert-parallel group (EP).
        moe_expert_num: routed experts (M).
        shared_expert_num: shared experts (S). Without ranks of their own there are none, whatever it says.
        shared_expert_rank_num: ranks [0, R) that hold shared experts only.
        tp_world_size: 2 where pairs of ranks exchange rows; 0 and 1 mean none.
        zero_expert_num: special experts with the ids from M on.
        copy_expert_num: special experts after those.
        const_expert_num: special experts after those.
        version: of the operators, 1 or 2.
        elastic_info: its words, or None.
        experts_per_rank: routed experts of each rank, or None for as many on each that holds any.
    """

    ep_world_size: int
    moe_expert_num: int
    shared_expert_num: int = 1
    shared_expert_rank_num: int = 0
    tp_world_size: int = 0
    zero_expert_num: int = 0
    copy_expert_num: int = 0
    const_expert_num: int = 0
    version: int = 2
    elastic_info: tuple[int, ...] | None = None
    experts_per_rank: Sequence[int] | None = None

    @property
    def num_shared_experts(self) -> int:
        """Shared experts that rows are sent to (S)."""
        return self.shared_expert_num if self.shared_expert_rank_num else 0

    @property
    def num_local_experts(self) -> int:
        """Routed experts of each rank that holds any (localE), or of the one with most."""
        if self.experts_per_rank is not None:
            return max(self.experts_per_rank)
        return self.moe_expert_num // (self.ep_world_size - self.shared_expert_rank_num)

    @property
    def num_replicas(self) -> int:
        """Ranks of each shared expert (rnps)."""
        return self.shared_expert_rank_num // self.num_shared_experts

    def is_shared_rank(self, rank: int) -> bool:
        """Whether a rank holds a shared expert."""
        return rank < self.shared_expert_rank_num

    def experts_on(self, rank: int) -> int:
        """Experts of a rank: localE, or one shared expert."""
        if self.is_shared_rank(rank) or self.experts_per_rank is None:
            return 1 if self.is_shared_rank(rank) else self.num_local_experts
        return self.experts_per_rank[rank]

    def first_expert_on(self, rank: int) -> int:
        """The first routed expert of a rank."""
        if self.experts_per_rank is not None:
            return sum(self.experts_per_rank[:rank])
        return (rank - self.shared_expert_rank_num) * self.num_local_experts

    def rank_of_expert(self, expert: int) -> int:
        """The rank that holds a routed expert."""
        ranks = range(self.shared_expert_rank_num, self.ep_world_size)
        return next(r for r in ranks if 0 <= expert - self.first_expert_on(r) < self.experts_on(r))

    def shared_expert_on(self, rank: int) -> int:
        """The shared expert that a shared rank holds a replica of."""
        return rank // self.num_replicas

    def shared_rank_of(self, shared_expert: int, source: int, token: int, batch: int) -> int:
        """The rank that a token's copy for a shared expert goes to.

        V2 chooses a replica by the source rank. V1 cuts the tokens of a routed rank into R runs, and a
        shared rank keeps its own tokens.

        Args:
            shared_expert: which one.
            source: the token's rank.
            token: its number there.
            batch: tokens of that rank (BS).
        """
        if self.version != 1:
            return shared_expert * self.num_replicas + source % self.num_replicas
        return source if self.is_shared_rank(source) else self.piece_of(source, token, batch)

    def piece_of(self, source: int, token: int, batch: int) -> int:
        """V1: which of R runs a token lies in, ``ceil((t + 1 + floor(r * BS / R)) * R / BS) - 1 - r``."""
        ranks = self.shared_expert_rank_num
        position = token + 1 + source * batch // ranks
        return -(-position * ranks // batch) - 1 - source

    @cached_property
    def survivors(self) -> tuple[int, ...]:
        """Original ranks by what they are now; without elastic_info every rank is what it was."""
        if self.elastic_info is None or not self.elastic_info[0]:
            return tuple(range(self.ep_world_size))
        table = self.elastic_info[4 + self.ep_world_size :]
        return tuple(table[: self.elastic_info[1]])

    def after_losses(self) -> Deployment:
        """The deployment that is left: the sizes that elastic_info names."""
        if self.elastic_info is None or not self.elastic_info[0]:
            return replace(self, elastic_info=None)
        _, ranks, shared_ranks, experts = self.elastic_info[:4]
        return replace(
            self,
            ep_world_size=ranks,
            shared_expert_rank_num=shared_ranks,
            moe_expert_num=experts,
            elastic_info=None,
        )

    @property
    def num_tp_ranks(self) -> int:
        """Processes with the same rank of the expert-parallel group."""
        return max(self.tp_world_size, 1)
