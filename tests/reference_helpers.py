"""Deployments of the reference: shapes of outputs (docs/operators.md, "Outputs"), and ranks that are lost."""

from __future__ import annotations

from collections.abc import Sequence

from moe_triton.reference import Deployment


def receive_capacity(deployment: Deployment, rank: int, *, batch: int, topk: int, global_bs: int = 0) -> int:
    """Rows that a rank has room for (A)."""
    tokens = global_bs or batch * deployment.ep_world_size
    routed = tokens * min(deployment.num_local_experts, topk)
    shared = 0
    if deployment.shared_expert_rank_num:
        shared = tokens // deployment.shared_expert_rank_num
        if deployment.version != 1:
            sources = -(-deployment.ep_world_size // deployment.num_replicas)
            shared = tokens // deployment.ep_world_size * sources
    if deployment.elastic_info is not None:
        return max(routed, shared)
    return shared if deployment.is_shared_rank(rank) else routed


def dispatch_shapes(
    deployment: Deployment,
    rank: int,
    *,
    batch: int,
    hidden: int,
    topk: int,
    global_bs: int = 0,
    has_expert_scales: bool = False,
    num_servers: int | None = None,
) -> dict[str, tuple[int, ...]]:
    """The shapes of the seven outputs, in order. With elastic_info they follow the original sizes.

    Args:
        deployment: what all ranks pass alike.
        rank: of the expert-parallel group, as it was originally.
        batch: BS of this rank.
        hidden: H.
        topk: K.
        global_bs: as passed.
        has_expert_scales: whether expert_scales is.
        num_servers: that the group has; None for those of eight ranks that it fills.
    """
    capacity = receive_capacity(deployment, rank, batch=batch, topk=topk, global_bs=global_bs)
    local = deployment.num_local_experts
    if deployment.elastic_info is None:
        local = deployment.experts_on(rank)
    tp, size = deployment.num_tp_ranks, deployment.ep_world_size
    num_counts = size * local * tp
    if has_expert_scales:
        tokens = global_bs or batch * size
        servers = size // 8 if num_servers is None else num_servers
        num_counts = max(num_counts, size * local + 2 * tokens * topk * servers)
    index = batch * topk if deployment.version == 1 else max(batch * topk, capacity * 128)
    return {
        "expand_x": (capacity * tp, hidden),
        "dynamic_scales": (capacity * tp,),
        "expand_idx" if deployment.version == 1 else "assist_info_for_combine": (index,),
        "expert_token_nums": (local,),
        "ep_recv_counts": (num_counts,),
        "tp_recv_counts": (deployment.tp_world_size,),
        "expand_scales": (capacity if has_expert_scales else 0,),
    }


def elastic_info_of(deployment: Deployment, lost: Sequence[int]) -> tuple[int, ...]:
    """The words of elastic_info for a deployment that loses ranks and renumbers the others in order.

    Each rank takes its experts with it; the routed ones are renumbered.
    """
    size = deployment.ep_world_size
    left = [rank for rank in range(size) if rank not in set(lost)]
    shared = sum(deployment.is_shared_rank(rank) for rank in left)
    experts = deployment.num_local_experts * (len(left) - shared)
    to_new = [left.index(rank) if rank in left else -1 for rank in range(size)]
    to_original = left + [-1] * (size - len(left))
    return (1, len(left), shared, experts, *to_new, *to_original)
