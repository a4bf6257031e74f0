"""Pack: quantise tokens to int8 and lay each out as in a slot: int8 row, then fp32 scales.

Shape symbols:
    T   tokens of this rank
    H   hidden size, a multiple of 32
    K   experts per token
    S   shared experts
    R   rows per token: 1, or K + S with smooth scales, which differ from expert to expert

    B   elements that share a scale: H or less; the last of a row may be fewer

For B elements x of a row (after the smooth scale)::

    s = 127 / max|x|;  q = rint(x * s);  scale = 1 / s

Zeros, or elements whose maximum is so small that 127 / max overflows, have q = 0 and scale = 0.
Those with a NaN have scale NaN, otherwise those with an inf scale inf; either have q = 0 throughout.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.dtypes import NAMES
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import Arg, TritonKernel, chosen_args, numbers
from moe_triton.core.plan import Placeholder
from moe_triton.core.row_formats import QUANTIZED
from moe_triton.core.space import double_buffers, named_features
from moe_triton.kernels.cases import AXES, I8, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.checks import check_float_dtype, check_hidden
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.numbering import ID_LIMIT, load_id
from moe_triton.kernels.programs import part_of
from moe_triton.kernels.rms_norm import row_columns
from moe_triton.reference.arithmetic import quantize_in_blocks


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def peak_of(row, FLOAT_MAX: tl.constexpr):
    """max|row| in fp32 of its last dimension, NaN if any element is.

    The bits of |x|, as an integer, order like |x| and put NaN on top; an integer maximum may be taken
    in any order, which lets the CPU use every lane. AI cores reduce floats only.
    """
    last: tl.constexpr = len(row.shape) - 1
    if FLOAT_MAX:
        peak = tl.max(tl.abs(row.to(tl.float32)), last)
    elif row.dtype == tl.float32:
        peak = tl.max(row.to(tl.int32, bitcast=True) & 0x7FFFFFFF, last).to(tl.float32, bitcast=True)
    else:
        bits = tl.reduce(row.to(tl.int16, bitcast=True) & 0x7FFF, last, _larger)
        peak = bits.to(row.dtype, bitcast=True).to(tl.float32)
    return peak


@triton.jit
def _store_row(row, peak, rows, scale_at, cols):
    s = 127.0 / peak
    vanishes = s == float("inf")
    s = tl.where(vanishes, 0.0, s)
    scale = tl.where(vanishes, 0.0, 1.0 / s)
    scale = tl.where(peak != peak, float("nan"), scale)
    if len(row.shape) == 2:
        scale_at += tl.arange(0, row.shape[0])
        q = tl.where((peak < float("inf"))[:, None], row * s[:, None], 0.0)
    else:
        q = tl.where(peak < float("inf"), row * s, 0.0)
    q = (q + 12582912.0) - 12582912.0
    tl.store(rows + cols, tl.cast(q, tl.int8, overflow_mode="saturate"))
    tl.store(scale_at, scale)


@triton.jit
def pack_tokens(
    x, ids, smooth_scales, rows, scales,
    first_token, begin, end, scale_row_offset, num_scale_rows, row_stride, scale_stride,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr, NUM_SHARED: tl.constexpr,
    FLOAT_MAX: tl.constexpr, ID_LIMIT: tl.constexpr,
):  # fmt: skip
    """Rows of tokens [first_token + begin, first_token + end): with smooth scales one for each expert."""
    # of a row's elements, those of whole blocks go together, and those behind them by themselves
    WHOLE: tl.constexpr = HIDDEN // BLOCK * BLOCK if BLOCK > 0 else HIDDEN
    if WHOLE > 0:
        cols = row_columns(WHOLE, BLOCK)
    if WHOLE < HIDDEN:
        last = WHOLE + tl.arange(0, HIDDEN - WHOLE)
    for i in range(begin, end):
        token = (first_token + i).to(tl.int64)
        if smooth_scales is None:
            if WHOLE > 0:
                row = tl.load(x + token * HIDDEN + cols)
                floats, row_peak = row.to(tl.float32), peak_of(row, FLOAT_MAX)
                scale_at = scales + token * scale_stride
                _store_row(floats, row_peak, rows + token * row_stride, scale_at, cols)
            if WHOLE < HIDDEN:
                rest = tl.load(x + token * HIDDEN + last)
                scale_at = scales + token * scale_stride + WHOLE // BLOCK
                rest_peak = peak_of(rest, FLOAT_MAX)
                _store_row(rest.to(tl.float32), rest_peak, rows + token * row_stride, scale_at, last)
        else:
            for k in range(0, TOPK + NUM_SHARED):
                at = token * (TOPK + NUM_SHARED) + k
                entry = token * TOPK + tl.minimum(k, TOPK - 1)
                scale_row = load_id(ids, entry, ID_LIMIT) + scale_row_offset
                # an id that is no expert must not become an address; its row is never sent
                inside = (scale_row >= scale_row_offset) & (scale_row < num_scale_rows)
                scale_row = tl.where(inside, scale_row, 0)
                if NUM_SHARED > 0:
                    scale_row = tl.where(k < TOPK, scale_row, k - TOPK)
                scale_row = scale_row.to(tl.int64)
                if WHOLE > 0:
                    row = tl.load(x + token * HIDDEN + cols).to(tl.float32)
                    row = row * tl.load(smooth_scales + scale_row * HIDDEN + cols)
                    row_peak = peak_of(row, FLOAT_MAX)
                    _store_row(row, row_peak, rows + at * row_stride, scales + at * scale_stride, cols)
                if WHOLE < HIDDEN:
                    rest = tl.load(x + token * HIDDEN + last).to(tl.float32)
                    rest = rest * tl.load(smooth_scales + scale_row * HIDDEN + last)
                    scale_at = scales + at * scale_stride + WHOLE // BLOCK
                    _store_row(rest, peak_of(rest, FLOAT_MAX), rows + at * row_stride, scale_at, last)


@triton.jit
def _pack_kernel(
    x, topk_idx, smooth_scales, rows, scales,
    first_token, num_tokens, scale_row_offset, num_scale_rows, row_stride, scale_stride,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr, NUM_SHARED: tl.constexpr,
    FLOAT_MAX: tl.constexpr, ID_LIMIT: tl.constexpr,
):  # fmt: skip
    begin, end = part_of(num_tokens)
    pack_tokens(
        x, topk_idx, smooth_scales, rows, scales, first_token, begin, end, scale_row_offset, num_scale_rows,
        row_stride, scale_stride, HIDDEN, BLOCK, TOPK, NUM_SHARED, FLOAT_MAX, ID_LIMIT,
    )  # fmt: skip


@fallback
def _pack_fallback(a: Arguments) -> None:
    if not a.num_tokens:
        return
    first_row, end = a.first_token, a.first_token + a.num_tokens
    chosen = a.x[a.first_token * a.HIDDEN : end * a.HIDDEN].view(a.num_tokens, a.HIDDEN).float()
    if a.smooth_scales is not None:
        routed_rows = a.topk_idx[a.first_token * a.TOPK : end * a.TOPK].long() + a.scale_row_offset
        inside = (routed_rows >= a.scale_row_offset) & (routed_rows < a.num_scale_rows)
        routed_rows = torch.where(inside, routed_rows, 0).view(a.num_tokens, a.TOPK)
        shared_rows = torch.arange(a.NUM_SHARED).expand(a.num_tokens, a.NUM_SHARED)
        scale_rows = torch.cat([routed_rows, shared_rows], 1).view(-1)
        chosen = chosen.repeat_interleave(a.TOPK + a.NUM_SHARED, 0)
        chosen = chosen * a.smooth_scales[: a.num_scale_rows * a.HIDDEN].view(-1, a.HIDDEN)[scale_rows]
        first_row *= a.TOPK + a.NUM_SHARED
    q, scales = map(torch.from_numpy, quantize_in_blocks(chosen.numpy(), a.BLOCK or a.HIDDEN))
    for out, stride, packed in ((a.rows, a.row_stride, q), (a.scales, a.scale_stride, scales)):
        packed = packed.view(len(chosen), -1)
        out.as_strided(packed.shape, (stride, 1), out.storage_offset() + first_row * stride).copy_(packed)


@functools.cache
def pack_kernel(
    dtype: torch.dtype,
    hidden: int,
    topk: int = 1,
    smooth: bool = False,
    target: str = "cpu",
    num_shared: int = 0,
    block: int = 0,
) -> TritonKernel:
    """Quantise and pack tokens [first_token, first_token + num_tokens).

    ``rows`` and ``scales`` are where token 0's row and scales go; the strides, in elements of each
    pointer's type, lead from one packed row to the next. A row has a scale for every ``block`` elements, the
    last of which may be fewer, or with 0 a single one. Nothing else is written: what sends a row adds its
    stamp. Without ``smooth`` there is one row per token. With ``smooth`` there are ``topk + num_shared``
    rows, k = 0, 1, ... Row k < ``topk`` is multiplied by row ``scale_row_offset + topk_idx[token, k]`` of the
    smooth scales; ids that name no such row take row 0. Row ``topk + s``, for shared expert s, takes row s,
    so there are at least ``num_shared`` of them.
    """
    check_float_dtype(dtype)
    check_hidden(hidden)
    if num_shared and not smooth:
        rule = "must be 0 without smooth scales: a token then has one row for all experts"
        raise ArgumentError("num_shared", num_shared, rule, "Pass smooth_scales.")
    if smooth:
        check_positive("topk", topk)
    element, sizes = NAMES[dtype], {"hidden": hidden, **({"topk": topk} if smooth else {})}
    args, absent = chosen_args(
        (True, Arg("x", f"*{element}", "in")),
        (smooth, (Arg("topk_idx", "*i32", "in"), Arg("smooth_scales", "*fp32", "in"))),
        (True, (Arg("rows", "*i8", "out"), Arg("scales", "*fp32", "out", interleaved_with="rows"))),
        (True, numbers("i32", "first_token num_tokens")),
        (smooth, numbers("i32", "scale_row_offset num_scale_rows")),
        (True, numbers("i64", "row_stride scale_stride")),
    )
    scale_bytes = 4 * -(-hidden // (block or hidden))
    bytes_of_token = 3 * hidden + scale_bytes
    if smooth:
        bytes_of_token = 2 * hidden + 4 * topk + (topk + num_shared) * (5 * hidden + scale_bytes)
    return TritonKernel(
        name="pack_smooth" if smooth else "pack",
        fn=_pack_kernel,
        args=args,
        constants={
            **absent,
            "HIDDEN": hidden,
            "BLOCK": block,
            "TOPK": topk if smooth else 0,
            "NUM_SHARED": num_shared,
            "FLOAT_MAX": target != "cpu",
            "ID_LIMIT": ID_LIMIT,
        },
        fallback=_pack_fallback,
        space=double_buffers(target, named_features(block=block, shared=num_shared), element, sizes),
        bytes_moved=lambda *, num_tokens, **_: num_tokens * bytes_of_token,
    )


def pack_inputs(s: Shape, r: Draw, rows_per_token: int) -> Inputs:
    """Every argument of either form."""
    slot = replace(s, features=s.features or frozenset({"int8"})).slot
    return {
        "x": r.rows(s.hidden, s.torch_dtype),
        "smooth_scales": r.uniform(r.num_experts + s.shared, s.hidden) + 0.5,
        "rows": blank(r.tokens * rows_per_token, slot.packed_bytes, dtype=I8),
        "scales": Placeholder("rows", slot.scale_offset),
        **r.range,
        "scale_row_offset": s.shared,
        "num_scale_rows": r.num_experts + s.shared,
        "row_stride": slot.packed_bytes,
        "scale_stride": slot.packed_bytes // 4,
    }


IN_BLOCKS = tuple(name for name, r in QUANTIZED.items() if r.elements_per_scale)
"""Features: rows with a scale for each of their blocks."""

FAMILIES = (
    Family(
        "pack",
        pack_kernel,
        lambda s, r: pack_inputs(s, r, 1),
        lambda s: pack_kernel(
            s.torch_dtype, s.hidden, target=s.target, block=s.row_format.elements_per_scale or 0
        ),
        axes=("dtype", "hidden"),
        features=IN_BLOCKS,
        streams=True,
    ),
    Family(
        "pack_smooth",
        pack_kernel,
        lambda s, r: pack_inputs(s, r, s.topk + s.shared),
        lambda s: pack_kernel(
            s.torch_dtype, s.hidden, s.topk, True, s.target, s.shared, s.row_format.elements_per_scale or 0
        ),
        axes=AXES,
        features=IN_BLOCKS,
    ),
)
