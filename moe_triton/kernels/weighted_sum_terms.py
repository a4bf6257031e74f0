"""What a token's entries add to its weighted sum: the parts of the kernel in `weighted_sum`.

Shape symbols and arithmetic are those of that module. ``cols`` are the columns of a tile, ``blocks`` the
numbers of its quantised blocks.
"""

from __future__ import annotations

from moe_triton.kernels.clear import clear_row
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.own_rows import own_row


@triton.jit
def tile_of(table, token, NUM: tl.constexpr, WANTED: tl.constexpr):
    """A token's numbers of a table, all in one load; None where not wanted or without a table."""
    if table is None or not WANTED:  # noqa: SIM108 - a conditional expression compiles to a tensor
        tile = None
    else:
        tile = tl.load(table + token * NUM + tl.arange(0, NUM))
    return tile


@triton.jit
def _number(table, tile, token, k, NUM: tl.constexpr):
    """Number k of a token: from its tile, where there is one, otherwise from memory."""
    return tl.load(table + token * NUM + k) if tile is None else tl.get_element(tile, (k,))


@triton.jit
def _load_slot(slots, slot_scales, offset, cols, blocks):
    value = tl.load(slots + offset + cols).to(tl.float32)
    if slot_scales is not None:
        scales = tl.load(slot_scales + offset // 2 + blocks)  # of 2 bytes, as slots are of 1
        value = (value * scales.to(tl.float32)).to(scales.dtype).to(tl.float32)
    return value


@triton.jit
def _add_routed(
    acc, token, k, expert, slots, slot_scales, topk_weights, expand_idx, offsets, recv_offsets, token_stride,
    slot_stride, expert_stride, index_stride, own_results, num_experts, max_index, first_expert,
    num_local_experts, num_ranks, rank, cols, blocks, weight_tile, index_tile, offset_tile,
    HIDDEN: tl.constexpr, TOPK: tl.constexpr, NUM_SHARED: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    is_routed = (expert >= 0) & (expert < num_experts)
    if offsets is not None:
        offset = _number(offsets, offset_tile, token, k, TOPK + NUM_SHARED)
    elif recv_offsets is not None:
        index = _number(expand_idx, index_tile, token, k, TOPK)
        row = own_row(expert, index, recv_offsets, first_expert, num_local_experts, num_ranks, rank)
        offset = tl.where(row >= 0, own_results + row * HIDDEN, token * token_stride + k * slot_stride)
    elif expand_idx is None:
        offset = token * token_stride + k * slot_stride
    else:
        # neither an id nor an index may become an address outside the slots
        row = tl.where(is_routed, expert, 0).to(tl.int64)
        index = _number(expand_idx, index_tile, token, k, TOPK)
        index = tl.minimum(tl.maximum(index, 0), max_index - 1)
        offset = row * expert_stride + index.to(tl.int64) * index_stride
    # adding +0 changes no sum that started from +0, so it stands for adding nothing
    value = tl.where(is_routed, _load_slot(slots, slot_scales, offset, cols, blocks), 0.0)
    if HAS_WEIGHTS:
        value = value * tl.where(is_routed, _number(topk_weights, weight_tile, token, k, TOPK), 0.0)
    return acc + value


@triton.jit
def _add_special(
    acc, token, k, special, topk_weights, ori_x, alphas, const_v, num_zero, num_copy, num_const, cols,
    weight_tile,
    HIDDEN: tl.constexpr, TOPK: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    entry = token * TOPK + k
    constant = special - num_zero - num_copy
    weight = 1.0
    if HAS_WEIGHTS:
        weight = _number(topk_weights, weight_tile, token, k, TOPK)
    if (special < num_zero) | (constant >= num_const):
        acc += 0.0
    elif constant < 0:
        acc += tl.load(ori_x + token * HIDDEN + cols).to(tl.float32) * weight
    else:
        row = constant.to(tl.int64) * HIDDEN
        value = tl.load(alphas + entry * 2) * tl.load(ori_x + token * HIDDEN + cols).to(tl.float32)
        value += tl.load(alphas + entry * 2 + 1) * tl.load(const_v + row + cols).to(tl.float32)
        acc += value * weight
    return acc


@triton.jit
def sum_routed(
    token, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets, recv_offsets, token_stride,
    slot_stride, expert_stride, index_stride, own_results, num_experts, max_index, first_expert,
    num_local_experts, num_ranks, rank, cols, blocks, id_tile, weight_tile, index_tile, offset_tile,
    HIDDEN: tl.constexpr, TOPK: tl.constexpr, NUM_SHARED: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """The sum over a token's entries, special experts adding nothing."""
    acc = tl.zeros(cols.shape, tl.float32)
    # unrolled, a CPU keeps the sum in registers; rolled, an AI core double-buffers the slots
    if UNROLL:
        for k in tl.static_range(TOPK):
            expert = tl.load(topk_idx + token * TOPK + k)
            acc = _add_routed(
                acc, token, k, expert, slots, slot_scales, topk_weights, expand_idx, offsets, recv_offsets,
                token_stride, slot_stride, expert_stride, index_stride, own_results, num_experts, max_index,
                first_expert, num_local_experts, num_ranks, rank, cols, blocks, weight_tile, index_tile,
                offset_tile, HIDDEN, TOPK, NUM_SHARED, HAS_WEIGHTS,
            )  # fmt: skip
    else:
        for k in range(TOPK):
            expert = _number(topk_idx, id_tile, token, k, TOPK)
            acc = _add_routed(
                acc, token, k, expert, slots, slot_scales, topk_weights, expand_idx, offsets, recv_offsets,
                token_stride, slot_stride, expert_stride, index_stride, own_results, num_experts, max_index,
                first_expert, num_local_experts, num_ranks, rank, cols, blocks, weight_tile, index_tile,
                offset_tile, HIDDEN, TOPK, NUM_SHARED, HAS_WEIGHTS,
            )  # fmt: skip
    return acc


@triton.jit
def sum_with_special(
    token, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets, recv_offsets, token_stride,
    slot_stride, expert_stride, index_stride, own_results, num_experts, max_index, first_expert,
    num_local_experts, num_ranks, rank, ori_x, alphas, const_v, num_zero, num_copy, num_const, cols, blocks,
    weight_tile, index_tile, offset_tile,
    HIDDEN: tl.constexpr, TOPK: tl.constexpr, NUM_SHARED: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """The sum over a token's entries, special experts included."""
    acc = tl.zeros(cols.shape, tl.float32)
    for k in range(TOPK):
        expert = tl.load(topk_idx + token * TOPK + k)
        if expert < num_experts:
            acc = _add_routed(
                acc, token, k, expert, slots, slot_scales, topk_weights, expand_idx, offsets, recv_offsets,
                token_stride, slot_stride, expert_stride, index_stride, own_results, num_experts, max_index,
                first_expert, num_local_experts, num_ranks, rank, cols, blocks, weight_tile, index_tile,
                offset_tile, HIDDEN, TOPK, NUM_SHARED, HAS_WEIGHTS,
            )  # fmt: skip
        else:
            acc = _add_special(
                acc, token, k, expert - num_experts, topk_weights, ori_x, alphas, const_v, num_zero, num_copy,
                num_const, cols, weight_tile, HIDDEN, TOPK, HAS_WEIGHTS,
            )  # fmt: skip
    return acc


@triton.jit
def store_sum(
    acc, token, slots, slot_scales, shared_x, out, offsets, first_shared, shared_stride, cols, blocks,
    offset_tile,
    HIDDEN: tl.constexpr, TOPK: tl.constexpr, NUM_SHARED: tl.constexpr,
):  # fmt: skip
    """Add what has no weight, and write the token's result."""
    for s in tl.static_range(NUM_SHARED):
        if offsets is None:
            offset = first_shared + s * shared_stride
        else:
            offset = _number(offsets, offset_tile, token, TOPK + s, TOPK + NUM_SHARED)
        acc += _load_slot(slots, slot_scales, offset, cols, blocks)
    if shared_x is not None:
        acc += tl.load(shared_x + token * HIDDEN + cols).to(tl.float32)
    tl.store(out + token * HIDDEN + cols, acc.to(out.dtype.element_ty))


@triton.jit
def has_special(topk_idx, token, num_experts, TOPK: tl.constexpr):
    """Whether any of a token's ids lies behind the routed experts'."""
    largest = tl.load(topk_idx + token * TOPK)
    for k in tl.static_range(1, TOPK):
        largest = tl.maximum(largest, tl.load(topk_idx + token * TOPK + k))
    return largest >= num_experts


@triton.jit
def _sum_columns(
    token, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets, recv_offsets, shared_x, ori_x,
    alphas, const_v, out, token_stride, slot_stride, expert_stride, index_stride, own_results, num_experts,
    max_index, first_expert, num_local_experts, num_ranks, rank, num_zero, num_copy, num_const, first_shared,
    shared_stride, cols, blocks, id_tile, weight_tile, index_tile, offset_tile,
    HIDDEN: tl.constexpr, TOPK: tl.constexpr, NUM_SHARED: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    # tokens with special experts take a branch of their own: the others stay fast
    if const_v is None:
        acc = sum_routed(
            token, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets, recv_offsets,
            token_stride, slot_stride, expert_stride, index_stride, own_results, num_experts, max_index,
            first_expert, num_local_experts, num_ranks, rank, cols, blocks, id_tile, weight_tile, index_tile,
            offset_tile, HIDDEN, TOPK, NUM_SHARED, HAS_WEIGHTS, UNROLL,
        )  # fmt: skip
        store_sum(
            acc, token, slots, slot_scales, shared_x, out, offsets, first_shared, shared_stride, cols, blocks,
            offset_tile, HIDDEN, TOPK, NUM_SHARED,
        )  # fmt: skip
    elif has_special(topk_idx, token, num_experts, TOPK):
        acc = sum_with_special(
            token, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets, recv_offsets,
            token_stride, slot_stride, expert_stride, index_stride, own_results, num_experts, max_index,
            first_expert, num_local_experts, num_ranks, rank, ori_x, alphas, const_v, num_zero, num_copy,
            num_const, cols, blocks, weight_tile, index_tile, offset_tile, HIDDEN, TOPK, NUM_SHARED,
            HAS_WEIGHTS,
        )  # fmt: skip
        store_sum(
            acc, token, slots, slot_scales, shared_x, out, offsets, first_shared, shared_stride, cols, blocks,
            offset_tile, HIDDEN, TOPK, NUM_SHARED,
        )  # fmt: skip
    else:
        acc = sum_routed(
            token, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets, recv_offsets,
            token_stride, slot_stride, expert_stride, index_stride, own_results, num_experts, max_index,
            first_expert, num_local_experts, num_ranks, rank, cols, blocks, id_tile, weight_tile, index_tile,
            offset_tile, HIDDEN, TOPK, NUM_SHARED, HAS_WEIGHTS, UNROLL,
        )  # fmt: skip
        store_sum(
            acc, token, slots, slot_scales, shared_x, out, offsets, first_shared, shared_stride, cols, blocks,
            offset_tile, HIDDEN, TOPK, NUM_SHARED,
        )  # fmt: skip


@triton.jit
def token_at(tokens, place):
    """The token at a place of a list, of all tokens where there is none."""
    return (place if tokens is None else tl.load(tokens + place)).to(tl.int64)


@triton.jit
def sum_token(
    token, num_tokens, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets, recv_offsets, active,
    tokens, shared_x, ori_x, alphas, const_v, out, token_stride, slot_stride, expert_stride, index_stride,
    own_results, num_experts, max_index, first_expert, num_local_experts, num_ranks, rank, num_zero, num_copy,
    num_const, first_column,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr,
    NUM_SHARED: tl.constexpr, HAS_WEIGHTS: tl.constexpr, UNROLL: tl.constexpr, CLEAR_TILE: tl.constexpr,
):  # fmt: skip
    """Columns [first_column, first_column + COLUMNS) of a token's result, TILE at a time."""
    is_active = True
    if tokens is not None:  # no entry of a list may become an address outside the tables
        is_active = (token >= 0) & (token < num_tokens)
        token = tl.where(is_active, token, 0)
    if active is not None:
        number = tl.load(active + token)
        if is_active & (number < 0) if CLEAR_TILE else False:
            clear_row(out + token * HIDDEN + first_column, number, COLUMNS, CLEAR_TILE)
        is_active = is_active & (number >= 0)
    if is_active:
        if expand_idx is None or recv_offsets is not None:
            first_shared = token * token_stride + TOPK * slot_stride
            shared_stride = slot_stride
        else:
            first_shared = num_experts.to(tl.int64) * expert_stride + token * index_stride
            shared_stride = 0
        id_tile = tile_of(topk_idx, token, TOPK, const_v is None and not UNROLL)
        weight_tile = tile_of(topk_weights, token, TOPK, HAS_WEIGHTS and not UNROLL)
        index_tile = tile_of(expand_idx, token, TOPK, not UNROLL)
        offset_tile = tile_of(offsets, token, TOPK + NUM_SHARED, not UNROLL)
        for start in tl.static_range(0, COLUMNS, TILE):
            if slot_scales is None:
                blocks = 0
                cols = first_column + start + tl.arange(0, TILE)
            else:
                blocks = ((first_column + start) // BLOCK + tl.arange(0, TILE // BLOCK))[:, None]
                cols = blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
            _sum_columns(
                token, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets, recv_offsets,
                shared_x, ori_x, alphas, const_v, out, token_stride, slot_stride, expert_stride, index_stride,
                own_results, num_experts, max_index, first_expert, num_local_experts, num_ranks, rank,
                num_zero, num_copy, num_const, first_shared, shared_stride, cols, blocks, id_tile,
                weight_tile, index_tile, offset_tile, HIDDEN, TOPK, NUM_SHARED, HAS_WEIGHTS, UNROLL,
            )  # fmt: skip
