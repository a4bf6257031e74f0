"""Plans of dispatch: arguments checked once per shape, then executed as often as the shape comes again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from moe_triton.backends.base import TensorSpec
from moe_triton.core.checks import check_tensor
from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.layout import TRAILER_WORDS
from moe_triton.limits import (
    Call,
    buffer_megabytes,
    check_buffer_size,
    check_call,
    check_config,
    scheme_of,
    torch_npu_names,
)
from moe_triton.runtime import arguments
from moe_triton.runtime.communicator import Communicator
from moe_triton.schemes import scheme_type
from moe_triton.schemes.variants import DispatchVariant, Mask
from moe_triton.torch_npu_ops import settings
from moe_triton.torch_npu_ops.plans.base import OperatorPlan, call_site_of
from moe_triton.torch_npu_ops.plans.shapes import DispatchShapes

MASKS: dict[int, Mask] = {1: "tokens", 2: "entries"}


@dataclass(frozen=True)
class DispatchAttributes:
    """Everything about a dispatch but the contents of its tensors: what its plan depends on.

    Shapes and dtypes stand for the tensors; None for one that is not given.
    """

    version: int
    operator: str
    x: tuple[Any, ...]
    expert_ids: tuple[Any, ...]
    scales: tuple[Any, ...] | None
    mask: tuple[Any, ...] | None
    expert_scales: tuple[Any, ...] | None
    elastic: tuple[int, ...] | None
    performance_info: tuple[Any, bool]
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
    quant_mode: int
    global_bs: int
    expert_token_nums_type: int
    comm_alg: str
    num_zero: int
    num_copy: int
    num_const: int
    dtypes_given: tuple[bool, bool, bool]
    comm_type: int
    settings: int

    @property
    def num_shared_scales(self) -> int:
        """Rows of shared experts in scales. setup counts them even where no rank holds one."""
        counted = self.shared_expert_rank_num or self.operator == "dispatch_setup"
        return self.shared_expert_num if counted else 0


def group_config(
    call: Call, hidden: int, topk: int, size: int, experts: int, shared: tuple[int, int], comm_alg: str | None
) -> Config:
    """The group's settings, checked against every limit of the product and scheme.

    Raises:
        ArgumentError: the first rule that does not hold, with the argument's name in torch_npu.
    """
    chosen = settings.current()
    try:
        config = Config(
            num_ranks=size,
            num_max_tokens_per_rank=(call.global_bs // size if call.global_bs and size > 0 else call.batch),
            hidden=hidden,
            num_topk=topk,
            num_experts=experts,
            num_shared_experts=shared[0],
            num_shared_ranks=shared[1],
            product=chosen.product,
            scheme=scheme_of(chosen.product, comm_alg or ""),
            relaxed=chosen.relaxed,
            version=call.version,
            num_special_experts=call.num_zero + call.num_copy + call.num_const,
            generation=chosen.generation,
        ).normalized()
        check_config(config)
        scheme_type(config).check_offers("torch_npu", "comm_alg", comm_alg)
        check_call(config, call)
        check_buffer_size(config, buffer_megabytes(), tensor_parallel=call.tp_world_size == 2)
    except ArgumentError as error:
        raise error.renamed(torch_npu_names(call)) from None
    return config


@dataclass(frozen=True, eq=False)
class DispatchPlan(OperatorPlan[DispatchVariant]):
    """A checked dispatch of one shape. `execute` runs it.

    Attributes:
        attributes: what it was made for.
        shapes: of the outputs.
    """

    attributes: DispatchAttributes
    shapes: DispatchShapes

    def outputs(self, communicator: Communicator) -> tuple[torch.Tensor, ...]:
        """The seven outputs, with what no kernel writes set."""
        specs, nothing = self._output_specs
        made: list[torch.Tensor] = communicator.backend.empty_all(specs)
        for position, output in nothing:
            made.insert(position, output)
        for position, written in self._unwritten:
            made[position][written:] = 0
        return tuple(made)

    def sending(
        self,
        communicator: Communicator,
        x: torch.Tensor,
        ids: torch.Tensor,
        scales: torch.Tensor | None,
        mask: torch.Tensor | None,
        expert_scales: torch.Tensor | None,
    ) -> dict[str, Any]:
        """What the first half needs.

        Raises:
            ArgumentError: ids or the mask break a rule, where the host reads them. Nothing was sent.
        """
        check_routing(communicator, ids, mask, self.num_ids)
        return {
            "x": x,
            "topk_idx": ids,
            "num_tokens": self.batch,
            "num_ids": ids.numel(),
            "smooth_scales": scales,
            "topk_weights": expert_scales,
            "mask": mask,
        }

    def arranging(
        self, outputs: tuple[torch.Tensor, ...], performance_info: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """What the second half needs: where its results go."""
        y, dynamic_scales, index, nums, recv_counts, tp_counts, expand_scales = outputs
        bindings: dict[str, Any] = {
            "num_tokens": self.batch,
            "tokens": y,
            "scales": dynamic_scales,
            "triples": index,
            "recv_offsets": recv_counts,
            "tokens_per_expert": nums,
            "exchange_counts": tp_counts,
            "weights": expand_scales,
        }
        if performance_info is not None:
            bindings["performance_info"] = performance_info
            bindings["rank_table"] = self.rank_table
            bindings["num_performance_entries"] = performance_info.numel()
        return bindings

    def execute(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        *,
        scales: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        expert_scales: torch.Tensor | None = None,
        performance_info: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Runs it, and returns the seven outputs."""
        communicator = self.access.communicator()
        bindings = self.sending(communicator, x, ids, scales, mask, expert_scales)
        outputs = self.outputs(communicator)
        bindings |= self.arranging(outputs, performance_info)
        if self.attributes.version == 1:
            bindings["expand_idx"], bindings["triples"] = outputs[2], self._unreturned
        else:
            bindings["expand_idx"] = self._unreturned
        communicator.run(self.variant, bindings)
        return outputs

    @cached_property
    def batch(self) -> int:
        """Tokens of this rank."""
        return int(self.attributes.x[0][0])

    @cached_property
    def _unwritten(self) -> list[tuple[int, int]]:
        """Position of each output of counts that no kernel fills to its end, and what is written of it."""
        config, rank = self.deployment.config, self.deployment.rank
        local = config.experts_on(rank)
        counts = local * config.num_ranks * max(self.attributes.tp_world_size, 1)
        written = {3: local, 4: counts, 5: 2 if self.variant.exchange else 0}
        shapes = self.shapes.outputs()
        return [(position, end) for position, end in written.items() if shapes[position][0][0] > end]

    @cached_property
    def _output_specs(self) -> tuple[list[TensorSpec], list[tuple[int, torch.Tensor]]]:
        """The outputs to make; and by position those without elements, which all calls share."""
        specs: list[TensorSpec] = []
        nothing, device = [], self.communicator.backend.device
        for position, (shape, dtype) in enumerate(self.shapes.outputs()):
            if math.prod(shape):
                specs.append((shape, dtype))
            else:
                nothing.append((position, torch.empty(shape, dtype=dtype, device=device)))
        return specs, nothing

    @cached_property
    def _unreturned(self) -> torch.Tensor:
        """The index of the other version: kernels write it, and no caller sees it."""
        a, capacity = self.attributes, self.deployment.config.receive_capacity(self.deployment.rank)
        words = 3 * capacity + TRAILER_WORDS if a.version == 1 else a.expert_ids[0].numel()
        return torch.empty(words, dtype=torch.int32, device=self.communicator.backend.device)


