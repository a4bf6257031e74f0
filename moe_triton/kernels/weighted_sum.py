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

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.dtypes import NAMES
from moe_triton.core.kernel import TritonKernel, chosen_args
from moe_triton.core.space import MULTIBUFFER, Settings, Space
from moe_triton.kernels.checks import check_float_dtype, check_hidden
from moe_triton.kernels.clear import clear_tile
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.weighted_sum_fallback import weighted_sum_fallback
from moe_triton.kernels.weighted_sum_features import SumFeatures, arguments_of, bytes_moved_by, check_features
from moe_triton.kernels.weighted_sum_terms import sum_token, token_at
from moe_triton.kernels.zones import turn_zone, zone_offset

__all__ = ["SumFeatures", "weighted_sum_kernel"]

SPLITS = (1, 2, 4)
"""How many programs may share a token."""


@triton.jit
def _weighted_sum_kernel(
    slots,
    slot_scales,
    topk_idx,
    topk_weights,
    expand_idx,
    offsets,
    recv_offsets,
    active,
    tokens,
    bounds,
    shared_x,
    ori_x,
    alphas,
    const_v,
    out,
    zone,
    turned,
    token_stride,
    slot_stride,
    expert_stride,
    index_stride,
    own_results,
    first_token,
    num_tokens,
    num_experts,
    max_index,
    first_expert,
    num_local_experts,
    num_ranks,
    rank,
    num_zero,
    num_copy,
    num_const,
    zone_stride,
    HIDDEN: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPK: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    UNROLL: tl.constexpr,
    CLEAR_TILE: tl.constexpr,
):
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
        unit = tl.program_id(0)
        for i in range(unit, tl.minimum(unit + 1, SPLIT * count)):
            sum_token(
                token_at(tokens, first + i // SPLIT), num_tokens, slots, slot_scales, topk_idx, topk_weights,
                expand_idx, offsets, recv_offsets, active, tokens, shared_x, ori_x, alphas, const_v, out,
                token_stride, slot_stride, expert_stride, index_stride, own_results, num_experts, max_index,
                first_expert, num_local_experts, num_ranks, rank, num_zero, num_copy, num_const,
                i % SPLIT * (HIDDEN // SPLIT), HIDDEN // SPLIT, SPLIT_TILE, HIDDEN, BLOCK, TOPK, NUM_SHARED,
                HAS_WEIGHTS, UNROLL, CLEAR_TILE,
            )  # fmt: skip
    else:
        per_program = tl.cdiv(count, tl.num_programs(0))
        begin = tl.program_id(0) * per_program
        for i in range(begin, tl.minimum(begin + per_program, count)):
            sum_token(
                token_at(tokens, first + i), num_tokens, slots, slot_scales, topk_idx, topk_weights,
                expand_idx, offsets, recv_offsets, active, tokens, shared_x, ori_x, alphas, const_v, out,
                token_stride, slot_stride, expert_stride, index_stride, own_results, num_experts, max_index,
                first_expert, num_local_experts, num_ranks, rank, num_zero, num_copy, num_const, 0, HIDDEN,
                TILE, HIDDEN, BLOCK, TOPK, NUM_SHARED, HAS_WEIGHTS, UNROLL, CLEAR_TILE,
            )  # fmt: skip
    turn_zone(zone, turned)


def _npu_tile(hidden: int, features: SumFeatures) -> int:
    """Columns that an AI core sums at a time: the whole row where the unified buffer holds it.

    8192 columns fill the buffer to the last byte. Features that hold more rows at a time get half of that.
    """
    widest = 4096 if features.special or features.quantized else 8192
    units = hidden // 32
    tiles = next(n for n in range(-(-hidden // widest), units + 1) if units % n == 0)
    return hidden // tiles


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
    check_features(features, num_shared)
    args, absent = chosen_args(arguments_of(features, NAMES[dtype]))
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
            "CLEAR_TILE": clear_tile(_narrowest_share(hidden, target), target) if features.clears else 0,
        },
        fallback=weighted_sum_fallback,
        bytes_moved=bytes_moved_by(features, hidden, topk, num_shared, has_weights),
        space=_space(dtype, hidden, topk, target, features.variant(num_shared, has_weights)),
    )
