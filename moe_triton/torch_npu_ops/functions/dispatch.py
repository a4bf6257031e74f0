"""torch_npu's dispatch, both versions."""

from __future__ import annotations

from torch import Tensor

from moe_triton.operators.dispatch import DISPATCH, DISPATCH_V1
from moe_triton.runtime.operator_plan import DispatchPlan
from moe_triton.torch_npu_ops.operators import planned

Seven = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@planned(DISPATCH_V1, DispatchPlan)
def npu_moe_distribute_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
) -> Seven:
    """Dispatch, first version.

    Args:
        x: (BS, H) bf16 or fp16.
        expert_ids: (BS, K) int32, distinct in a row; -1 for no expert.
        group_ep: name of the expert-parallel group (`group_name`).
        ep_world_size: EP.
        ep_rank_id: this rank.
        moe_expert_num: M.
        scales: (S + M, H) fp32 smooth scales ((M, H) without shared experts); rows are then quantised.
        x_active_mask: refused on A3, where the first version has none; on A2 as in the second.
        expert_scales: (BS, K) fp32, to travel with the rows; an empty one counts as none.
        group_tp: name of the tensor-parallel group where tp_world_size is 2; otherwise not looked at.
        tp_world_size: 0, 1 or 2.
        tp_rank_id: this rank among two; otherwise not looked at.
        expert_shard_type: 0.
        shared_expert_num: 1.
        shared_expert_rank_num: R, ranks [0, R) hold the shared expert.
        quant_mode: 0, or 2 for int8 with a dynamic scale per token.
        global_bs: 0, or EP times the most tokens of a rank.
        expert_token_nums_type: 1 counts, 0 running totals.

    Returns:
        expand_x (A * max(tp, 1), H), dynamic_scales (A * max(tp, 1),) fp32, expand_idx (BS * K,) int32,
        expert_token_nums (localE,) int64, ep_recv_counts int32, tp_recv_counts (tp,) int32,
        expand_scales (A,) fp32.

    Examples:
        >>> outputs = torch_npu.npu_moe_distribute_dispatch(x, expert_ids, *group)
        >>> expand_x, dynamic_scales, expand_idx, expert_token_nums = outputs[:4]
        >>> int(expert_token_nums.sum())
        128
    """
    return npu_moe_distribute_dispatch.run(locals())


@planned(DISPATCH, DispatchPlan)
def npu_moe_distribute_dispatch_v2(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    elastic_info: Tensor | None = None,
    performance_info: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str | None = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
    y_dtype: int | None = None,
    x_dtype: int | None = None,
    scales_dtype: int | None = None,
) -> Seven:
    """Dispatch, second version. What it shares with `npu_moe_distribute_dispatch` means the same, save:

    Args:
        x: (BS, H) bf16 or fp16.
        expert_ids: (BS, K) int32; ids from M on are zero, copy and constant experts, never sent.
        group_ep: name of the expert-parallel group.
        ep_world_size: EP.
        ep_rank_id: this rank.
        moe_expert_num: M.
        scales: (S + M, H) fp32, only with quant_mode 2.
        x_active_mask: (BS,) bool with its True first, or (BS, K) bool.
        expert_scales: (BS, K) fp32; an empty one counts as none.
        elastic_info: (4 + 2 * EP,) int32: which ranks are left (docs/operators.md, "Lost ranks").
        performance_info: (EP,) int64, raised to the microseconds waited for each source rank, 1 at least.
        group_tp: name of the tensor-parallel group where tp_world_size is 2; otherwise not looked at.
        tp_world_size: 0, 1 or 2.
        tp_rank_id: this rank among two; otherwise not looked at.
        expert_shard_type: 0.
        shared_expert_num: S, 0 to 4.
        shared_expert_rank_num: R.
        quant_mode: 0 or 2.
        global_bs: 0, or EP times the most tokens of a rank.
        expert_token_nums_type: 1 or 0.
        comm_alg: "", which None is too, "fullmesh_v1" or "fullmesh_v2"; A2: docs/from-torch-npu.md.
        zero_expert_num: zero experts.
        copy_expert_num: copy experts.
        const_expert_num: constant experts.
        y_dtype: a torch.dtype, or torch_npu's integer for one; refused on A2 and A3, as are the next two.
        x_dtype: see y_dtype.
        scales_dtype: see y_dtype.

    Returns:
        As `npu_moe_distribute_dispatch`, with assist_info_for_combine (max(BS * K, A * 128),) int32 in third
        place: origins (source rank, token, k) at 3 * row.

    Examples:
        >>> outputs = torch_npu.npu_moe_distribute_dispatch_v2(x, expert_ids, *group, quant_mode=2)
        >>> expand_x, dynamic_scales, assist_info, expert_token_nums = outputs[:4]
        >>> expand_x.dtype
        torch.int8
    """
    return npu_moe_distribute_dispatch_v2.run(locals())