def check_routing(
    communicator: Communicator, ids: torch.Tensor, mask: torch.Tensor | None, num_ids: int
) -> None:
    """Checks that ids are below their number and distinct in a row, and that a mask of tokens has no holes.

    A host whose device works on reads neither: kernels send no id that names no expert, and take the tokens
    up to a mask's first False.

    Raises:
        ArgumentError: one is not, or it has one.
    """
    backend = communicator.backend
    if mask is not None:
        if backend.is_asynchronous:
            return
        check_prefix(mask)
        ids = masked_ids(ids, mask)
    bad = backend.first_bad_id(ids, num_ids)
    if bad is not None:
        raise arguments.bad_id_error("expert_ids", ids, bad, num_ids)


def check_prefix(mask: torch.Tensor) -> None:
    """Checks that the active tokens of a 1-D mask come first.

    Raises:
        ArgumentError: a True follows a False.
    """
    if mask.dim() == 1 and mask.numel() > 1 and bool((mask[1:] & ~mask[:-1]).any()):
        token = int((mask[1:] & ~mask[:-1]).nonzero()[0]) + 1
        raise ArgumentError(
            "x_active_mask",
            f"True at token {token} after a False",
            "active tokens come first in a 1-D mask",
            "Sort the tokens, or pass a (BS, K) mask.",
        )


