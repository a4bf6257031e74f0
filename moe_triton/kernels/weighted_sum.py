"""Weighted sum: the results of each token, reduced in fp32 in a fixed order.

Shape symbols:
    T   tokens of this rank
    H   hidden size, a multiple of 32
    K   experts per token
    S   shared experts
    M   experts that results are received from; special experts have the ids from M on
    Z, C, N   zero, copy and constant experts, in the order of their ids
    B   8 or 16, elements of a quantised block

::

    acc = 0
    for k ascending:  acc += value[k] * weight[k]     # two roundings: no fused multiply-add
    for s ascending:  acc += f32(slot[K + s])
    acc += f32(shared_x)
    out = acc, rounded to nearest even

What an entry's value is depends on its id::

    [0, M)                  f32(slot[k])
    [M, M+Z)                0
    [M+Z, M+Z+C)            f32(x)
    [M+Z+C, M+Z+C+N)        a1 * f32(x) + a2 * f32(v[id - M - Z - C])     # three roundings

An entry of any other id adds nothing, whatever its slot or its weight holds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.dtypes import NAMES
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import Arg, TritonKernel, alike, chosen_args, numbers
from moe_triton.core.plan import Placeholder
from moe_triton.core.space import MULTIBUFFER, Settings, Space, named_features
from moe_triton.kernels.cases import AXES, F32, I8, NUM_SPECIAL, Draw, Family, Inputs, Shape, blank, subsets
from moe_triton.kernels.checks import check_float_dtype, check_hidden
from moe_triton.kernels.clear import clear_row, clear_tile
from moe_triton.kernels.fallbacks import Arguments, elements_at, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.own_rows import own_row, own_rows
from moe_triton.kernels.zones import TURNED, ZONE, ZONE_STRIDE, in_zone, turn_cell, turn_zone, zone_offset
from moe_triton.reference.arithmetic import BLOCK_ELEMENTS, Floats, Mask, dequantize_blocks, weighted_sum

SPLITS = (1, 2, 4)
"""How many programs may share a token."""


@triton.jit
def _tile_of(table, token, NUM: tl.constexpr, WANTED: tl.constexpr):
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
def _add_special(
    acc, special, token, k, cols, weight_tile, topk_weights, ori_x, alphas, const_v,
    num_zero, num_copy, num_const, HIDDEN: tl.constexpr, TOPK: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Entry k of a token, zero, copy or constant expert ``special``."""
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
def _largest_special(topk_idx, token, num_experts, num_special, TOPK: tl.constexpr):
    """A token's largest number of a special expert; negative if it has none. Ids of no expert are none."""
    largest = -1
    for k in tl.static_range(TOPK):
        special = tl.load(topk_idx + token * TOPK + k) - num_experts
        largest = tl.maximum(largest, tl.where(special < num_special, special, -1))
    return largest


