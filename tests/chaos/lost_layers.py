"""Dispatch and combine of a rank in a group that loses some: by a buffer, or by torch_npu's functions."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moe_triton import ArgumentError
from moe_triton import torch_npu_ops as ops
from moe_triton.tools.selftest.cases import combined, dispatched
from tests.chaos.lost_trial import Answer
from tests.distributed.cases import Case, Inputs, experts_of, small_case
from tests.distributed.workers import make_buffer

LEAST_OF_HIERARCHY = 3
"""Ranks: for fewer, torch_npu's tables have no room in small calls."""


@dataclass(frozen=True)
class Members:
    """Ranks that make a group, or what is left of one.

    Attributes:
        whole: the case of the whole group.
        ranks: its ranks that take part, in order.
        group: a group of these alone; None where they stay in the whole one.
    """

    whole: Case
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @property
    def lost(self) -> list[int]:
        """Ranks of the whole group that do not take part."""
        return [rank for rank in range(self.whole.config.num_ranks) if rank not in self.ranks]

    def case(self) -> Case:
        """Theirs. Where servers of a hierarchy have not kept one size, or are few, ranks go without it."""
        config, size = self.whole.config, len(self.ranks)
        left = config.topology.left(self.ranks).sizes
        scheme = config.scheme
        if self.lost and scheme == "hierarchy" and (size < LEAST_OF_HIERARCHY or len(set(left)) > 1):
            scheme = "fullmesh"
        made = replace(small_case(size, scheme, self.whole.quantize).config, ranks_per_server=left)
        return replace(self.whole, config=made.normalized(), tokens=self.whole.tokens[:size])


class Layer(Protocol):
    """Dispatch and combine of one rank.

    Attributes:
        answer: what becomes of ranks that do not come.
        marks_calls: `lost` is of a call, and not of the masks as they are.
    """

    answer: Answer
    marks_calls: bool

    def dispatch(self, inputs: Inputs) -> tuple[torch.Tensor, Any]:
        """Rows of the experts here, and what a combine needs."""

    def combine(self, inputs: Inputs, sent: Any) -> torch.Tensor:
        """The sums."""

    def lost(self, inputs: Inputs, sent: Any) -> torch.Tensor:
        """(T, K) entries that are missing from the sums."""

    def mask(self, ranks: Collection[int]) -> None:
        """Masks ranks by hand."""

    def masked(self) -> list[int]:
        """Ranks that are masked."""

    def close(self) -> None:
        """Gives everything back."""


class BufferLayer:
    """By `EPBuffer`."""

    marks_calls = True

    def __init__(self, members: Members, timeout_s: float, answer: Answer) -> None:
        self.answer, self.case = answer, members.case()
        config = self.case.config
        options: dict[str, Any] = {"timeout_s": timeout_s, "on_lost": answer}
        if members.lost and members.group is None:
            whole = replace(members.whole.config, product=config.product, scheme=config.scheme)
            self.buffer = make_buffer(
                replace(members.whole, config=whole), lost_ranks=members.lost, **options
            )
        else:
            self.buffer = make_buffer(self.case, group=members.group, **options)

    def dispatch(self, inputs: Inputs) -> tuple[torch.Tensor, Any]:
        output = dispatched(self.buffer, self.case, inputs)
        return output.tokens[: output.handle.num_received()].clone(), output

    def combine(self, inputs: Inputs, sent: Any) -> torch.Tensor:
        return combined(self.buffer, self.case, inputs, sent).clone()

    def lost(self, inputs: Inputs, sent: Any) -> torch.Tensor:
        return sent.handle.lost[:, : self.case.config.num_topk].clone()

    def mask(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self.buffer.update_mask(rank, True)

    def masked(self) -> list[int]:
        return self.buffer.query_mask().nonzero().flatten().tolist()

    def close(self) -> None:
        self.buffer.close()


class NamedLayer:
    """By torch_npu's functions, which know a group by its name."""

    marks_calls = False

    def __init__(self, members: Members, timeout_s: float, answer: Answer) -> None:
        self.answer, self.case = answer, members.case()
        config = self.case.config
        whole = config if members.group is not None else members.whole.config
        settings: dict[str, Any] = {
            "product": config.product,
            "relaxed": True,
            "timeout_s": timeout_s,
            "ranks_per_server": whole.ranks_per_server,
        }
        if "on_lost" in inspect.signature(ops.configure).parameters:
            settings["on_lost"] = answer
        elif answer == "mask":
            raise ArgumentError("on_lost", answer, "these functions have none", "Mask by hand.")
        ops.configure(**settings)
        self.name = ops.group_name(members.group)
        process_group = ops.process_group(self.name)
        size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        self.rank = members.ranks.index(dist.get_rank())
        self._group = self.name, size, rank, whole.num_experts
        self._common: dict[str, Any] = {"global_bs": size * config.num_max_tokens_per_rank}
        if config.scheme in ("fullmesh_v2", "hierarchy"):
            self._common["comm_alg"] = config.scheme
        if members.lost and members.group is None:
            left = [*members.ranks]
            to_new = [left.index(each) if each in left else -1 for each in range(size)]
            words = [1, len(left), 0, config.num_experts, *to_new, *left, *[-1] * (size - len(left))]
            self._common["elastic_info"] = torch.tensor(words, dtype=torch.int32)
        # Ranks make a window together, and hear there what cannot be.
        x, ids = torch.zeros(1, config.hidden).bfloat16(), torch.zeros(1, config.num_topk, dtype=torch.int32)
        weights = {"expert_scales": ids.float()} if config.scheme == "hierarchy" else {}
        plan = ops.npu_moe_distribute_dispatch_v2.plan(x, ids, *self._group, **weights, **self._common)
        assert plan.communicator.is_usable

    def dispatch(self, inputs: Inputs) -> tuple[torch.Tensor, Any]:
        named = {"expert_scales": inputs.topk_weights} if self.case.config.scheme == "hierarchy" else {}
        made = ops.npu_moe_distribute_dispatch_v2(
            inputs.x, inputs.topk_idx, *self._group, **named, **self._common
        )
        return made[0][: int(made[3].sum())].clone(), made

    def combine(self, inputs: Inputs, sent: Any) -> torch.Tensor:
        y = experts_of(self.case, self.rank, sent[0])
        found = inputs.topk_idx, sent[2], sent[4], inputs.topk_weights
        return ops.npu_moe_distribute_combine_v2(y, *found, *self._group, **self._common).clone()

    def lost(self, inputs: Inputs, sent: Any) -> torch.Tensor:
        elastic = self._common.get("elastic_info")
        return ops.lost(self.name, inputs.topk_idx, elastic_info=elastic)

    def mask(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            ops.update_mask(self.name, rank, True)

    def masked(self) -> list[int]:
        return ops.query_mask(self.name).nonzero().flatten().tolist()

    def close(self) -> None:
        ops.release(self.name)


def open_layer(api: str, members: Members, timeout_s: float, *, may_mask: bool) -> Layer:
    """A rank's layer, which goes on without lost ranks by itself where the library has that. Collective.

    Args:
        api: by which it calls.
        members: ranks that take part.
        timeout_s: of every wait.
        may_mask: whether it is to be so.
    """
    make = {"EPBuffer": BufferLayer, "torch_npu": NamedLayer}[api]
    if may_mask:
        try:
            return make(members, timeout_s, "mask")
        except ArgumentError as error:  # on every rank
            if error.argument != "on_lost":
                raise
    return make(members, timeout_s, "raise")