def masked_ids(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The ids that take part, -1 for the others: what an inactive entry holds does not matter."""
    return torch.where(mask if mask.dim() == 2 else mask[:, None], ids, -1)


def make_plan(a: DispatchAttributes) -> DispatchPlan:
    """Checks every argument of a dispatch that does not depend on data.

    Raises:
        ArgumentError: a rule that does not hold, with its status code.
    """
    version, (batch, hidden), dtype = a.version, a.x[0], a.x[1]
    quantize = a.quant_mode == 2 or (version == 1 and a.scales is not None)
    call = Call(
        version=version,
        operator=a.operator,  # type: ignore[arg-type]
        batch=batch,
        global_bs=a.global_bs,
        quant_mode=a.quant_mode or (2 if quantize else 0),
        expert_token_nums_type=a.expert_token_nums_type,
        expert_shard_type=a.expert_shard_type,
        tp_world_size=a.tp_world_size,
        tp_rank_id=a.tp_rank_id,
        rank=a.ep_rank_id,
        has_scales=a.scales is not None,
        has_mask=a.mask is not None,
        mask_dims=len(a.mask[0]) if a.mask else 1,
        has_expert_scales=a.expert_scales is not None,
        has_elastic_info=a.elastic is not None,
        has_performance_info=a.performance_info[0] is not None,
        has_y_dtype=a.dtypes_given[0],
        has_x_dtype=a.dtypes_given[1],
        has_scales_dtype=a.dtypes_given[2],
        num_zero=a.num_zero,
        num_copy=a.num_copy,
        num_const=a.num_const,
        comm_type=a.comm_type,
        group_ep=a.group_ep,
        group_tp=a.group_tp,
    )
    shared = (a.shared_expert_num, a.shared_expert_rank_num)
    topk = a.expert_ids[0][1]
    config = group_config(call, hidden, topk, a.ep_world_size, a.moe_expert_num, shared, a.comm_alg)
    site = call_site_of(a, config)
    variant = DispatchVariant(
        dtype=dtype,
        quantize=quantize,
        smooth=a.scales is not None,
        weights=a.expert_scales is not None,
        mask=MASKS[len(a.mask[0])] if a.mask else "none",
        cumulative=a.expert_token_nums_type == 0,
        exchange=a.tp_world_size == 2,
        waits=a.performance_info[0] is not None,
        elastic=a.elastic is not None,
    )
    return DispatchPlan(config, site, variant, a, shapes_of(a, quantize))


def shapes_of(a: DispatchAttributes, quantize: bool) -> DispatchShapes:
    """The shapes of a dispatch's outputs."""
    (batch, hidden), dtype = a.x[:2]
    return DispatchShapes.of_call(
        a.version,
        (batch, hidden, a.expert_ids[0][1]),
        dtype,
        (a.ep_world_size, a.ep_rank_id),
        a.moe_expert_num,
        (a.shared_expert_num, a.shared_expert_rank_num),
        a.global_bs,
        tp=a.tp_world_size,
        quantize=quantize,
        weights=a.expert_scales is not None,
        elastic=a.elastic is not None,
    )


def check_tensors(plan_for: DispatchAttributes, tensors: dict[str, torch.Tensor | None]) -> None:
    """Checks shapes and dtypes of the tensors of a dispatch against each other.

    Raises:
        ArgumentError: the first that does not fit.
    """
    (batch, hidden), (_, topk) = plan_for.x[0], plan_for.expert_ids[0]
    shared = plan_for.num_shared_scales
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "expert_ids": ((batch, topk), torch.int32),
        "scales": ((shared + plan_for.moe_expert_num, hidden), torch.float32),
        "x_active_mask": (
            (batch,) if plan_for.mask and len(plan_for.mask[0]) == 1 else (batch, topk),
            torch.bool,
        ),
        "expert_scales": ((batch, topk), torch.float32),
        "performance_info": ((plan_for.ep_world_size,), torch.int64),
    }
    device = settings.host().device
    for name, tensor in tensors.items():
        if tensor is not None:
            shape, dtype = expected[name]
            check_tensor(name, tensor, shape=shape, dtypes=(dtype,), device=device)
