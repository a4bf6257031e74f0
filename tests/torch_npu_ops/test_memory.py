"""What a plan says of its memory before anything is made, and what a communicator then has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_triton import torch_npu_ops as ops
from moe_triton.core.errors import ArgumentError
from moe_triton.processes import RankGroup
from moe_triton.schemes.buffer_size import needed_buffer_bytes, needed_exchange_bytes
from moe_triton.torch_npu_ops import registry
from tests.torch_npu_ops.setting import fresh

Groups = Callable[[int], RankGroup]
TOKENS, HIDDEN, TOPK, EXPERTS = 16, 1024, 8, 16


def plans(rank: int, num_ranks: int, options: dict[str, Any]) -> tuple[Any, Any, tuple[torch.Tensor, ...]]:
    """Both plans of a round, and tensors of the shapes of its outputs."""
    x = torch.zeros(TOKENS, HIDDEN).bfloat16()
    ids = torch.arange(TOPK, dtype=torch.int32).expand(TOKENS, TOPK).contiguous()
    group = (ops.group_name(), num_ranks, rank, EXPERTS)
    common = {"comm_alg": options.get("comm_alg", "")}
    quant_mode = options.get("quant_mode", 0)
    dispatch = ops.npu_moe_distribute_dispatch_v2.plan(
        x,
        ids,
        *group,
        quant_mode=quant_mode,
        scales=torch.ones(EXPERTS, HIDDEN) if options.get("smooth") else None,
        **common,
    )
    outputs = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in dispatch.symbols.specs())
    y = torch.zeros(outputs[0].shape).bfloat16()
    combine = ops.npu_moe_distribute_combine_v2.plan(
        y,
        ids,
        outputs[2],
        outputs[4],
        None,
        *group,
        comm_quant_mode=options.get("comm_quant_mode", 0),
        **common,
    )
    return dispatch, combine, (*outputs, x)


def memory_of(rank: int, num_ranks: int, options: dict[str, Any]) -> list[str]:
    wrong = []
    with fresh():
        dispatch, combine, outputs = plans(rank, num_ranks, options)
        if registry._communicators.get(ops.group_name()):
            wrong.append("planning made something")
        needed = needed_buffer_bytes(dispatch.config)
        if not dispatch.window_bytes == combine.window_bytes == needed:
            wrong.append(f"window of {dispatch.window_bytes} bytes, the formula has {needed}")
        output_bytes = sum(t.numel() * t.element_size() for t in outputs)
        private = output_bytes + dispatch.workspace_bytes + combine.workspace_bytes
        if private >= 2 * output_bytes:
            wrong.append(f"{private} private bytes for {output_bytes} of outputs")
        if dispatch.communicator.layout.data_bytes != needed:
            wrong.append("another window than planned")
    return wrong


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quant_mode": 2},
        {"quant_mode": 2, "smooth": True},
        {"comm_quant_mode": 2},
        {"comm_alg": "fullmesh_v2", "quant_mode": 2},
    ],
    ids=str,
)
def test_windows_are_the_formula_and_private_memory_less_than_twice_the_outputs(
    ranks: Groups, options: dict[str, Any]
) -> None:
    assert ranks(2).run(memory_of, options) == [[], []]


def memory_of_a_pair(process: int, num_processes: int) -> list[str]:
    """Two ranks of two tensor-parallel processes each: what a plan says, and what HCCL_BUFFSIZE bounds."""
    wrong = []
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][process % 2]
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][process // 2]
    with fresh(), pytest.MonkeyPatch.context() as patch:
        x = torch.zeros(TOKENS, HIDDEN).bfloat16()
        ids = torch.zeros(TOKENS, 1, dtype=torch.int32)
        group = (ops.group_name(across), 2, process // 2, 2)
        options = {"group_tp": ops.group_name(pair), "tp_world_size": 2, "tp_rank_id": process % 2}
        plan = ops.npu_moe_distribute_dispatch_v2.plan(x, ids, *group, **options)
        needed = needed_buffer_bytes(plan.config), needed_exchange_bytes(plan.config)
        if plan.window_bytes != sum(needed):
            wrong.append(f"windows of {plan.window_bytes} bytes, the formulas have {needed}")
        made = plan.communicator
        if (made.layout.data_bytes, made.context.exchange.data_bytes) != needed:
            wrong.append("other windows than planned")
        ops.release(group[0])
        larger, smaller = torch.zeros(512, 8192).bfloat16(), torch.zeros(512, 1, dtype=torch.int32)
        patch.setenv("HCCL_BUFFSIZE", "64")
        one_window = ops.npu_moe_distribute_dispatch_v2.plan(larger, smaller, *group, global_bs=0)
        if one_window.window_bytes > 64 << 20:
            wrong.append("the group's own window is too large for this test")
        with pytest.raises(ArgumentError, match="the window of tensor parallelism needs"):
            ops.npu_moe_distribute_dispatch_v2.plan(larger, smaller, *group, **options)
    return wrong


def test_the_window_between_tensor_parallel_ranks_is_in_the_plan(ranks: Groups) -> None:
    assert ranks(4).run(memory_of_a_pair) == [[]] * 4
