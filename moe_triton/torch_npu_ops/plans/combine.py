"""Plans of combine: arguments checked once per shape, then executed as often as the shape comes again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from moe_triton.core.checks import check_tensor
from moe_triton.core.errors import ArgumentError
from moe_triton.limits import Call
from moe_triton.runtime.communicator import Communicator
from moe_triton.schemes.variants import CombineVariant
from moe_triton.torch_npu_ops import settings
from moe_triton.torch_npu_ops.plans.base import OperatorPlan, call_site_of
from moe_triton.torch_npu_ops.plans.dispatch import MASKS, check_routing, group_config
from moe_triton.torch_npu_ops.plans.shapes import TRIPLE_ROOM, DispatchShapes
from moe_triton.torch_npu_ops.plans.tensors import HOLES, CombineTensors

TensorKey = tuple[tuple[int, ...], torch.dtype, bool]


@dataclass(frozen=True)
class CombineAttributes:
    """Everything about a combine but the contents of its tensors: what its plan depends on."""

    version: int
    operator: str
    expand_x: TensorKey
    expert_ids: TensorKey
    index: TensorKey
    counts: TensorKey | None
    expert_scales: TensorKey | None
    exchange_counts: TensorKey | None
    mask: TensorKey | None
    shared_expert_x: TensorKey | None
    ori_x: TensorKey | None
    alpha1: TensorKey | None
    alpha2: TensorKey | None
    const_v: TensorKey | None
    residual: TensorKey | None
    gamma: TensorKey | None
    performance_info: tuple[TensorKey | None, bool]
    elastic: tuple[int, ...] | None
    unused_given: tuple[bool, bool, bool]
    group_ep: str
    ep_world_size: int
    ep_rank_id: int
    moe_expert_num: int
    group_tp: str
    tp_world_size: int
    tp_rank_id: int
    expert_shard_type: int
    shared_expert_num: int
    shared_expert_rank_num: int
    global_bs: int
    out_dtype: int
    comm_quant_mode: int
    group_list_type: int
    comm_alg: str
    num_zero: int
    num_copy: int
    num_const: int
    comm_type: int
    settings: int


@dataclass(frozen=True, eq=False)
class CombinePlan(OperatorPlan[CombineVariant]):
    """A checked combine of one shape. `execute` runs it.

    Attributes:
        attributes: what it was made for.
    """

    attributes: CombineAttributes

    @cached_property
    def _given(self) -> tuple[tuple[int, str], ...]:
        """Position and hole of each optional tensor that calls of this plan have."""
        a, fields = self.attributes, CombineTensors._fields
        keys = [a.expert_scales, a.exchange_counts, a.mask, a.shared_expert_x, a.ori_x]
        keys += [a.alpha1, a.alpha2, a.const_v, a.residual, a.gamma]
        given = zip(HOLES.items(), keys, strict=True)
        return tuple((fields.index(name), hole) for (name, hole), key in given if key is not None)

    @property
    def num_entries(self) -> int:
        """Pairs of an expert of this rank and a rank that it received rows from."""
        config = self.deployment.config
        return config.experts_on(self.deployment.rank) * config.num_ranks

    @cached_property
    def batch(self) -> int:
        """Tokens of this rank."""
        return self.attributes.expert_ids[0][0]

    def eps(self, value: float) -> torch.Tensor:
        """(1,) fp32: a norm's epsilon. A graph may hold it for as long as this plan lives."""
        made = self._eps.get(value)
        if made is None:
            made = self._eps[value] = self.table([value], torch.float32)
        return made

    @cached_property
    def _eps(self) -> dict[float, torch.Tensor]:
        return {}

    def sending(
        self,
        communicator: Communicator,
        expand_x: torch.Tensor,
        index: torch.Tensor,
        counts: torch.Tensor | int,
    ) -> dict[str, Any]:
        """What the first half needs: results, where each goes, and how many there are.

        Args:
            communicator: where it runs.
            expand_x: (n, H) results.
            index: where each goes.
            counts: running totals, or their address; the last one is that of all results.

        Raises:
            ArgumentError: there are more results than rows. Nothing was sent.
        """
        rows = known = expand_x.shape[0]
        if communicator.backend.is_asynchronous:
            # Kernels may take so many whatever the counts say; they report a total that is beyond. With a
            # peer there are as many rows as can have been received (`check_room`).
            known = rows if self.variant.exchange else min(rows, communicator.capacity)
        else:
            last = communicator.site.num_entries - 1
            total = communicator.backend.read_int32(counts, last)  # type: ignore[arg-type]  # no address here
            if not 0 <= total <= rows or total > communicator.capacity:
                raise ArgumentError(
                    "ep_send_counts",
                    f"one with a total of {total} rows",
                    f"expand_x has {rows} rows and at most {communicator.capacity} can have been received",
                    "Pass ep_recv_counts of the matching dispatch.",
                )
        if self.attributes.version != 1 and not self.variant.exchange:
            known = min(known, index.numel() // 3)
        return {"y": expand_x, "num_rows": known, "recv_offsets": counts, "triples": index}

    def summing(
        self, communicator: Communicator, tensors: CombineTensors, out: torch.Tensor | None
    ) -> dict[str, Any]:
        """What the second half needs: the tokens' experts and weights, and where the sums go.

        Raises:
            ArgumentError: ids or the mask break a rule, where the host reads them.
        """
        ids = tensors.expert_ids.contiguous()
        if out is None:
            out = communicator.backend.empty((self.batch, self.config.hidden), self.variant.dtype)
        bindings: dict[str, Any] = {
            "topk_idx": ids,
            "num_tokens": self.batch,
            "out": out,
            "expand_idx": tensors.routes,
        }
        for position, hole in self._given:
            bindings[hole] = tensors[position].contiguous()  # type: ignore[union-attr]
        check_routing(communicator, ids, bindings.get("mask"), self.num_ids)
        if self.variant.waits:
            bindings["performance_info"] = tensors.performance_info
            bindings["rank_table"] = self.rank_table
            bindings["num_performance_entries"] = self.config.num_ranks
        return bindings

    def execute(
        self,
        tensors: CombineTensors,
        extra: dict[str, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs it, and returns (BS, H).

        Args:
            tensors: as in the call; they need not be contiguous.
            extra: bindings that are no argument of the caller's, by hole.
            out: where to write, None for a new tensor.
        """
        communicator = self.access.communicator()
        expand_x, _, index, counts = tensors[:4]
        assert counts is not None
        index = index.contiguous()
        bindings = self.summing(communicator, tensors, out)
        bindings["expand_idx"] = index
        bindings |= self.sending(communicator, expand_x.contiguous(), index, counts.contiguous())
        if extra:
            bindings |= extra
        communicator.run(self.variant, bindings)
        return bindings["out"]  # type: ignore[no-any-return]


def make_plan(a: CombineAttributes) -> CombinePlan:
    """Checks every argument of a combine that does not depend on data.

    Raises:
        ArgumentError: a rule that does not hold, with its status code.
    """
    (batch, topk), (_, hidden) = a.expert_ids[0], a.expand_x[0]
    consts = (a.alpha1, a.alpha2, a.const_v)
    call = Call(
        version=a.version,
        operator=a.operator,  # type: ignore[arg-type]
        batch=batch,
        global_bs=a.global_bs,
        comm_quant_mode=a.comm_quant_mode,
        expert_shard_type=a.expert_shard_type,
        tp_world_size=a.tp_world_size,
        tp_rank_id=a.tp_rank_id,
        rank=a.ep_rank_id,
        has_mask=a.mask is not None,
        mask_dims=len(a.mask[0]) if a.mask else 1,
        has_expert_scales=a.expert_scales is not None,
        has_elastic_info=a.elastic is not None,
        has_shared_expert_x=a.shared_expert_x is not None,
        has_ori_x=a.ori_x is not None,
        has_const_args=all(c is not None for c in consts),
        has_performance_info=a.performance_info[0] is not None,
        has_activation_scale=a.unused_given[0],
        has_weight_scale=a.unused_given[1],
        has_group_list=a.unused_given[2],
        num_zero=a.num_zero,
        num_copy=a.num_copy,
        num_const=a.num_const,
        out_dtype=a.out_dtype,
        group_list_type=a.group_list_type,
        comm_type=a.comm_type,
        group_ep=a.group_ep,
        group_tp=a.group_tp,
    )
    shared = (a.shared_expert_num, a.shared_expert_rank_num)
    config = group_config(call, hidden, topk, a.ep_world_size, a.moe_expert_num, shared, a.comm_alg)
    site = call_site_of(a, config)
    variant = CombineVariant(
        dtype=a.expand_x[1],
        weights=a.expert_scales is not None,
        mask=MASKS[len(a.mask[0])] if a.mask else "none",
        shared_x=a.shared_expert_x is not None,
        special=(a.num_zero, a.num_copy, a.num_const),
        const_per_element=a.alpha1 is not None and len(a.alpha1[0]) == 2,
        block_quantize=a.comm_quant_mode == 2,
        exchange=a.tp_world_size == 2,
        norm=a.operator == "combine_add_rms_norm",
        waits=a.performance_info[0] is not None,
        elastic=a.elastic is not None,
    )
    return CombinePlan(config, site, variant, a)


def _shape_of_shared(a: CombineAttributes) -> tuple[int | str, ...]:
    """The shape that shared_expert_x must have: as it is, where its tokens stand in two dimensions."""
    (batch, _), (_, hidden) = a.expert_ids[0], a.expand_x[0]
    given = a.shared_expert_x[0] if a.shared_expert_x else ()
    if len(given) == 3 and given[0] * given[1] == batch:
        return (given[0], given[1], hidden)
    return (batch, hidden)


def check_room(a: CombineAttributes, index_name: str) -> None:
    """Checks that combine is given dispatch's outputs whole where the original demands it.

    V2 does; so do two tensor-parallel ranks, whose rows are added before anybody knows how many there are.

    Args:
        a: the call's attributes.
        index_name: what the caller knows the routes as.

    Raises:
        ArgumentError: expand_x has fewer rows than a rank can receive, or there are too few triples. Nothing
            was sent.
    """
    if a.version == 1 and a.tp_world_size != 2:
        return
    capacity = receive_capacity(a)
    rows, most = a.expand_x[0][0], capacity * max(a.tp_world_size, 1)
    if rows < most:
        raise ArgumentError(
            "expand_x",
            f"of {rows} rows",
            f"this rank can have received {most}, whether or not it has",
            "Pass as many rows as dispatch's expand_x has.",
        )
    words, needed = math.prod(a.index[0]), capacity * TRIPLE_ROOM
    if a.version != 1 and a.operator != "combine_teardown" and words < needed:
        raise ArgumentError(
            index_name,
            f"of {words} elements",
            f"it must have at least {capacity} * {TRIPLE_ROOM} = {needed}",
            "Pass dispatch's third output whole.",
        )


def receive_capacity(a: CombineAttributes) -> int:
    """Rows that the matching dispatch can deliver here (A)."""
    (batch, topk), (_, hidden) = a.expert_ids[0], a.expand_x[0]
    shapes = DispatchShapes.of_call(
        a.version,
        (batch, hidden, topk),
        a.expand_x[1],
        (a.ep_world_size, a.ep_rank_id),
        a.moe_expert_num,
        (a.shared_expert_num, a.shared_expert_rank_num),
        a.global_bs,
        tp=a.tp_world_size,
        quantize=False,
        weights=False,
        elastic=a.elastic is not None,
    )
    return int(shapes.capacity)


def check_tensors(a: CombineAttributes, tensors: dict[str, torch.Tensor | None]) -> None:
    """Checks shapes and dtypes of the tensors of a combine against each other.

    Raises:
        ArgumentError: the first that does not fit.
    """
    (batch, topk), (_, hidden), dtype = a.expert_ids[0], a.expand_x[0], a.expand_x[1]
    alpha = (a.num_const, hidden) if a.alpha1 and len(a.alpha1[0]) == 2 else (a.num_const,)
    mask = (batch,) if a.mask and len(a.mask[0]) == 1 else (batch, topk)
    expected: dict[str, tuple[tuple[int | str, ...], torch.dtype]] = {
        "expert_ids": ((batch, topk), torch.int32),
        "assist_info_for_combine": (("n",), torch.int32),
        "expand_idx": ((batch * topk,) if a.version == 1 else ("n",), torch.int32),
        "ep_send_counts": (("n",), torch.int32),
        "expert_scales": ((batch, topk), torch.float32),
        "tp_send_counts": ((2,), torch.int32),
        "x_active_mask": (mask, torch.bool),
        "shared_expert_x": (_shape_of_shared(a), dtype),
        "ori_x": ((batch, hidden), dtype),
        "const_expert_alpha_1": (alpha, dtype),
        "const_expert_alpha_2": (alpha, dtype),
        "const_expert_v": ((a.num_const, hidden), dtype),
        "performance_info": ((a.ep_world_size,), torch.int64),
        "residual_x": ((batch, 1, hidden), torch.bfloat16),
        "gamma": ((hidden,), torch.bfloat16),
    }
    device = settings.host().device
    for name, tensor in tensors.items():
        if tensor is not None:
            shape, wanted = expected[name]
            check_tensor(name, tensor, shape=shape, dtypes=(wanted,), device=device)