@triton.jit
def _with_special(
    value, special, token, k, cols, ori_x, alphas, const_v, num_zero, num_copy, num_const,
    SPECIAL: tl.constexpr, HIDDEN: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """Entry k's value if ``special`` is a copy expert, or one of SPECIAL "constants"; otherwise ``value``."""
    constant = special - num_zero - num_copy
    x = tl.load(ori_x + token * HIDDEN + cols).to(tl.float32)
    value = tl.where((special >= num_zero) & (constant < 0), x, value)
    if SPECIAL == "constants":
        is_constant = (constant >= 0) & (constant < num_const)
        entry = token * TOPK + k
        row = tl.where(is_constant, constant, 0).to(tl.int64) * HIDDEN
        mixed = tl.load(alphas + entry * 2) * x
        mixed += tl.load(alphas + entry * 2 + 1) * tl.load(const_v + row + cols).to(tl.float32)
        value = tl.where(is_constant, mixed, value)
    return value


@triton.jit
def _has_special(topk_idx, token, num_experts, TOPK: tl.constexpr):
    """Whether any of a token's ids lies behind the routed experts'."""
    largest = tl.load(topk_idx + token * TOPK)
    for k in tl.static_range(1, TOPK):
        largest = tl.maximum(largest, tl.load(topk_idx + token * TOPK + k))
    return largest >= num_experts


@triton.jit
def _sum_columns(
    token, cols, blocks, id_tile, weight_tile, index_tile, offset_tile, first_shared, shared_stride,
    slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets, recv_offsets, places, shared_x, ori_x,
    alphas, const_v, out, token_stride, slot_stride, expert_stride, index_stride, own_results,
    num_experts, max_index, first_expert, num_local_experts, num_ranks, rank, num_zero, num_copy, num_const,
    SPECIAL: tl.constexpr, HIDDEN: tl.constexpr, TOPK: tl.constexpr, NUM_SHARED: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Columns ``cols`` of a token's result; ``blocks`` are the numbers of their quantised blocks.

    SPECIAL is how entries of special experts are told apart. In "branches" no row is read in vain; but a sum
    that leaves a branch is a tensor of its own, which a CPU copies through memory for each entry. There they
    are selected: "copies", "constants" together with those, or "" for a token that has neither, where a zero
    expert is as good as none.
    """
    acc = tl.zeros(cols.shape, tl.float32)
    # unrolled, a CPU keeps the sum in registers; rolled, an AI core double-buffers the slots
    for k in (tl.static_range if UNROLL and SPECIAL != "branches" else range)(0, TOPK):
        expert = _number(topk_idx, id_tile, token, k, TOPK)
        if expert < num_experts if SPECIAL == "branches" else True:
            is_routed = (expert >= 0) & (expert < num_experts)
            if offsets is not None:
                offset = _number(offsets, offset_tile, token, k, TOPK + NUM_SHARED)
            elif recv_offsets is not None:
                index = _number(expand_idx, index_tile, token, k, TOPK)
                row = own_row(expert, index, recv_offsets, first_expert, num_local_experts, num_ranks, rank)
                if places is not None:
                    row = tl.where(row >= 0, tl.load(places + tl.maximum(row, 0)).to(tl.int64), row)
                offset = tl.where(
                    row >= 0, own_results + row * HIDDEN, token * token_stride + k * slot_stride
                )
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
            if SPECIAL == "copies" or SPECIAL == "constants":
                special = expert - num_experts
                value = _with_special(
                    value, special, token, k, cols, ori_x, alphas, const_v,
                    num_zero, num_copy, num_const, SPECIAL, HIDDEN, TOPK,
                )  # fmt: skip
                is_routed |= (special >= num_zero) & (special < num_zero + num_copy + num_const)
            if HAS_WEIGHTS:
                weight = _number(topk_weights, weight_tile, token, k, TOPK)
                value = value * tl.where(is_routed, weight, 0.0)
            acc += value
        else:
            acc = _add_special(
                acc, expert - num_experts, token, k, cols, weight_tile, topk_weights, ori_x, alphas, const_v,
                num_zero, num_copy, num_const, HIDDEN, TOPK, HAS_WEIGHTS,
            )  # fmt: skip
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
def _sum_tokens(
    first, count, num_tokens, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets, recv_offsets,
    places, active_index, tokens, shared_x, ori_x, alphas, const_v, out, token_stride, slot_stride,
    expert_stride, index_stride, own_results, num_experts, max_index, first_expert, num_local_experts,
    num_ranks, rank,
    num_zero, num_copy, num_const,
    PARTS: tl.constexpr, TILE: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr,
    NUM_SHARED: tl.constexpr, HAS_WEIGHTS: tl.constexpr, UNROLL: tl.constexpr, BRANCHES: tl.constexpr,
    CLEAR_TILE: tl.constexpr,
):  # fmt: skip
    """This program's part of so many tokens, TILE columns at a time; PARTS programs share each token."""
    COLUMNS: tl.constexpr = HIDDEN // PARTS
    per_program = tl.cdiv(count, tl.num_programs(0)) if PARTS == 1 else 1
    begin = tl.program_id(0) * per_program
    for i in range(begin, tl.minimum(begin + per_program, PARTS * count)):
        place = first + i // PARTS
        token = (place if tokens is None else tl.load(tokens + place)).to(tl.int64)
        first_column = i % PARTS * COLUMNS
        is_active = True
        if tokens is not None:  # no entry of a list may become an address outside the tables
            is_active = (token >= 0) & (token < num_tokens)
            token = tl.where(is_active, token, 0)
        if active_index is not None:
            number = tl.load(active_index + token)
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
            id_tile = _tile_of(topk_idx, token, TOPK, const_v is None and not UNROLL)
            weight_tile = _tile_of(topk_weights, token, TOPK, HAS_WEIGHTS and not UNROLL)
            index_tile = _tile_of(expand_idx, token, TOPK, not UNROLL)
            offset_tile = _tile_of(offsets, token, TOPK + NUM_SHARED, not UNROLL)
            for start in tl.static_range(0, COLUMNS, TILE):
                if slot_scales is None:
                    blocks = 0
                    cols = first_column + start + tl.arange(0, TILE)
                else:
                    blocks = ((first_column + start) // BLOCK + tl.arange(0, TILE // BLOCK))[:, None]
                    cols = blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
                # tokens with special experts take a body of their own: the others stay fast
                if const_v is not None and not BRANCHES:
                    num_special = num_zero + num_copy + num_const
                    largest = _largest_special(topk_idx, token, num_experts, num_special, TOPK)
                if (
                    False
                    if const_v is None
                    else _has_special(topk_idx, token, num_experts, TOPK)
                    if BRANCHES
                    else largest >= num_zero + num_copy
                ):
                    _sum_columns(
                        token, cols, blocks, id_tile, weight_tile, index_tile, offset_tile, first_shared,
                        shared_stride, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets,
                        recv_offsets, places, shared_x, ori_x, alphas, const_v, out, token_stride,
                        slot_stride, expert_stride, index_stride, own_results, num_experts, max_index,
                        first_expert, num_local_experts, num_ranks, rank, num_zero, num_copy, num_const,
                        "branches" if BRANCHES else "constants",
                        HIDDEN, TOPK, NUM_SHARED, HAS_WEIGHTS, UNROLL,
                    )  # fmt: skip
                elif False if const_v is None or BRANCHES else largest >= num_zero:
                    _sum_columns(
                        token, cols, blocks, id_tile, weight_tile, index_tile, offset_tile, first_shared,
                        shared_stride, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets,
                        recv_offsets, places, shared_x, ori_x, alphas, const_v, out, token_stride,
                        slot_stride, expert_stride, index_stride, own_results, num_experts, max_index,
                        first_expert, num_local_experts, num_ranks, rank, num_zero, num_copy, num_const,
                        "copies", HIDDEN, TOPK, NUM_SHARED, HAS_WEIGHTS, UNROLL,
                    )  # fmt: skip
                else:
                    _sum_columns(
                        token, cols, blocks, id_tile, weight_tile, index_tile, offset_tile, first_shared,
                        shared_stride, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets,
                        recv_offsets, places, shared_x, ori_x, alphas, const_v, out, token_stride,
                        slot_stride, expert_stride, index_stride, own_results, num_experts, max_index,
                        first_expert, num_local_experts, num_ranks, rank, num_zero, num_copy, num_const,
                        "", HIDDEN, TOPK, NUM_SHARED, HAS_WEIGHTS, UNROLL,
                    )  # fmt: skip


@triton.jit
def _weighted_sum_kernel(
    slots, slot_scales,
    topk_idx, topk_weights, expand_idx, offsets, recv_offsets, places,
    active_index, tokens, bounds,
    shared_x, ori_x, alphas, const_v,
    out, zone, turned,
    token_stride, slot_stride, expert_stride, index_stride, own_results,
    first_token, num_tokens, num_experts, max_index,
    first_expert, num_local_experts, num_ranks, rank,
    num_zero, num_copy, num_const, zone_stride,
    HIDDEN: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SPLIT_TILE: tl.constexpr,
    BLOCK: tl.constexpr, TOPK: tl.constexpr, NUM_SHARED: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, UNROLL: tl.constexpr, BRANCHES: tl.constexpr, CLEAR_TILE: tl.constexpr,
):  # fmt: skip
    if zone is not None:
        slots += zone_offset(zone, zone_stride)
        if slot_scales is not None:  # of 16 bits, in between rows of int8
            slot_scales += zone_offset(zone, zone_stride // 2)
    first, count = first_token, num_tokens
    if tokens is not None:
        first = tl.maximum(tl.load(bounds), 0)
        count = tl.maximum(tl.minimum(tl.load(bounds + 1), num_tokens) - first, 0)
    # columns are summed each by itself: where there are programs enough, several share a token
    if SPLIT * count <= tl.num_programs(0) if SPLIT > 1 else False:
        _sum_tokens(
            first, count, num_tokens, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets,
            recv_offsets, places, active_index, tokens, shared_x, ori_x, alphas, const_v, out,
            token_stride, slot_stride, expert_stride, index_stride, own_results,
            num_experts, max_index, first_expert, num_local_experts, num_ranks, rank,
            num_zero, num_copy, num_const,
            SPLIT, SPLIT_TILE, HIDDEN, BLOCK, TOPK, NUM_SHARED, HAS_WEIGHTS, UNROLL, BRANCHES, CLEAR_TILE,
        )  # fmt: skip
    else:
        _sum_tokens(
            first, count, num_tokens, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets,
            recv_offsets, places, active_index, tokens, shared_x, ori_x, alphas, const_v, out,
            token_stride, slot_stride, expert_stride, index_stride, own_results,
            num_experts, max_index, first_expert, num_local_experts, num_ranks, rank,
            num_zero, num_copy, num_const,
            1, TILE, HIDDEN, BLOCK, TOPK, NUM_SHARED, HAS_WEIGHTS, UNROLL, BRANCHES, CLEAR_TILE,
        )  # fmt: skip
    turn_zone(zone, turned)


@fallback
def _weighted_sum_fallback(a: Arguments) -> None:
    hidden, topk, end = a.HIDDEN, a.TOPK, a.first_token + a.num_tokens
    turn_cell(a.zone, a.turned)
    slots = in_zone(a.slots, a.zone, a.zone_stride)
    if a.tokens is None:
        tokens = torch.arange(a.first_token, end)
    else:
        begin, stop = (min(max(bound, 0), end) for bound in a.bounds[:2].tolist())
        tokens = a.tokens[begin:stop].long()
        tokens = tokens[(tokens >= 0) & (tokens < end)]
    out = a.out[: end * hidden].view(-1, hidden)
    if a.active_index is not None:
        left_out = a.active_index[tokens] < 0
        if a.CLEAR_TILE:
            out[tokens[left_out]] = 0
        tokens = tokens[~left_out]
    if not len(tokens):
        return

    def of_tokens(flat: torch.Tensor, width: int) -> torch.Tensor:
        return flat[: end * width].view(-1, width)[tokens]

    def load(places: torch.Tensor) -> torch.Tensor:
        if a.offsets is not None or a.recv_offsets is not None:  # not all in this tensor's memory
            rows = [elements_at(slots, place, hidden) for place in places.tolist()]
            return torch.stack(rows).float() if rows else torch.zeros((0, hidden))
        values = slots.unfold(0, hidden, 1)[places]
        if a.slot_scales is not None:
            scales = in_zone(a.slot_scales, a.zone, a.zone_stride // 2)
            values = dequantize_blocks(values, scales.unfold(0, hidden // a.BLOCK, 1)[places // 2], a.BLOCK)
        return values.float()

    ids = of_tokens(a.topk_idx, topk).long()
    is_routed = (ids >= 0) & (ids < a.num_experts)
    if a.offsets is not None:
        places = of_tokens(a.offsets, topk + a.NUM_SHARED)
    elif a.expand_idx is None or a.recv_offsets is not None:
        places = tokens[:, None] * a.token_stride + torch.arange(topk + a.NUM_SHARED) * a.slot_stride
    else:
        index = of_tokens(a.expand_idx, topk).long().clamp(0, a.max_index - 1)
        shared = a.num_experts * a.expert_stride + tokens[:, None] * a.index_stride
        routed = torch.where(is_routed, ids, 0) * a.expert_stride + index * a.index_stride
        places = torch.cat([routed, shared], 1)
    if a.recv_offsets is not None:
        numbers = of_tokens(a.expand_idx, topk).reshape(-1)
        place = (a.first_expert, a.num_local_experts, a.num_ranks, a.rank)
        kept, rows_of_kept = own_rows(ids.reshape(-1), numbers, a.recv_offsets, *place)
        if a.places is not None:
            rows_of_kept = a.places[rows_of_kept].long()
            has_place = rows_of_kept >= 0
            kept, rows_of_kept = kept[has_place], rows_of_kept[has_place]
        places[kept // topk, kept % topk] = a.own_results + rows_of_kept * hidden

    def entries() -> Iterator[tuple[Mask | None, Floats, Floats | None]]:
        weights = of_tokens(a.topk_weights, topk).numpy() if a.HAS_WEIGHTS else None
        for k in range(topk):
            values, applies = load(places[:, k]), is_routed[:, k]
            constant = ids[:, k] - a.num_experts - a.num_zero - a.num_copy
            if a.num_copy:
                is_copy = (constant < 0) & (constant >= -a.num_copy)
                values = torch.where(is_copy[:, None], of_tokens(a.ori_x, hidden).float(), values)
                applies = applies | is_copy
            if a.num_const:
                is_constant = (constant >= 0) & (constant < a.num_const)
                a1, a2 = of_tokens(a.alphas, 2 * topk)[:, 2 * k : 2 * k + 2, None].unbind(1)
                v = a.const_v[: a.num_const * hidden].view(-1, hidden)[torch.where(is_constant, constant, 0)]
                made = a1 * of_tokens(a.ori_x, hidden).float() + a2 * v.float()
                values = torch.where(is_constant[:, None], made, values)
                applies = applies | is_constant
            yield applies.numpy(), values.numpy(), None if weights is None else weights[:, k]
        for k in range(topk, topk + a.NUM_SHARED):
            yield None, load(places[:, k]).numpy(), None
        if a.shared_x is not None:
            yield None, of_tokens(a.shared_x, hidden).float().numpy(), None

    out[tokens] = torch.from_numpy(weighted_sum((len(tokens), hidden), entries())).to(out.dtype)


@dataclass(frozen=True)
class SumFeatures:
    """What a sum does beyond adding up slots. Each feature brings arguments that only it needs.

    Attributes:
        masked: a token is left out, its output not written, where ``active_index`` (T,) is negative.
        shared_x: a row of ``shared_x`` (T, H) is added last.
        special: ids from ``num_experts`` on may name special experts. ``ori_x`` (T, H) is read for copy and
            constant experts, ``alphas`` (T, K, 2) and ``const_v`` (N, H) for constant ones only; what no id
            leads to may be a null address.
        quantized: a slot is a row of int8 and, as far behind it as ``slot_scales`` is behind ``slots``, the
            scales of its blocks; the row is what `dequantize_blocks` makes of them.
        wide_blocks: of rows that are quantized, blocks have 16 elements, and not 8.
        by_expert: a slot is found by its expert and by ``expand_idx`` (T, K), its number among those of
            that expert. A token's shared result, of one expert at most, stands behind those of the last
            expert.
        by_offset: a slot starts ``offsets`` (T, K + S) elements after ``slots``, in any rank's memory. The
            offsets are trusted, also those of ids without an expert. Neither quantized nor by_expert.
        own: results of this rank's experts, from ``first_expert`` on, are read where the experts left them,
            ``own_results`` elements after ``slots``: result k of token t in row ``start + expand_idx[t, k]``,
            where ``start = recv_offsets[(expert - first_expert) * W + rank - 1]``, 0 for the first entry. A
            row that is not before the end of its entry is looked for in the slot. Only plain rows by token,
            in a zone that the host knows.
        placed: own results are where ``places`` says of their rows; a negative place is none.
        fp32_out: the sum is not rounded.
        zoned: ``slots`` and ``slot_scales`` are zone 0's; results are in the zone that ``zone`` (1,) names,
            ``zone_stride`` elements of ``slots`` from one to the next.
        listed: instead of a range, the tokens ``tokens[bounds[0] : bounds[1]]`` are summed, each entry once:
            of ``tokens`` (T,) and ``bounds`` (2,). One that is no token is skipped. Neither by_expert nor
            by_offset.
        turns: the operator's last launch: ``turned`` (1,) becomes the zone that ``zone`` (1,) does not name.
        clears: of what is masked, the outputs of tokens that are left out become zeros.
    """

    masked: bool = False
    shared_x: bool = False
    special: bool = False
    quantized: bool = False
    wide_blocks: bool = False
    by_expert: bool = False
    by_offset: bool = False
    own: bool = False
    placed: bool = False
    fp32_out: bool = False
    zoned: bool = False
    listed: bool = False
    turns: bool = False
    clears: bool = False

    @property
    def block(self) -> int:
        """Elements of a quantised block."""
        return 2 * BLOCK_ELEMENTS if self.wide_blocks else BLOCK_ELEMENTS

    def variant(self, num_shared: int, has_weights: bool) -> str:
        """What tables of settings know a sum by: its features with dashes between them."""
        return named_features(weights=has_weights, **vars(self), shared=num_shared)


def _check_features(features: SumFeatures, num_shared: int) -> None:
    """Refuses features that exclude each other.

    Raises:
        ArgumentError: rows by offset, or own ones, with a feature that they do not have; several shared
            experts by expert; nothing is masked that could be cleared.
    """
    if features.clears and not features.masked:
        raise ArgumentError(
            "features.clears", True, "it is of what a mask leaves out", "Set features.masked."
        )
    if features.by_expert and num_shared > 1:
        raise ArgumentError("num_shared", num_shared, "must be 0 or 1 by expert", "Use slots by token.")
    if features.by_offset and (features.by_expert or features.quantized):
        other = "by_expert" if features.by_expert else "quantized"
        rule = "finds rows of 16 bits an element, wherever they are"
        raise ArgumentError("features.by_offset", True, rule, f"Leave out features.{other}.")
    if features.listed and (features.by_expert or features.by_offset):
        other = "by_expert" if features.by_expert else "by_offset"
        raise ArgumentError("features.listed", True, "finds rows by token", f"Leave out features.{other}.")
    if features.placed and not features.own:
        raise ArgumentError("features.placed", True, "it is of own results", "Set features.own.")
    others = ("by_expert", "by_offset", "quantized", "zoned")
    if other := next((name for name in others if features.own and getattr(features, name)), ""):
        rule = "finds plain rows by token, from slots in a zone that is known"
        raise ArgumentError("features.own", True, rule, f"Leave out features.{other}.")


def _arguments_of(features: SumFeatures, element: str) -> Iterator[tuple[bool, Arg | tuple[Arg, ...]]]:
    """Every argument of the kernel, in order, each or some together with whether this variant has them.

    Args:
        element: Triton's name of the tokens' dtype.
    """
    f, by_token = features, not (features.by_expert or features.by_offset)
    yield True, Arg("slots", "*i8" if f.quantized else f"*{element}", "in")
    yield f.quantized, Arg("slot_scales", f"*{element}", "in", interleaved_with="slots")
    yield True, (Arg("topk_idx", "*i32", "in"), Arg("topk_weights", "*fp32", "in"))
    yield f.by_expert or f.own, Arg("expand_idx", "*i32", "in")
    yield f.by_offset, Arg("offsets", "*i64", "in")
    yield f.own, Arg("recv_offsets", "*i32", "in")
    yield f.placed, Arg("places", "*i32", "in")
    yield f.masked, Arg("active_index", "*i32", "in")
    yield f.listed, alike("*i32", "tokens bounds", "in")
    yield f.shared_x, Arg("shared_x", f"*{element}", "in")
    yield f.special, (Arg("ori_x", f"*{element}", "in"), Arg("alphas", "*fp32", "in"))
    yield f.special, Arg("const_v", f"*{element}", "in")
    yield True, Arg("out", "*fp32" if f.fp32_out else f"*{element}", "out")
    yield f.zoned or f.turns, ZONE
    yield f.turns, TURNED
    yield by_token, numbers("i64", "token_stride slot_stride")
    yield f.by_expert, numbers("i64", "expert_stride index_stride")
    yield f.own, Arg("own_results", "i64", "value")
    yield not f.listed, Arg("first_token", "i32", "value")
    yield True, numbers("i32", "num_tokens num_experts")
    yield f.by_expert, Arg("max_index", "i32", "value")
    yield f.own, numbers("i32", "first_expert num_local_experts num_ranks rank")
    yield f.special, numbers("i32", "num_zero num_copy num_const")
    yield f.zoned, ZONE_STRIDE


def _bytes_moved_by(
    features: SumFeatures, hidden: int, topk: int, num_shared: int, has_weights: bool
) -> Callable[..., int] | None:
    """Bytes read and written, from the kernel's numbers; None where the data decide."""
    if features.special or features.masked or features.listed:
        return None
    slot_bytes = hidden + hidden // features.block * 2 if features.quantized else 2 * hidden
    slots = slot_bytes * (topk + num_shared)
    rows = hidden * (2 * features.shared_x + (4 if features.fp32_out else 2))
    entries = topk * (4 + 4 * has_weights + 4 * (features.by_expert or features.own))
    entries += 8 * (topk + num_shared) * features.by_offset

    def bytes_moved(*, num_tokens: int, num_local_experts: int = 0, **_: int) -> int:
        ends = 2 * 4 * num_local_experts  # of the rows before this rank's and of these, for each expert
        return num_tokens * (slots + rows + entries) + ends

    return bytes_moved


def _npu_tile(hidden: int, features: SumFeatures) -> int:
    """Columns that an AI core sums at a time: the whole row where the unified buffer holds it.

    8192 columns fill the buffer to the last byte. Features that hold more rows at a time get half of that.
    """
    widest = 4096 if features.special or features.quantized else 8192
    units = hidden // 32
    return hidden // next(n for n in range(-(-hidden // widest), units + 1) if units % n == 0)


def _narrowest_share(hidden: int, target: str) -> int:
    """Columns of a token that one program sums, where as many share it as any setting has."""
    if target == "cpu":
        return hidden
    return hidden // next(parts for parts in (*reversed(SPLITS), 1) if hidden % (32 * parts) == 0)


def _tiles(hidden: int) -> tuple[int, ...]:
    """Widths in which a row can be summed: the whole of it, and even parts of 512 columns or more."""
    narrowest = min(hidden, 512)
    return tuple(hidden // n for n in (1, 2, 4, 8) if hidden % (32 * n) == 0 and hidden // n >= narrowest)


def _space(dtype: torch.dtype, hidden: int, topk: int, target: str, variant: str) -> Space:
    """Columns at a time, whether the loop over experts is unrolled, and programs that share a token."""
    choices = {"TILE": _tiles(hidden), "UNROLL": (0, 1)}
    if target != "cpu":
        choices |= {"SPLIT": SPLITS, MULTIBUFFER: (0, 1)}

    def allows(values: Settings) -> bool:
        tile, parts = values["TILE"], 32 * values.get("SPLIT", 1)
        # unrolled several times, the NPU's compiler takes minutes
        is_slow = target != "cpu" and values["UNROLL"] and tile < hidden
        return hidden % tile == hidden % parts == 0 and not is_slow

    return Space(
        choices,
        variant,
        NAMES[dtype],
        {"hidden": hidden, "topk": topk},
        allows,
        lambda values: {"SPLIT_TILE": math.gcd(values["TILE"], hidden // values.get("SPLIT", 1))},
    )


@functools.cache
def weighted_sum_kernel(
    dtype: torch.dtype,
    hidden: int,
    topk: int,
    num_shared: int = 0,
    has_weights: bool = True,
    target: str = "cpu",
    *,
    features: SumFeatures | None = None,
) -> TritonKernel:
    """Reduce tokens [first_token, first_token + num_tokens) from their combine slots.

    Slot j of token t, routed results first, then shared ones, starts ``t * token_stride + j * slot_stride``
    elements after ``slots``. With ``features.by_expert``, result n of expert e starts
    ``e * expert_stride + n * index_stride`` elements after it, n being clamped to [0, max_index), and the
    shared result of token t where n = t and e = num_experts.

    Without ``has_weights``, ``topk_weights`` is not read. NaN results are quiet NaNs with an unspecified
    payload.
    """
    features = features or SumFeatures()
    check_float_dtype(dtype)
    check_hidden(hidden)
    check_positive("topk", topk)
    _check_features(features, num_shared)
    args, absent = chosen_args(*_arguments_of(features, NAMES[dtype]))
    # two programs share a token, unless half a row would be no multiple of 32
    split = 1 if target == "cpu" or hidden % 64 else 2
    return TritonKernel(
        name="weighted_sum",
        fn=_weighted_sum_kernel,
        args=args,
        constants={
            **absent,
            "HIDDEN": hidden,
            "TILE": hidden if target == "cpu" else _npu_tile(hidden, features),
            "SPLIT": split,
            "SPLIT_TILE": hidden if target == "cpu" else _npu_tile(hidden // split, features),
            "BLOCK": features.block,
            "TOPK": topk,
            "NUM_SHARED": num_shared,
            "HAS_WEIGHTS": has_weights,
            "UNROLL": target == "cpu",
            "BRANCHES": target != "cpu",
            "CLEAR_TILE": clear_tile(_narrowest_share(hidden, target), target) if features.clears else 0,
        },
        fallback=_weighted_sum_fallback,
        bytes_moved=_bytes_moved_by(features, hidden, topk, num_shared, has_weights),
        space=_space(dtype, hidden, topk, target, features.variant(num_shared, has_weights)),
    )


def _block(s: Shape) -> int:
    return SumFeatures(wide_blocks=s.has("wide_blocks")).block


def _inputs(s: Shape, r: Draw) -> Inputs:
    width, dtype, rows_of_expert = s.topk + s.shared, s.torch_dtype, r.most_rows
    # by expert, a shared result of each token follows those of the last expert
    number = r.num_experts * rows_of_expert + r.tokens if s.has("by_expert") else r.tokens * width
    first_own = number
    if s.has("own"):  # behind the slots
        number += int(r.ends[-1])
    stride = s.hidden
    if s.has("quantized"):
        stride = s.blocks_bytes
        slots = r.integers(-127, 128, number, stride, dtype=I8)
        scales = (r.uniform(number, s.hidden // _block(s)) / 64).to(dtype)
        slots[:, s.hidden : s.hidden + 2 * scales.shape[1]] = scales.view(I8)
    else:
        slots = r.normal(number, s.hidden, dtype=dtype)
    ids, active_index = r.special_ids() if s.has("special") else r.ids, r.active_index()
    tokens = torch.randperm(r.tokens, generator=r.generator).int()
    tokens[-1] = r.tokens  # is none
    return {
        "slots": slots,
        "slot_scales": Placeholder("slots", s.hidden),
        "topk_idx": ids,
        "topk_weights": r.uniform(r.tokens, s.topk),
        "expand_idx": r.integers(0, rows_of_expert, r.tokens, s.topk),
        "offsets": (torch.randperm(r.tokens * width, generator=r.generator) * s.hidden).view(-1, width),
        "places": torch.randperm(max(1, int(r.ends[-1])), generator=r.generator).int(),
        "active_index": active_index,
        "tokens": tokens,
        "bounds": torch.tensor([r.range["first_token"], r.tokens], dtype=torch.int32),
        "shared_x": r.normal(r.tokens, s.hidden, dtype=dtype),
        "ori_x": r.normal(r.tokens, s.hidden, dtype=dtype),
        "alphas": r.uniform(r.tokens, s.topk, 2),
        "const_v": r.normal(NUM_SPECIAL, s.hidden, dtype=dtype),
        "out": blank(r.tokens, s.hidden, dtype=F32 if s.has("fp32_out") else dtype),
        "zone": torch.ones(1, dtype=torch.int32),
        "turned": blank(1),
        "token_stride": width * stride,
        "slot_stride": stride,
        "expert_stride": rows_of_expert * stride,
        "index_stride": stride,
        "own_results": first_own * stride,
        **r.range,
        "max_index": rows_of_expert,
        "num_zero": NUM_SPECIAL,
        "num_copy": NUM_SPECIAL,
        "num_const": NUM_SPECIAL,
        "bytes_moved": _bytes_read_and_written(
            s, r, ids, active_index, tokens[r.range["first_token"] : -1].long()
        ),
    }


def _bytes_read_and_written(
    s: Shape, r: Draw, ids: torch.Tensor, active_index: torch.Tensor, listed: torch.Tensor
) -> int:
    """What depends on the data: tokens that are left out, and entries that have no slot."""
    slot_bytes = s.hidden + 2 * s.hidden // _block(s) if s.has("quantized") else 2 * s.hidden
    if s.has("listed"):
        ids, active_index = ids[listed], active_index[listed]
    cleared = int((active_index < 0).sum()) if s.has("clears") else 0
    if s.has("masked"):
        ids = ids[active_index >= 0]
    first_copy = r.num_experts + NUM_SPECIAL
    first_const = first_copy + NUM_SPECIAL
    slots = int(((ids >= 0) & (ids < r.num_experts)).sum()) + len(ids) * s.shared
    rows = int((ids >= first_copy).sum()) + int((ids >= first_const).sum())
    rows += len(ids) * (s.has("shared_x") + (2 if s.has("fp32_out") else 1))
    rows += cleared
    return slots * slot_bytes + 2 * s.hidden * rows + 8 * r.tokens * s.topk


def _build(s: Shape) -> TritonKernel:
    # the host knows the zone of results that are found by offset, and of those beside own ones
    zoned = s.zoned and not (s.has("by_offset") or s.has("own"))
    features = SumFeatures(**{name: s.has(name) for name in _FEATURES}, zoned=zoned)
    sizes = s.torch_dtype, s.hidden, s.topk, s.shared, s.has("weights"), s.target
    return weighted_sum_kernel(*sizes, features=features)


def _as_launched(s: Shape) -> Shape:
    """V1, which finds results by expert, has one shared expert at most."""
    return replace(s, shared=min(s.shared, 1)) if s.has("by_expert") else s


_FEATURES = tuple(f.name for f in fields(SumFeatures) if f.name != "zoned")
_WEIGHTED = ("weights",)
# An operator ends with the sum, unless the sum is normalised. In parts it sums a list each, and the last one
# ends the operator.
_ENDS = (("turns",), ("fp32_out",), ("listed",), ("listed", "turns"), ("fp32_out", "listed"))
# By token all combine; results found by expert (V1) have fewer features, and come in one part. By offset the
# host knows the zone, and turns it.
# A norm clears by itself what a mask leaves out.
_SUMS = (
    *(
        (*more, *end, *(("clears",) if "masked" in more and "fp32_out" not in end else ()))
        for more in subsets(("masked", "shared_x", "special", "quantized"))
        for end in _ENDS
    ),
    *(("by_expert", *more, *end) for more in subsets(("quantized",)) for end in _ENDS[:2]),
    ("by_offset",),
)
# A hierarchy sums what came by rail by weight, and partial rows, which may be in blocks of 16, without.
_OF_SERVERS = (("weights", "by_expert", "masked"), ("by_expert", "quantized", "wide_blocks", "turns"))

FAMILIES = (
    Family(
        "weighted_sum",
        weighted_sum_kernel,
        _inputs,
        _build,
        axes=AXES,
        features=("weights", *_FEATURES),
        variants=(*((*weights, *more) for weights in (_WEIGHTED, ()) for more in _SUMS), *_OF_SERVERS),
        # what is held at a time differs most between these
        shown=(
            _WEIGHTED,
            *(
                ("weights", name)
                for name in _FEATURES
                if name not in ("masked", "clears", "wide_blocks", "placed")
            ),
            ("weights", "masked", "clears"),
            ("weights", "own", "placed"),
            ("weights", "masked", "shared_x", "special", "quantized", "clears"),
            ("weights", "by_expert", "quantized"),
            ("weights", "by_expert", "quantized", "wide_blocks"),
        ),
        main=_WEIGHTED,
        as_launched=_as_launched,
        streams=True,
    ),
)
