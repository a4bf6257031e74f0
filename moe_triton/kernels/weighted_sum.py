"""Weighted sum: the results of each token, reduced in fp32 in a fixed order.

Shape symbols:
    T   tokens of this rank
    H   hidden size, a multiple of 32
    K   experts per token
    S   shared experts
    M   experts that results are received from; special experts have the ids from M on
    Z, C, N   zero, copy and constant experts, in the order of their ids
    B   8, elements of a quantised block

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
from dataclasses import dataclass, fields, replace

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.dtypes import NAMES
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import Arg, TritonKernel, chosen_args, numbers
from moe_triton.core.plan import Hole
from moe_triton.kernels.cases import AXES, F32, I8, NUM_SPECIAL, Draw, Family, Inputs, Shape, blank, subsets
from moe_triton.kernels.checks import check_float_dtype, check_hidden
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.weighted_sum_fallback import weighted_sum_fallback
from moe_triton.kernels.weighted_sum_terms import (
    has_special,
    store_sum,
    sum_routed,
    sum_with_special,
    tile_of,
)
from moe_triton.kernels.zones import ZONE, ZONE_STRIDE, zone_offset
from moe_triton.reference.arithmetic import BLOCK_ELEMENTS


@dataclass(frozen=True)
class SumFeatures:
    """What a sum does beyond adding up slots. Each feature brings arguments that only it needs.

    Attributes:
        masked: a token is skipped, its output not written, where ``active`` (T,) is negative.
        shared_x: a row of ``shared_x`` (T, H) is added last.
        special: ids from ``num_experts`` on may name special experts. ``ori_x`` (T, H) is read for copy and
            constant experts, ``alphas`` (T, K, 2) and ``const_v`` (N, H) for constant ones only; what no id
            leads to may be a null address.
        quantized: a slot is a row of int8 and, as far behind it as ``slot_scales`` is behind ``slots``, the
            scales of its blocks; the row is what `dequantize_blocks` makes of them.
        by_expert: a slot is found by its expert and by ``expand_idx`` (T, K), its number among those of
            that expert. A token's shared result, of one expert at most, stands behind those of the last
            expert.
        by_offset: a slot starts ``offsets`` (T, K + S) elements after ``slots``, in any rank's memory. The
            offsets are trusted, also those of ids without an expert. Neither quantized nor by_expert.
        fp32_out: the sum is not rounded.
        zoned: ``slots`` and ``slot_scales`` are zone 0's; results are in the zone that ``zone`` (1,) names,
            ``zone_stride`` elements of ``slots`` from one to the next.
    """

    masked: bool = False
    shared_x: bool = False
    special: bool = False
    quantized: bool = False
    by_expert: bool = False
    by_offset: bool = False
    fp32_out: bool = False
    zoned: bool = False


@triton.jit
def _weighted_sum_kernel(
    slots,
    slot_scales,
    topk_idx,
    topk_weights,
    expand_idx,
    offsets,
    active,
    shared_x,
    ori_x,
    alphas,
    const_v,
    out,
    zone,
    token_stride,
    slot_stride,
    expert_stride,
    index_stride,
    first_token,
    num_tokens,
    num_experts,
    max_index,
    num_zero,
    num_copy,
    num_const,
    zone_stride,
    HIDDEN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPK: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    if zone is not None:
        slots += zone_offset(zone, zone_stride)
        if slot_scales is not None:  # of 16 bits, in between rows of int8
            slot_scales += zone_offset(zone, zone_stride // 2)
    per_program = tl.cdiv(num_tokens, tl.num_programs(0))
    begin = tl.program_id(0) * per_program
    for i in range(begin, tl.minimum(begin + per_program, num_tokens)):
        token = (first_token + i).to(tl.int64)
        is_active = True
        if active is not None:
            is_active = tl.load(active + token) >= 0
        if is_active:
            if expand_idx is None:
                first_shared = token * token_stride + TOPK * slot_stride
                shared_stride = slot_stride
            else:
                first_shared = num_experts.to(tl.int64) * expert_stride + token * index_stride
                shared_stride = 0
            id_tile = tile_of(topk_idx, token, TOPK, const_v is None and not UNROLL)
            weight_tile = tile_of(topk_weights, token, TOPK, HAS_WEIGHTS and not UNROLL)
            index_tile = tile_of(expand_idx, token, TOPK, not UNROLL)
            offset_tile = tile_of(offsets, token, TOPK + NUM_SHARED, not UNROLL)
            for start in tl.static_range(0, HIDDEN, TILE):
                if slot_scales is None:
                    blocks = 0
                    cols = start + tl.arange(0, TILE)
                else:
                    blocks = (start // BLOCK + tl.arange(0, TILE // BLOCK))[:, None]
                    cols = blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
                # tokens with special experts take a branch of their own: the others stay fast
                if const_v is None:
                    acc = sum_routed(
                        token, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets,
                        token_stride, slot_stride, expert_stride, index_stride, num_experts, max_index,
                        cols, blocks, id_tile, weight_tile, index_tile, offset_tile, TOPK, NUM_SHARED,
                        HAS_WEIGHTS, UNROLL,
                    )  # fmt: skip
                    store_sum(
                        acc, token, slots, slot_scales, shared_x, out, offsets, first_shared,
                        shared_stride, cols, blocks, offset_tile, HIDDEN, TOPK, NUM_SHARED,
                    )  # fmt: skip
                elif has_special(topk_idx, token, num_experts, TOPK):
                    acc = sum_with_special(
                        token, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets,
                        token_stride, slot_stride, expert_stride, index_stride, num_experts, max_index,
                        ori_x, alphas, const_v, num_zero, num_copy, num_const, cols, blocks, weight_tile,
                        index_tile, offset_tile, HIDDEN, TOPK, NUM_SHARED, HAS_WEIGHTS,
                    )  # fmt: skip
                    store_sum(
                        acc, token, slots, slot_scales, shared_x, out, offsets, first_shared,
                        shared_stride, cols, blocks, offset_tile, HIDDEN, TOPK, NUM_SHARED,
                    )  # fmt: skip
                else:
                    acc = sum_routed(
                        token, slots, slot_scales, topk_idx, topk_weights, expand_idx, offsets,
                        token_stride, slot_stride, expert_stride, index_stride, num_experts, max_index,
                        cols, blocks, id_tile, weight_tile, index_tile, offset_tile, TOPK, NUM_SHARED,
                        HAS_WEIGHTS, UNROLL,
                    )  # fmt: skip
                    store_sum(
                        acc, token, slots, slot_scales, shared_x, out, offsets, first_shared,
                        shared_stride, cols, blocks, offset_tile, HIDDEN, TOPK, NUM_SHARED,
                    )  # fmt: skip


def _npu_tile(hidden: int, features: SumFeatures) -> int:
    """Columns that an AI core sums at a time: the whole row where the unified buffer holds it.

    8192 columns fill the buffer to the last byte. Features that hold more rows at a time get half of that.
    """
    widest = 4096 if features.special or features.quantized else 8192
    units = hidden // 32
    tiles = next(n for n in range(-(-hidden // widest), units + 1) if units % n == 0)
    return hidden // tiles


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
    if features.by_expert and num_shared > 1:
        raise ArgumentError("num_shared", num_shared, "must be 0 or 1 by expert", "Use slots by token.")
    if features.by_offset and (features.by_expert or features.quantized):
        other = "by_expert" if features.by_expert else "quantized"
        rule = "finds rows of 16 bits an element, wherever they are"
        raise ArgumentError("features.by_offset", True, rule, f"Leave out features.{other}.")
    element = NAMES[dtype]
    by_token = not (features.by_expert or features.by_offset)
    slot_bytes = hidden + hidden // BLOCK_ELEMENTS * 2 if features.quantized else 2 * hidden

    def bytes_moved(*, num_tokens: int, **_: int) -> int:
        slots = slot_bytes * (topk + num_shared)
        rows = hidden * (2 * features.shared_x + (4 if features.fp32_out else 2))
        entries = topk * (4 + 4 * has_weights + 4 * features.by_expert) + 4 * features.masked
        entries += 8 * (topk + num_shared) * features.by_offset
        return num_tokens * (slots + rows + entries)

    arguments = (
        (True, Arg("slots", "*i8" if features.quantized else f"*{element}", "in")),
        (features.quantized, Arg("slot_scales", f"*{element}", "in", interleaved_with="slots")),
        (True, Arg("topk_idx", "*i32", "in")),
        (True, Arg("topk_weights", "*fp32", "in")),
        (features.by_expert, Arg("expand_idx", "*i32", "in")),
        (features.by_offset, Arg("offsets", "*i64", "in")),
        (features.masked, Arg("active", "*i32", "in")),
        (features.shared_x, Arg("shared_x", f"*{element}", "in")),
        (features.special, Arg("ori_x", f"*{element}", "in")),
        (features.special, Arg("alphas", "*fp32", "in")),
        (features.special, Arg("const_v", f"*{element}", "in")),
        (True, Arg("out", "*fp32" if features.fp32_out else f"*{element}", "out")),
        (features.zoned, ZONE),
        (by_token, Arg("token_stride", "i64", "value")),
        (by_token, Arg("slot_stride", "i64", "value")),
        (features.by_expert, Arg("expert_stride", "i64", "value")),
        (features.by_expert, Arg("index_stride", "i64", "value")),
        *((True, arg) for arg in numbers("i32", "first_token num_tokens num_experts")),
        (features.by_expert, Arg("max_index", "i32", "value")),
        (features.special, Arg("num_zero", "i32", "value")),
        (features.special, Arg("num_copy", "i32", "value")),
        (features.special, Arg("num_const", "i32", "value")),
        (features.zoned, ZONE_STRIDE),
    )
    args, absent = chosen_args(arguments)
    return TritonKernel(
        name="weighted_sum",
        fn=_weighted_sum_kernel,
        args=args,
        constants={
            **absent,
            "HIDDEN": hidden,
            "TILE": hidden if target == "cpu" else _npu_tile(hidden, features),
            "BLOCK": BLOCK_ELEMENTS,
            "TOPK": topk,
            "NUM_SHARED": num_shared,
            "HAS_WEIGHTS": has_weights,
            "UNROLL": target == "cpu",
        },
        fallback=weighted_sum_fallback,
        bytes_moved=None if features.special or features.masked else bytes_moved,
    )


def _inputs(s: Shape, r: Draw) -> Inputs:
    width, dtype, rows_of_expert = s.topk + s.shared, s.torch_dtype, r.most_rows
    # by expert, a shared result of each token follows those of the last expert
    number = r.num_experts * rows_of_expert + r.tokens if s.has("by_expert") else r.tokens * width
    stride = s.hidden
    if s.has("quantized"):
        stride = s.blocks_bytes
        slots = r.integers(-127, 128, number, stride, dtype=I8)
        scales = (r.uniform(number, s.hidden // BLOCK_ELEMENTS) / 64).to(dtype)
        slots[:, s.hidden : s.hidden * 5 // 4] = scales.view(I8)
    else:
        slots = r.normal(number, s.hidden, dtype=dtype)
    ids, active = r.special_ids() if s.has("special") else r.ids, r.active()
    return {
        "slots": slots,
        "slot_scales": Hole("slots", s.hidden),
        "topk_idx": ids,
        "topk_weights": r.uniform(r.tokens, s.topk),
        "expand_idx": r.integers(0, rows_of_expert, r.tokens, s.topk),
        "offsets": (torch.randperm(r.tokens * width, generator=r.generator) * s.hidden).view(-1, width),
        "active": active,
        "shared_x": r.normal(r.tokens, s.hidden, dtype=dtype),
        "ori_x": r.normal(r.tokens, s.hidden, dtype=dtype),
        "alphas": r.uniform(r.tokens, s.topk, 2),
        "const_v": r.normal(NUM_SPECIAL, s.hidden, dtype=dtype),
        "out": blank(r.tokens, s.hidden, dtype=F32 if s.has("fp32_out") else dtype),
        "token_stride": width * stride,
        "slot_stride": stride,
        "expert_stride": rows_of_expert * stride,
        "index_stride": stride,
        **r.range,
        "num_experts": r.num_experts,
        "max_index": rows_of_expert,
        "num_zero": NUM_SPECIAL,
        "num_copy": NUM_SPECIAL,
        "num_const": NUM_SPECIAL,
        "bytes_moved": _bytes_read_and_written(s, r, ids, active),
    }


def _bytes_read_and_written(s: Shape, r: Draw, ids: torch.Tensor, active: torch.Tensor) -> int:
    """What depends on the data: tokens that are left out, and entries that have no slot."""
    slot_bytes = s.hidden * 5 // 4 if s.has("quantized") else 2 * s.hidden
    if s.has("masked"):
        ids = ids[active >= 0]
    first_copy = r.num_experts + NUM_SPECIAL
    first_const = first_copy + NUM_SPECIAL
    slots = int(((ids >= 0) & (ids < r.num_experts)).sum()) + len(ids) * s.shared
    rows = int((ids >= first_copy).sum()) + int((ids >= first_const).sum())
    rows += len(ids) * (s.has("shared_x") + (2 if s.has("fp32_out") else 1))
    return slots * slot_bytes + 2 * s.hidden * rows + 8 * r.tokens * s.topk


def _build(s: Shape) -> TritonKernel:
    # the host knows the zone of results that are found by offset
    zoned = s.zoned and not s.has("by_offset")
    features = SumFeatures(**{name: s.has(name) for name in _FEATURES}, zoned=zoned)
    sizes = s.torch_dtype, s.hidden, s.topk, s.shared, s.has("weights"), s.target
    return weighted_sum_kernel(*sizes, features=features)


def _as_launched(s: Shape) -> Shape:
    """V1, which finds results by expert, has one shared expert at most."""
    return replace(s, shared=min(s.shared, 1)) if s.has("by_expert") else s


_FEATURES = tuple(f.name for f in fields(SumFeatures) if f.name != "zoned")
_WEIGHTED = ("weights",)
# By token all combine; results found by expert (V1) or by offset have fewer features.
_SUMS = (
    *subsets(("masked", "shared_x", "special", "quantized", "fp32_out")),
    *(("by_expert", *more) for more in subsets(("quantized", "fp32_out"))),
    ("by_offset",),
)

FAMILIES = (
    Family(
        "weighted_sum",
        weighted_sum_kernel,
        _inputs,
        _build,
        axes=AXES,
        features=("weights", *_FEATURES),
        variants=tuple((*weights, *more) for weights in (_WEIGHTED, ()) for more in _SUMS),
        # what is held at a time differs most between these
        shown=(
            _WEIGHTED,
            *(("weights", name) for name in ("masked", "shared_x", "fp32_out", "special", "quantized")),
            ("weights", "masked", "shared_x", "special", "quantized"),
            ("weights", "by_expert"),
            ("weights", "by_expert", "quantized"),
            ("weights", "by_offset"),
        ),
        main=_WEIGHTED,
        as_launched=_as_launched,
        streams=True,
    ),
)
