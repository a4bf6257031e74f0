"""Stamps: what came with each received row, taken apart.

Shape symbols:
    A   receive capacity in rows
    B   rows that the NPU form has at a time

One source serves two machines: a CPU copies a row's few words one after the other, an AI core waits for each
such copy, and takes words of B rows as one tile. ``SCALAR`` chooses.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.kernel import Arg, TritonKernel, chosen_args
from moe_triton.core.plan import Placeholder
from moe_triton.core.row_formats import QUANTIZED
from moe_triton.core.space import Space, named_features
from moe_triton.kernels.cases import F32, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.programs import part_of
from moe_triton.kernels.scales import copy_words
from moe_triton.layout import ORIGIN, STAMP

ORIGIN_WORDS, STAMP_WORDS = ORIGIN.num_words, STAMP.num_words
WEIGHT_WORD, SCALE_WORD = STAMP.word("weight"), STAMP.word("scale")
BLOCK = 32


@triton.jit
def _stamps_kernel(
    stamps, stamp_floats, scales, num_rows, out_origins, out_weights, out_scales,
    capacity, scale_stride,
    ORIGIN_WORDS: tl.constexpr, STAMP_WORDS: tl.constexpr, WEIGHT_WORD: tl.constexpr,
    SCALE_WORD: tl.constexpr, NUM_SCALES: tl.constexpr, SCALAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.minimum(tl.load(num_rows), capacity)
    begin, end = part_of(rows)
    scale_words = stamp_floats + SCALE_WORD if scales is None else scales
    stride = STAMP_WORDS if scales is None else scale_stride
    if SCALAR:
        for i in range(begin, end):
            row = tl.cast(i, tl.int64)
            copy_words(stamps + row * STAMP_WORDS, out_origins, row, ORIGIN_WORDS)
            if out_weights is not None:
                copy_words(stamp_floats + row * STAMP_WORDS + WEIGHT_WORD, out_weights, row, 1)
            copy_words(scale_words + row * stride, out_scales, row, NUM_SCALES)
    else:
        for b in range(0, tl.cdiv(end - begin, BLOCK)):
            first = begin + b * BLOCK
            _copy_columns(stamps, STAMP_WORDS, out_origins, first, end, ORIGIN_WORDS, BLOCK)
            if out_weights is not None:
                _copy_columns(stamp_floats + WEIGHT_WORD, STAMP_WORDS, out_weights, first, end, 1, BLOCK)
            if out_scales is not None:
                _copy_columns(scale_words, stride, out_scales, first, end, NUM_SCALES, BLOCK)


@triton.jit
def _copy_columns(source, stride, target, first, end, NUM_WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """The first words of rows of ``stride`` words, one row's behind the other's."""
    row = (first + tl.arange(0, BLOCK))[:, None]
    word = tl.arange(0, NUM_WORDS)[None, :]
    is_row = row < end
    row = row.to(tl.int64)
    words = tl.load(source + row * stride + word, mask=is_row)
    tl.store(target + row * NUM_WORDS + word, words, mask=is_row)


@fallback
def _stamps_fallback(a: Arguments) -> None:
    rows = max(0, min(int(a.num_rows[0]), a.capacity))
    words = a.stamps[: rows * STAMP_WORDS].view(rows, STAMP_WORDS)
    floats = a.stamp_floats[: rows * STAMP_WORDS].view(rows, STAMP_WORDS)
    a.out_origins[: rows * ORIGIN_WORDS] = words[:, :ORIGIN_WORDS].reshape(-1)
    if a.out_weights is not None:
        a.out_weights[:rows] = floats[:, WEIGHT_WORD]
    if a.out_scales is not None:
        row_scales = floats[:, SCALE_WORD : SCALE_WORD + 1]
        if a.scales is not None:
            row_scales = a.scales.as_strided(
                (rows, a.NUM_SCALES), (a.scale_stride, 1), a.scales.storage_offset()
            )
        a.out_scales[: rows * a.NUM_SCALES] = row_scales.reshape(-1)


@functools.cache
def stamps_kernel(has_weight: bool, num_scales: int, target: str = "cpu") -> TritonKernel:
    """Origins (A, 3), weights (A,) where wanted and scales (A, n) of the rows that ``num_rows`` (1,) counts.

    An origin is where a row comes from, the first words of its stamp (`moe_triton.core.records.STAMP`). A
    single scale stands in the stamp as well; several are in ``scales``, ``scale_stride`` words from one row's
    to the next.
    """
    stamp_floats = Arg("stamp_floats", "*fp32", "in", interleaved_with="stamps")
    args, absent = chosen_args(
        (True, (Arg("stamps", "*i32", "in"), stamp_floats)),
        (num_scales > 1, Arg("scales", "*fp32", "in")),
        (True, (Arg("num_rows", "*i32", "in"), Arg("out_origins", "*i32", "out"))),
        (has_weight, Arg("out_weights", "*fp32", "out")),
        (num_scales > 0, Arg("out_scales", "*fp32", "out")),
        (True, Arg("capacity", "i32", "value")),
        (num_scales > 1, Arg("scale_stride", "i64", "value")),
    )
    return TritonKernel(
        name="stamps",
        fn=_stamps_kernel,
        args=args,
        constants={
            **absent,
            "ORIGIN_WORDS": ORIGIN_WORDS,
            "STAMP_WORDS": STAMP_WORDS,
            "WEIGHT_WORD": WEIGHT_WORD,
            "SCALE_WORD": SCALE_WORD,
            "NUM_SCALES": num_scales,
            "SCALAR": target == "cpu",
            "BLOCK": BLOCK,
        },
        fallback=_stamps_fallback,
        space=None
        if target == "cpu"
        else Space({"BLOCK": (16, 32, 64, 128)}, named_features(weights=has_weight, scales=num_scales)),
    )


def _inputs(s: Shape, r: Draw) -> Inputs:
    stamps = r.words(r.tokens, STAMP_WORDS)
    stamps[:, WEIGHT_WORD : SCALE_WORD + 1] = r.uniform(r.tokens, 2).view(torch.int32)
    return {
        "stamps": stamps,
        "stamp_floats": Placeholder("stamps"),
        "scales": r.uniform(r.tokens, s.slot.scale_stride // 4),
        "num_rows": torch.tensor([r.tokens - 1], dtype=torch.int32),
        "out_origins": blank(r.tokens, 3),
        "out_weights": blank(r.tokens, dtype=F32),
        "out_scales": blank(r.tokens, s.slot.num_scales, dtype=F32),
        "capacity": r.tokens,
        "scale_stride": s.slot.scale_stride // 4,
    }


FAMILIES = (
    Family(
        "stamps",
        stamps_kernel,
        _inputs,
        lambda s: stamps_kernel(s.has("weights"), s.slot.num_scales, s.target),
        axes=("hidden",),
        features=(*QUANTIZED, "weights"),
    ),
)
