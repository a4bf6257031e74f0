"""The weighted sum in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_triton.kernels.fallbacks import elements_at
from moe_triton.kernels.own_rows import own_rows
from moe_triton.kernels.zones import in_zone, turn_cell
from moe_triton.reference.arithmetic import Floats, Mask, dequantize_blocks, weighted_sum


def weighted_sum_fallback(
    programs: int,
    *,
    slots: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    num_tokens: int,
    num_experts: int,
    HIDDEN: int,
    TOPK: int,
    NUM_SHARED: int,
    BLOCK: int,
    HAS_WEIGHTS: bool,
    CLEAR_TILE: int = 0,
    first_token: int = 0,
    slot_scales: torch.Tensor | None = None,
    expand_idx: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    recv_offsets: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
    shared_x: torch.Tensor | None = None,
    ori_x: torch.Tensor | None = None,
    alphas: torch.Tensor | None = None,
    const_v: torch.Tensor | None = None,
    token_stride: int = 0,
    slot_stride: int = 0,
    expert_stride: int = 0,
    index_stride: int = 0,
    own_results: int = 0,
    max_index: int = 0,
    first_expert: int = 0,
    num_local_experts: int = 0,
    num_ranks: int = 0,
    rank: int = 0,
    num_zero: int = 0,
    num_copy: int = 0,
    num_const: int = 0,
    zone: torch.Tensor | None = None,
    turned: torch.Tensor | None = None,
    zone_stride: int = 0,
    **_: object,
) -> None:
    """Sums tokens' combine slots, as `moe_triton.kernels.weighted_sum.weighted_sum_kernel` describes it."""
    turn_cell(zone, turned)
    slots = in_zone(slots, zone, zone_stride)
    if slot_scales is not None:
        slot_scales = in_zone(slot_scales, zone, zone_stride // 2)
    if tokens is not None and bounds is not None:
        begin, end = (min(max(bound, 0), num_tokens) for bound in bounds[:2].tolist())
        tokens = tokens[begin:end].long()
        tokens = tokens[(tokens >= 0) & (tokens < num_tokens)]
    else:
        tokens = torch.arange(first_token, first_token + num_tokens)
    if active is not None:
        left_out = active[tokens] < 0
        if CLEAR_TILE:
            out[: (first_token + num_tokens) * HIDDEN].view(-1, HIDDEN)[tokens[left_out]] = 0
        tokens = tokens[~left_out]
    if not len(tokens):
        return

    def of_tokens(flat: torch.Tensor, width: int) -> torch.Tensor:
        return flat[: (first_token + num_tokens) * width].view(-1, width)[tokens]

    def load(places: torch.Tensor) -> torch.Tensor:
        if offsets is not None or recv_offsets is not None:  # not all in this tensor's memory
            rows = [elements_at(slots, place, HIDDEN) for place in places.tolist()]
            return torch.stack(rows).float() if rows else torch.zeros((0, HIDDEN))
        values = slots.unfold(0, HIDDEN, 1)[places]
        if slot_scales is not None:
            scales = slot_scales.unfold(0, HIDDEN // BLOCK, 1)[places // 2]
            values = dequantize_blocks(values, scales)
        return values.float()

    ids = of_tokens(topk_idx, TOPK).long()
    is_routed = (ids >= 0) & (ids < num_experts)
    if offsets is not None:
        places = of_tokens(offsets, TOPK + NUM_SHARED)
    elif expand_idx is None or recv_offsets is not None:
        places = tokens[:, None] * token_stride + torch.arange(TOPK + NUM_SHARED) * slot_stride
    else:
        index = of_tokens(expand_idx, TOPK).long().clamp(0, max_index - 1)
        shared = num_experts * expert_stride + tokens[:, None] * index_stride
        routed = torch.where(is_routed, ids, 0) * expert_stride + index * index_stride
        places = torch.cat([routed, shared], 1)
    if expand_idx is not None and recv_offsets is not None:
        numbers = of_tokens(expand_idx, TOPK).reshape(-1)
        place = (first_expert, num_local_experts, num_ranks, rank)
        kept, rows_of_kept = own_rows(ids.reshape(-1), numbers, recv_offsets, *place)
        places[kept // TOPK, kept % TOPK] = own_results + rows_of_kept * HIDDEN

    def entries() -> Iterator[tuple[Mask | None, Floats, Floats | None]]:
        weights = of_tokens(topk_weights, TOPK).numpy() if HAS_WEIGHTS else None
        for k in range(TOPK):
            values, applies = load(places[:, k]), is_routed[:, k]
            constant = ids[:, k] - num_experts - num_zero - num_copy
            if ori_x is not None and num_copy:
                is_copy = (constant < 0) & (constant >= -num_copy)
                values = torch.where(is_copy[:, None], of_tokens(ori_x, HIDDEN).float(), values)
                applies = applies | is_copy
            if ori_x is not None and alphas is not None and const_v is not None and num_const:
                is_constant = (constant >= 0) & (constant < num_const)
                a1, a2 = of_tokens(alphas, 2 * TOPK)[:, 2 * k : 2 * k + 2, None].unbind(1)
                v = const_v[: num_const * HIDDEN].view(-1, HIDDEN)[torch.where(is_constant, constant, 0)]
                made = a1 * of_tokens(ori_x, HIDDEN).float() + a2 * v.float()
                values = torch.where(is_constant[:, None], made, values)
                applies = applies | is_constant
            yield applies.numpy(), values.numpy(), None if weights is None else weights[:, k]
        for shared in range(TOPK, TOPK + NUM_SHARED):
            yield None, load(places[:, shared]).numpy(), None
        if shared_x is not None:
            yield None, of_tokens(shared_x, HIDDEN).float().numpy(), None

    sums = torch.from_numpy(weighted_sum((len(tokens), HIDDEN), entries()))
    out[: (first_token + num_tokens) * HIDDEN].view(-1, HIDDEN)[tokens] = sums.to(out.dtype)
