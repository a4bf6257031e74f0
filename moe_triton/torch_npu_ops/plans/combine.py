"""Plans of combine: arguments checked once per shape, then executed as often as the shape comes again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from moe_triton.backends.base import Bindings
from moe_triton.checks import check_tensor
from moe_triton.communicator import Communicator
from moe_triton.config import Config
from moe_triton.errors import ArgumentError
from moe_triton.layout import layout_of
from moe_triton.limits import Call
from moe_triton.schemes.variants import CombineVariant
from moe_triton.torch_npu_ops import registry, settings
from moe_triton.torch_npu_ops.plans.dispatch import MASKS, check_ids, check_prefix, group_config, masked_ids
from moe_triton.torch_npu_ops.plans.elastic import Deployment, deployment_of

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
    elastic: tuple[int, ...] | None
    performance_info: tuple[TensorKey | None, bool]
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
    settings: settings.Settings


@dataclass(frozen=True, eq=False)
class CombinePlan:
    """A checked combine of one shape. `execute` runs it.

    Attributes:
        attributes: what it was made for.
        config: the group's settings as called.
        deployment: the ranks that take part.
        variant: which kernels run.
    """

    attributes: CombineAttributes
    config: Config
    deployment: Deployment
    variant: CombineVariant

    @property
    def window_bytes(self) -> int:
        """Bytes of the data window that HCCL_BUFFSIZE has to cover."""
        return layout_of(self.deployment.config).data_bytes

    @property
    def communicator(self) -> Communicator:
        """Made, with all ranks of the group, when a call first needs it."""
        a = self.attributes
        tp = a.group_tp if a.tp_world_size == 2 else ""
        place = registry.Place(a.group_ep, tp, self.deployment.config, self.deployment.members)
        return registry.communicator(place)

    @property
    def workspace_bytes(self) -> int:
        """Private bytes that the communicator's plans have asked for so far."""
        return self.communicator.scratch_bytes()

    @cached_property
    def rank_table(self) -> torch.Tensor:
        """(EP,) int32: original number of each rank that takes part."""
        return torch.tensor(self.deployment.members or tuple(range(self.config.num_ranks)), dtype=torch.int32)

    def check_counts(self, communicator: Communicator, rows: int, counts: torch.Tensor) -> None:
        """Checks that there is a row of expert output for each row that was received.

        Raises:
            ArgumentError: there is not. Nothing was sent.
        """
        total = int(counts[communicator.site.num_entries - 1])
        if not 0 <= total <= min(rows, communicator.capacity * max(1, self.attributes.tp_world_size)):
            raise ArgumentError(
                "ep_send_counts",
                f"one with a total of {total} rows",
                f"expand_x has {rows} rows and at most {communicator.capacity} can have been received",
                "Pass ep_recv_counts of the matching dispatch.",
            )

    @property
    def batch(self) -> int:
        """Tokens of this rank."""
        return self.attributes.expert_ids[0][0]

    def check_data(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Checks what only the data show: ids and the mask's form.

        Raises:
            ArgumentError: it breaks a rule. Nothing was sent.
        """
        if mask is not None:
            check_prefix(mask)
            ids = masked_ids(ids, mask)
        check_ids(self.communicator, self.config, ids)

    def sending(self, expand_x: torch.Tensor, index: torch.Tensor, counts: torch.Tensor) -> Bindings:
        """What the first half needs: results, where each goes, and how many there are.

        Raises:
            ArgumentError: there are more results than rows.
        """
        self.check_counts(self.communicator, expand_x.shape[0], counts)
        is_v1, rows = self.attributes.version == 1, expand_x.shape[0]
        known = rows if is_v1 or self.variant.exchange else min(rows, index.numel() // 3)
        return {"y": expand_x, "num_rows": known, "recv_offsets": counts, "triples": index}

    def summing(self, ids: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None) -> Bindings:
        """What the second half needs: the tokens' experts, and where the sums go."""
        if out is None:
            out = self.communicator.backend.empty((self.batch, self.config.hidden), self.variant.dtype)
        bindings: dict[str, Any] = {
            "topk_idx": ids,
            "num_tokens": self.batch,
            "out": out,
            "expand_idx": index,
        }
        if self.variant.waits:
            bindings["rank_table"] = self.rank_table
            bindings["num_performance_entries"] = self.config.num_ranks
        return bindings

    def execute(
        self,
        expand_x: torch.Tensor,
        ids: torch.Tensor,
        index: torch.Tensor,
        counts: torch.Tensor,
        tensors: Bindings,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs it, and returns (BS, H).

        Args:
            expand_x: (rows, H) expert outputs.
            ids: (BS, K) int32.
            index: assist_info_for_combine, or V1's expand_idx.
            counts: ep_send_counts.
            tensors: what else the variant's plan has holes for, by hole.
            out: where to write, None for a new tensor.
        """
        self.check_data(ids, tensors.get("mask"))  # type: ignore[arg-type]
        bindings = {**self.sending(expand_x, index, counts), **self.summing(ids, index, out), **tensors}
        self.communicator.run(self.variant, bindings)
        return bindings["out"]  # type: ignore[return-value]


def make_plan(a: CombineAttributes, elastic_info: torch.Tensor | None) -> CombinePlan:
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
    names = ("ep_world_size", "ep_rank_id")
    registry.check_membership(a.group_ep, "group_ep", a.ep_world_size, a.ep_rank_id, names)
    if a.tp_world_size == 2:
        names = ("tp_world_size", "tp_rank_id")
        registry.check_membership(a.group_tp, "group_tp", 2, a.tp_rank_id, names)
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
    )
    return CombinePlan(a, config, deployment_of(config, a.ep_rank_id, elastic_info), variant)


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
        "shared_expert_x": ((batch, hidden), dtype),
        "ori_x": ((batch, hidden), dtype),
        "const_expert_alpha_1": (alpha, dtype),
        "const_expert_alpha_2": (alpha, dtype),
        "const_expert_v": ((a.num_const, hidden), dtype),
        "performance_info": ((a.ep_world_size,), torch.int64),
        "residual_x": ((batch, 1, hidden), torch.bfloat16),
        "gamma": ((hidden,), torch.bfloat16),
    }
    for name, tensor in tensors.items():
        if tensor is not None:
            shape, wanted = expected[name]
            check_tensor(name, tensor, shape=shape, dtypes=(wanted,))
