"""Stamps: what came with each received row, taken apart.

Shape symbols:
    A   receive capacity in rows
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.kernel import Arg, TritonKernel, chosen_args
from moe_triton.core.plan import Hole
from moe_triton.core.row_formats import QUANTIZED
from moe_triton.kernels.cases import F32, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.scales import copy_words
from moe_triton.layout import ORIGIN, STAMP

ORIGIN_WORDS, STAMP_WORDS = ORIGIN.num_words, STAMP.num_words
WEIGHT_WORD, SCALE_WORD = STAMP.word("weight"), STAMP.word("scale")


@triton.jit
def _stamps_kernel(
    stamps,
    stamp_floats,
    scales,
    num_rows,
    out_origins,
    out_weights,
    out_scales,
    capacity,
    scale_stride,
    ORIGIN_WORDS: tl.constexpr,
    STAMP_WORDS: tl.constexpr,
    WEIGHT_WORD: tl.constexpr,
    SCALE_WORD: tl.constexpr,
    NUM_SCALES: tl.constexpr,
):
    rows = tl.minimum(tl.load(num_rows), capacity)
    per_program = tl.cdiv(rows, tl.num_programs(0))
    begin = tl.program_id(0) * per_program
    for i in range(begin, tl.minimum(begin + per_program, rows)):
        row = tl.cast(i, tl.int64)
        copy_words(stamps + row * STAMP_WORDS, out_origins, row, ORIGIN_WORDS)
        if out_weights is not None:
            copy_words(stamp_floats + row * STAMP_WORDS + WEIGHT_WORD, out_weights, row, 1)
        if scales is not None:
            copy_words(scales + row * scale_stride, out_scales, row, NUM_SCALES)
        else:
            copy_words(stamp_floats + row * STAMP_WORDS + SCALE_WORD, out_scales, row, NUM_SCALES)


def _stamps_fallback(
    programs: int,
    *,
    stamps: torch.Tensor,
    stamp_floats: torch.Tensor,
    num_rows: torch.Tensor,
    out_origins: torch.Tensor,
    capacity: int,
    scale_stride: int,
    NUM_SCALES: int,
    scales: torch.Tensor | None = None,
    out_weights: torch.Tensor | None = None,
    out_scales: torch.Tensor | None = None,
    **_: object,
) -> None:
    rows = max(0, min(int(num_rows[0]), capacity))
    words = stamps[: rows * STAMP_WORDS].view(rows, STAMP_WORDS)
    floats = stamp_floats[: rows * STAMP_WORDS].view(rows, STAMP_WORDS)
    out_origins[: rows * ORIGIN_WORDS] = words[:, :ORIGIN_WORDS].reshape(-1)
    if out_weights is not None:
        out_weights[:rows] = floats[:, WEIGHT_WORD]
    if out_scales is not None:
        found = floats[:, SCALE_WORD : SCALE_WORD + 1]
        if scales is not None:
            found = scales.as_strided((rows, NUM_SCALES), (scale_stride, 1), scales.storage_offset())
        out_scales[: rows * NUM_SCALES] = found.reshape(-1)


@functools.cache
def stamps_kernel(has_weight: bool, num_scales: int) -> TritonKernel:
    """Origins (A, 3), weights (A,) where wanted and scales (A, n) of the rows that ``num_rows`` (1,) counts.

    An origin is where a row comes from, the first words of its stamp (`moe_triton.core.records.STAMP`). A
    single scale stands in the stamp as well; several are in ``scales``, ``scale_stride`` words from one row's
    to the next.
    """
    arguments = (
        (True, Arg("stamps", "*i32", "in")),
        (True, Arg("stamp_floats", "*fp32", "in", interleaved_with="stamps")),
        (num_scales > 1, Arg("scales", "*fp32", "in")),
        (True, Arg("num_rows", "*i32", "in")),
        (True, Arg("out_origins", "*i32", "out")),
        (has_weight, Arg("out_weights", "*fp32", "out")),
        (num_scales > 0, Arg("out_scales", "*fp32", "out")),
        (True, Arg("capacity", "i32", "value")),
        (num_scales > 1, Arg("scale_stride", "i64", "value")),
    )
    args, absent = chosen_args(arguments)
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
        },
        fallback=_stamps_fallback,
    )


def _inputs(s: Shape, r: Draw) -> Inputs:
    stamps = r.words(r.tokens, STAMP_WORDS)
    stamps[:, WEIGHT_WORD : SCALE_WORD + 1] = r.uniform(r.tokens, 2).view(torch.int32)
    return {
        "stamps": stamps,
        "stamp_floats": Hole("stamps"),
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
        lambda s: stamps_kernel(s.has("weights"), s.slot.num_scales),
        axes=("hidden",),
        features=(*QUANTIZED, "weights"),
    ),
)
