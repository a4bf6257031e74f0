"""Stamps: what came with each received row, taken apart.

Shape symbols:
    A   receive capacity in rows
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.kernel import Arg, TritonKernel, chosen_args
from moe_triton.core.plan import Hole
from moe_triton.kernels.cases import F32, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.language import tl, triton
from moe_triton.layout import ORIGIN, STAMP

ORIGIN_WORDS, STAMP_WORDS = ORIGIN.num_words, STAMP.num_words
WEIGHT_WORD, SCALE_WORD = STAMP.word("weight"), STAMP.word("scale")


@triton.jit
def _stamps_kernel(
    stamps,
    stamp_floats,
    num_rows,
    out_origins,
    out_weights,
    out_scales,
    capacity,
    ORIGIN_WORDS: tl.constexpr,
    STAMP_WORDS: tl.constexpr,
    WEIGHT_WORD: tl.constexpr,
    SCALE_WORD: tl.constexpr,
):
    rows = tl.minimum(tl.load(num_rows), capacity)
    per_program = tl.cdiv(rows, tl.num_programs(0))
    begin = tl.program_id(0) * per_program
    for i in range(begin, tl.minimum(begin + per_program, rows)):
        row = tl.cast(i, tl.int64)
        for word in tl.static_range(ORIGIN_WORDS):
            tl.store(out_origins + row * ORIGIN_WORDS + word, tl.load(stamps + row * STAMP_WORDS + word))
        if out_weights is not None:
            tl.store(out_weights + row, tl.load(stamp_floats + row * STAMP_WORDS + WEIGHT_WORD))
        if out_scales is not None:
            tl.store(out_scales + row, tl.load(stamp_floats + row * STAMP_WORDS + SCALE_WORD))


def _stamps_fallback(
    programs: int,
    *,
    stamps: torch.Tensor,
    stamp_floats: torch.Tensor,
    num_rows: torch.Tensor,
    out_origins: torch.Tensor,
    capacity: int,
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
        out_scales[:rows] = floats[:, SCALE_WORD]


@functools.cache
def stamps_kernel(has_weight: bool, has_scale: bool) -> TritonKernel:
    """Origins (A, 3), and weights and scales (A,) where wanted, of the rows that ``num_rows`` (1,) counts.

    An origin is where a row comes from, the first words of its stamp (`moe_triton.core.records.STAMP`).
    """
    arguments = (
        (True, Arg("stamps", "*i32", "in")),
        (True, Arg("stamp_floats", "*fp32", "in", interleaved_with="stamps")),
        (True, Arg("num_rows", "*i32", "in")),
        (True, Arg("out_origins", "*i32", "out")),
        (has_weight, Arg("out_weights", "*fp32", "out")),
        (has_scale, Arg("out_scales", "*fp32", "out")),
        (True, Arg("capacity", "i32", "value")),
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
        },
        fallback=_stamps_fallback,
    )


def _inputs(s: Shape, r: Draw) -> Inputs:
    stamps = r.words(r.tokens, STAMP_WORDS)
    stamps[:, WEIGHT_WORD : SCALE_WORD + 1] = r.uniform(r.tokens, 2).view(torch.int32)
    return {
        "stamps": stamps,
        "stamp_floats": Hole("stamps"),
        "num_rows": torch.tensor([r.tokens - 1], dtype=torch.int32),
        "out_origins": blank(r.tokens, 3),
        "out_weights": blank(r.tokens, dtype=F32),
        "out_scales": blank(r.tokens, dtype=F32),
        "capacity": r.tokens,
    }


FAMILIES = (
    Family(
        "stamps",
        stamps_kernel,
        _inputs,
        lambda s: stamps_kernel(s.has("weights"), s.has("int8")),
        features=("int8", "weights"),
    ),
)
