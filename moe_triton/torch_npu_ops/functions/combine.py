"""torch_npu's combine, both versions, and the one that ends in a norm."""

from __future__ import annotations

from torch import Tensor

from moe_triton.operators.combine import COMBINE, COMBINE_ADD_RMS_NORM, COMBINE_V1
from moe_triton.runtime.operator_plan import CombinePlan
from moe_triton.torch_npu_ops.operators import planned


@planned(COMBINE_V1, CombinePlan)
def npu_moe_distribute_combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor | None,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    activation_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    group_list: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_x: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    out_dtype: int = 0,
    comm_quant_mode: int = 0,
    group_list_type: int = 0,
) -> Tensor:
    """Combine, first version: finds results by ``expert_ids`` and ``expand_idx``.

    Args:
        expand_x: (A * max(tp, 1), H) expert outputs, in the order of dispatch's rows.
        expert_ids: (BS, K) int32, as dispatched.
        expand_idx: (BS * K,) or (BS, K) int32, of dispatch.
        ep_send_counts: dispatch's ep_recv_counts.
        expert_scales: (BS, K) fp32 routing weights, or None for a sum without weights.
        group_ep: name of the expert-parallel group.
        ep_world_size: EP.
        ep_rank_id: this rank.
        moe_expert_num: M.
        tp_send_counts: dispatch's tp_recv_counts where tp_world_size is 2; otherwise not looked at.
        x_active_mask: refused on A3, where the first version has none; on A2 as in dispatch.
        activation_scale: refused, as are weight_scale and group_list.
        weight_scale: see activation_scale.
        group_list: see activation_scale.
        expand_scales: not read on A3.
        shared_expert_x: refused: the first version would drop it.
        group_tp: name of the tensor-parallel group where tp_world_size is 2; otherwise not looked at.
        tp_world_size: 0, 1 or 2.
        tp_rank_id: this rank among two; otherwise not looked at.
        expert_shard_type: 0.
        shared_expert_num: 1.
        shared_expert_rank_num: R.
        global_bs: as in dispatch.
        out_dtype: 0.
        comm_quant_mode: 0, or 2: results travel as int8 in blocks of 8.
        group_list_type: 0.

    Returns:
        (BS, H) in expand_x's dtype.

    Examples:
        >>> rows, _, expand_idx, _, counts, _, _ = torch_npu.npu_moe_distribute_dispatch(
        ...     x, expert_ids, *group
        ... )
        >>> out = torch_npu.npu_moe_distribute_combine(
        ...     rows, expert_ids, expand_idx, counts, expert_scales, *group
        ... )
    """
    return npu_moe_distribute_combine.run(locals())


@planned(COMBINE, CombinePlan)
def npu_moe_distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor | None,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_x: Tensor | None = None,
    elastic_info: Tensor | None = None,
    ori_x: Tensor | None = None,
    const_expert_alpha_1: Tensor | None = None,
    const_expert_alpha_2: Tensor | None = None,
    const_expert_v: Tensor | None = None,
    performance_info: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_alg: str | None = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> Tensor:
    """Combine, second version. What it shares with `npu_moe_distribute_combine` means the same, save:

    Args:
        expand_x: (A * max(tp, 1), H) expert outputs, or more rows.
        expert_ids: (BS, K) int32.
        assist_info_for_combine: of dispatch, at least (A * 128,) int32, on A2 (BS * K,): where each row goes.
        ep_send_counts: dispatch's ep_recv_counts.
        expert_scales: (BS, K) fp32, or None.
        group_ep: name of the expert-parallel group.
        ep_world_size: EP.
        ep_rank_id: this rank.
        moe_expert_num: M.
        tp_send_counts: dispatch's tp_recv_counts where tp_world_size is 2; otherwise not looked at.
        x_active_mask: as in dispatch; output rows of inactive tokens are zeros.
        expand_scales: not read on A3.
        shared_expert_x: (BS, H), or (a, b, H) with a * b = BS: a shared expert's outputs, added without
            weight; only with R = 0.
        elastic_info: as in dispatch.
        ori_x: (BS, H), the tokens, for copy and constant experts.
        const_expert_alpha_1: (C,) as it is, or (C, H): both alphas by softmax of two dot products.
        const_expert_alpha_2: like const_expert_alpha_1.
        const_expert_v: (C, H).
        performance_info: as in dispatch.
        group_tp: name of the tensor-parallel group where tp_world_size is 2; otherwise not looked at.
        tp_world_size: 0, 1 or 2.
        tp_rank_id: this rank among two; otherwise not looked at.
        expert_shard_type: 0.
        shared_expert_num: S.
        shared_expert_rank_num: R.
        global_bs: as in dispatch.
        comm_quant_mode: 0 or 2.
        comm_alg: as in dispatch.
        zero_expert_num: as in dispatch.
        copy_expert_num: as in dispatch.
        const_expert_num: as in dispatch.

    Returns:
        (BS, H) in expand_x's dtype.

    Examples:
        >>> rows, _, assist_info, _, counts, _, _ = torch_npu.npu_moe_distribute_dispatch_v2(
        ...     x, expert_ids, *group
        ... )
        >>> out = torch_npu.npu_moe_distribute_combine_v2(
        ...     rows, expert_ids, assist_info, counts, expert_scales, *group
        ... )
    """
    return npu_moe_distribute_combine_v2.run(locals())


@planned(COMBINE_ADD_RMS_NORM, CombinePlan)
def npu_moe_distribute_combine_add_rms_norm(
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor | None,
    residual_x: Tensor,
    gamma: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    activation_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    group_list: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_x: Tensor | None = None,
    elastic_info: Tensor | None = None,
    ori_x: Tensor | None = None,
    const_expert_alpha_1: Tensor | None = None,
    const_expert_alpha_2: Tensor | None = None,
    const_expert_v: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    out_dtype: int = 0,
    comm_quant_mode: int = 0,
    group_list_type: int = 0,
    comm_alg: str | None = "",
    norm_eps: float = 1e-6,
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine of the second version, added to a residual and normalised.

    What it computes is in docs/operators.md, "Arithmetic of combine".

    Args are those of `npu_moe_distribute_combine_v2` (``expand_idx`` is dispatch_v2's third output), and:

    Args:
        residual_x: (BS, 1, H) bf16.
        gamma: (H,) bf16.
        norm_eps: added to the mean square.

    Returns:
        y (BS, 1, H) bf16, rstd (BS, 1, 1) fp32, x (BS, 1, H) bf16: the normalised sum, the reciprocal of its
        root mean square, and the sum itself.

    Examples:
        >>> rows, _, assist_info, _, counts, _, _ = torch_npu.npu_moe_distribute_dispatch_v2(
        ...     x, expert_ids, *group
        ... )
        >>> residual, gamma = torch.zeros(16, 1, 7168).bfloat16(), torch.ones(7168).bfloat16()
        >>> y, rstd, sums = torch_npu.npu_moe_distribute_combine_add_rms_norm(
        ...     rows, expert_ids, assist_info, counts, expert_scales, residual, gamma, *group
        ... )
    """
    return npu_moe_distribute_combine_add_rms_norm.run(locals())
