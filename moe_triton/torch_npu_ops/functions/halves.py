"""Dispatch and combine in two halves, for work in between (docs/operators.md, "Outputs of the halves").

torch_npu has them on other products only; here they follow the second version's rules. One of each
kind may be in flight per group and shape: a second setup raises `BufferStateError`, as does a teardown
without one.
"""

from __future__ import annotations

from torch import Tensor

from moe_triton.operators.combine import COMBINE_SETUP, COMBINE_TEARDOWN
from moe_triton.operators.dispatch import DISPATCH_SETUP, DISPATCH_TEARDOWN
from moe_triton.torch_npu_ops.halves import (
    CombineSetupPlan,
    CombineTeardownPlan,
    DispatchSetupPlan,
    DispatchTeardownPlan,
)
from moe_triton.torch_npu_ops.operators import planned


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
