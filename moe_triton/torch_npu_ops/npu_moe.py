"""torch_npu's functions: names, orders and defaults are the interface (docs/operators.md, "Outputs").

Shapes: BS tokens of this rank, H hidden, K experts per token, M routed experts, S shared experts, R ranks of
shared experts, EP ranks, localE experts on this rank, A rows that a dispatch can deliver here, G = global_bs
or BS * EP. Errors: every function raises `ArgumentError` with a status code (161001 a required tensor is
missing, 161002 a type, dtype or group is wrong, 561002 a shape or an attribute is) before anything is sent,
`BufferStateError` where an earlier failure put the ranks out of step, and `CommunicationTimeoutError` where a
rank's data did not come in time.

Halves of dispatch and combine are for work in between (docs/operators.md, "Outputs of the halves").
torch_npu has them on other products only; here they follow the second version's rules. One of each kind may
be in flight per group and shape: a second setup raises `BufferStateError`, as does a teardown without one.
"""

from __future__ import annotations

from torch import Tensor

from moe_triton.operators.combine import (
    COMBINE,
    COMBINE_ADD_RMS_NORM,
    COMBINE_SETUP,
    COMBINE_TEARDOWN,
    COMBINE_V1,
)
from moe_triton.operators.dispatch import DISPATCH, DISPATCH_SETUP, DISPATCH_TEARDOWN, DISPATCH_V1
from moe_triton.torch_npu_ops.halves import (
    CombineSetupPlan,
    CombineTeardownPlan,
    DispatchSetupPlan,
    DispatchTeardownPlan,
)
from moe_triton.torch_npu_ops.operators import planned
from moe_triton.torch_npu_ops.plans import CombinePlan, DispatchPlan

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
        comm_alg: "", which None is too, "fullmesh_v1", "fullmesh_v2" or "hierarchy"; A2, and what they take:
            docs/from-torch-npu.md.
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


