"""torch_npu's words for what the library calls otherwise: the one table of them."""

from __future__ import annotations

from moe_triton.limits import Call

NAMES: dict[str, str] = {
    "num_ranks": "ep_world_size",
    "rank": "ep_rank_id",
    "group": "group_ep",
    "tp_group": "group_tp",
    "num_experts": "moe_expert_num",
    "num_shared_experts": "shared_expert_num",
    "num_shared_ranks": "shared_expert_rank_num",
    "num_zero_experts": "zero_expert_num",
    "num_copy_experts": "copy_expert_num",
    "num_const_experts": "const_expert_num",
    "topk_idx": "expert_ids",
    "topk_weights": "expert_scales",
    "smooth_scales": "scales",
    "active_mask": "x_active_mask",
    "packed_x": "y",
    "y": "expand_x",
    "origins": "assist_info_for_combine",
    "recv_offsets": "ep_send_counts",
    "exchange_counts": "tp_send_counts",
}
"""Arguments by our names."""

OURS = {theirs: ours for ours, theirs in NAMES.items()}

SIZES: dict[str, str] = {
    "num_tokens": "expert_ids.shape[0]",
    "num_max_tokens_per_rank": "expert_ids.shape[0]",
    "hidden": "x.shape[1]",
    "num_topk": "expert_ids.shape[1]",
    "num_special_experts": "zero_expert_num + copy_expert_num + const_expert_num",
}
"""What torch_npu's callers give by a tensor's shape, or in several arguments."""


def names_for(call: Call) -> dict[str, str]:
    """What the caller of this call knows arguments and sizes as, for `ArgumentError.renamed`."""
    names = NAMES | SIZES
    if call.is_combine:
        names["hidden"] = "expand_x.shape[1]"
    if call.global_bs:
        names["num_max_tokens_per_rank"] = "global_bs / ep_world_size"
    return names
