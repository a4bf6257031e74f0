"""What the operators return, by shape and dtype alone. Sizes may be symbolic.

Where an argument breaks a rule the shapes are those of the nearest call that does not: the rules are for the
plan, which knows the product and the group. So y_dtype counts here, although A2 and A3 refuse it.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_triton.torch_npu_ops.calls.common import unless_empty
from moe_triton.torch_npu_ops.dtypes import dtype_of
from moe_triton.torch_npu_ops.plans import halves
from moe_triton.torch_npu_ops.plans.shapes import DispatchShapes, Output

Tensor = torch.Tensor


def _empty(like: Tensor, outputs: tuple[Output, ...]) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(shape, dtype=dtype) for shape, dtype in outputs)


def fake_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: Tensor | None = None,
    quant_mode: int = 0,
    version: int = 1,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The outputs of `npu_moe_distribute_dispatch`."""
    quantize = quant_mode == 2 or (version == 1 and scales is not None)
    shapes = DispatchShapes.of_call(
        version,
        (x.shape[0], x.shape[1], expert_ids.shape[1]),
        x.dtype,
        (ep_world_size, ep_rank_id),
        moe_expert_num,
        (options.get("shared_expert_num", 1), options.get("shared_expert_rank_num", 0)),
        options.get("global_bs", 0),
        tp=options.get("tp_world_size", 0),
        quantize=quantize,
        weights=unless_empty(options.get("expert_scales")) is not None,
        elastic=options.get("elastic_info") is not None,
    )
    rows, *others = shapes.outputs()
    return _empty(x, (_with_dtype(rows, options.get("y_dtype")), *others))


def _with_dtype(output: Output, number: int | None) -> Output:
    """An output in the format that a product with a choice of formats was asked for."""
    return output if number is None else (output[0], dtype_of("y_dtype", number))


def fake_dispatch_v2(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    """The outputs of `npu_moe_distribute_dispatch_v2`."""
    return fake_dispatch(*args, **options, version=2)


def fake_combine(expand_x: Tensor, expert_ids: Tensor, *args: Any, **options: Any) -> Tensor:
    """The output of a combine."""
    return expand_x.new_empty((expert_ids.shape[0], expand_x.shape[1]))


def fake_add_rms_norm(
    expand_x: Tensor, expert_ids: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of `npu_moe_distribute_combine_add_rms_norm`."""
    batch, hidden = expert_ids.shape[0], expand_x.shape[1]
    y = expand_x.new_empty((batch, 1, hidden), dtype=torch.bfloat16)
    rstd = expand_x.new_empty((batch, 1, 1), dtype=torch.float32)
    return y, rstd, torch.empty_like(y)


def fake_dispatch_setup(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The outputs of `npu_moe_distribute_dispatch_setup`."""
    is_shared = ep_rank_id < shared_expert_rank_num
    rows, *others = halves.dispatch_setup(
        (x.shape[0], x.shape[1], expert_ids.shape[1]),
        x.dtype,
        ep_world_size,
        1 if is_shared else moe_expert_num // (ep_world_size - shared_expert_rank_num),
        shared_expert_num,
        quant_mode == 2,
    )
    return _empty(x, (_with_dtype(rows, options.get("y_dtype")), *others))


def fake_dispatch_teardown(
    x: Tensor, y: Tensor, expert_ids: Tensor, comm_cmd_info: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, ...]:
    """The outputs of `npu_moe_distribute_dispatch_teardown`."""
    return fake_dispatch(x, expert_ids, *args, **options, version=2)[:4]


def fake_combine_setup(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    group_ep: str,
    ep_world_size: int,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The outputs of `npu_moe_distribute_combine_setup`."""
    return _empty(expand_x, halves.combine_setup((expand_x.shape[0], expand_x.shape[1]), ep_world_size))


def fake_combine_teardown(
    expand_x: Tensor, quant_expand_x: Tensor, expert_ids: Tensor, *args: Any, **options: Any
) -> Tensor:
    """The output of `npu_moe_distribute_combine_teardown`."""
    return fake_combine(expand_x, expert_ids)


def fake_barrier(x_ref: Tensor, *args: Any, **options: Any) -> None:
    """A barrier returns nothing as an operator: what it is ordered by is what it writes to."""


def fake_reset(elastic_info: Tensor, *args: Any, **options: Any) -> None:
    """A reset returns nothing."""