@planned(DISPATCH_SETUP, DispatchSetupPlan)
def npu_moe_distribute_dispatch_setup(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    comm_type: int = 0,
    comm_alg: str | None = "",
    y_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sends the rows of a dispatch; `npu_moe_distribute_dispatch_teardown` receives them.

    Args:
        x: (BS, H) bf16 or fp16; free again when this returns.
        expert_ids: (BS, K) int32.
        group_ep: name of the expert-parallel group.
        ep_world_size: EP.
        ep_rank_id: this rank.
        moe_expert_num: M.
        scales: (S + M, H) fp32, only with quant_mode 2. S counts here, and in the outputs, even with R = 0.
        x_active_mask: (BS,) or (BS, K) bool.
        expert_shard_type: 0.
        shared_expert_num: S.
        shared_expert_rank_num: R.
        quant_mode: 0 or 2.
        global_bs: 0, or EP times the most tokens of a rank.
        comm_type: 0: as the scheme does.
        comm_alg: "", which None is too, "fullmesh_v1" or "fullmesh_v2".
        y_dtype: refused on A2 and A3.

    Returns:
        y (BS * (K + S), Hs) in x's dtype or int8, without contents; expand_idx (BS * K,) int32;
        comm_cmd_info ((BS * (K + S) + EP * localE) * 16,) int32, with localE = 1 on ranks of shared experts:
        the ticket for the teardown.

    Examples:
        >>> y, expand_idx, ticket = torch_npu.npu_moe_distribute_dispatch_setup(x, expert_ids, *group)
        >>> received = torch_npu.npu_moe_distribute_dispatch_teardown(x, y, expert_ids, ticket, *group)
    """
    return npu_moe_distribute_dispatch_setup.run(locals())


@planned(DISPATCH_TEARDOWN, DispatchTeardownPlan)
def npu_moe_distribute_dispatch_teardown(
    x: Tensor,
    y: Tensor,
    expert_ids: Tensor,
    comm_cmd_info: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_type: int = 0,
    comm_alg: str | None = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Waits for the rows of the dispatch that is set up, and arranges them.

    Args:
        x: (BS, H), as in the setup.
        y: of the setup.
        expert_ids: (BS, K) int32, as in the setup.
        comm_cmd_info: of the setup.
        group_ep: as in the setup, like all that follow.
        ep_world_size: EP.
        ep_rank_id: this rank.
        moe_expert_num: M.
        expert_shard_type: 0.
        shared_expert_num: S.
        shared_expert_rank_num: R.
        quant_mode: 0 or 2.
        global_bs: as in the setup.
        expert_token_nums_type: 1 counts, 0 running totals.
        comm_type: 0.
        comm_alg: as in the setup.

    Returns:
        expand_x (A, H), dynamic_scales (A,) fp32, assist_info_for_combine (A * 128,) int32,
        expert_token_nums (localE,) int64: those of `npu_moe_distribute_dispatch_v2`, bit for bit.

    Examples:
        >>> y, expand_idx, ticket = torch_npu.npu_moe_distribute_dispatch_setup(x, expert_ids, *group)
        >>> rows, scales, assist_info, counts = torch_npu.npu_moe_distribute_dispatch_teardown(
        ...     x, y, expert_ids, ticket, *group
        ... )
    """
    return npu_moe_distribute_dispatch_teardown.run(locals())


@planned(COMBINE_SETUP, CombineSetupPlan)
def npu_moe_distribute_combine_setup(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_type: int = 0,
    comm_alg: str | None = "",
) -> tuple[Tensor, Tensor]:
    """Sends the rows of a combine; `npu_moe_distribute_combine_teardown` sums them.

    Args:
        expand_x: (A, H) expert outputs; free again when this returns.
        expert_ids: (BS, K) int32.
        assist_info_for_combine: of dispatch_teardown or dispatch_v2, whole and unchanged.
        group_ep: name of the expert-parallel group.
        ep_world_size: EP.
        ep_rank_id: this rank.
        moe_expert_num: M.
        expert_shard_type: 0.
        shared_expert_num: S.
        shared_expert_rank_num: R.
        global_bs: as in dispatch.
        comm_quant_mode: 0, or 2: results travel as int8 in blocks of 8.
        comm_type: 0: as the scheme does.
        comm_alg: as in dispatch.

    Returns:
        quant_expand_x (A, Align512(Align32(H) + Align8(H) / 8 * 4)) int8, without contents;
        comm_cmd_info ((A + EP) * 16,) int32: the ticket for the teardown.

    Examples:
        >>> rows, _, assist_info, *_ = torch_npu.npu_moe_distribute_dispatch_v2(x, expert_ids, *group)
        >>> sent, ticket = torch_npu.npu_moe_distribute_combine_setup(rows, expert_ids, assist_info, *group)
        >>> out = torch_npu.npu_moe_distribute_combine_teardown(
        ...     rows, sent, expert_ids, assist_info, expert_scales, ticket, *group
        ... )
    """
    return npu_moe_distribute_combine_setup.run(locals())


@planned(COMBINE_TEARDOWN, CombineTeardownPlan)
def npu_moe_distribute_combine_teardown(
    expand_x: Tensor,
    quant_expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    expert_scales: Tensor | None,
    comm_cmd_info: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: Tensor | None = None,
    shared_expert_x: Tensor | None = None,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_type: int = 0,
    comm_alg: str | None = "",
) -> Tensor:
    """Waits for the rows of the combine that is set up, and sums them by weight.

    Args:
        expand_x: (A, H), as in the setup.
        quant_expand_x: of the setup.
        expert_ids: (BS, K) int32.
        expand_idx: (BS * K,) int32, of dispatch_setup, or assist_info_for_combine.
        expert_scales: (BS, K) fp32, or None for a sum without weights.
        comm_cmd_info: of the setup.
        group_ep: as in the setup, like all that follow.
        ep_world_size: EP.
        ep_rank_id: this rank.
        moe_expert_num: M.
        x_active_mask: as in dispatch_setup; output rows of inactive tokens are zeros.
        shared_expert_x: (BS, H), or (a, b, H) with a * b = BS, added without weight; only with R = 0.
        expert_shard_type: 0.
        shared_expert_num: S.
        shared_expert_rank_num: R.
        global_bs: as in the setup.
        comm_quant_mode: as in the setup.
        comm_type: 0.
        comm_alg: as in the setup.

    Returns:
        (BS, H) in expand_x's dtype, that of `npu_moe_distribute_combine_v2` bit for bit.

    Examples:
        >>> rows, _, assist_info, *_ = torch_npu.npu_moe_distribute_dispatch_v2(x, expert_ids, *group)
        >>> sent, ticket = torch_npu.npu_moe_distribute_combine_setup(rows, expert_ids, assist_info, *group)
        >>> out = torch_npu.npu_moe_distribute_combine_teardown(
        ...     rows, sent, expert_ids, assist_info, expert_scales, ticket, *group
        ... )
        >>> out.shape
        torch.Size([16, 7168])
    """
    return npu_moe_distribute_combine_teardown.run(locals())
