"""Stamps: what came with each received row, taken apart.

Shape symbols:
    A   receive capacity in rows
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.checks import check_tensor
from moe_triton.core.kernel import Arg, TritonKernel, chosen_args
from moe_triton.core.plan import Hole
from moe_triton.kernels.cases import F32, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.checks import Launch
from moe_triton.kernels.language import tl, triton
from moe_triton.layout import STAMP_BYTES, WORD_BYTES

STAMP_WORDS = STAMP_BYTES // WORD_BYTES
WEIGHT_WORD, SCALE_WORD = 3, 4


@triton.jit
def _stamps_kernel(
    stamps,
    stamp_floats,
    num_rows,
    out_triples,
    out_weights,
    out_scales,
    capacity,
    STAMP_WORDS: tl.constexpr,
    WEIGHT_WORD: tl.constexpr,
    SCALE_WORD: tl.constexpr,
):
    rows = tl.minimum(tl.load(num_rows), capacity)
    per_program = tl.cdiv(rows, tl.num_programs(0))
    begin = tl.program_id(0) * per_program
    for i in range(begin, tl.minimum(begin + per_program, rows)):
        row = tl.cast(i, tl.int64)
        for word in tl.static_range(3):
            tl.store(out_triples + row * 3 + word, tl.load(stamps + row * STAMP_WORDS + word))
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
    out_triples: torch.Tensor,
    capacity: int,
    out_weights: torch.Tensor | None = None,
    out_scales: torch.Tensor | None = None,
    **_: object,
) -> None:
    rows = max(0, min(int(num_rows[0]), capacity))
    words = stamps[: rows * STAMP_WORDS].view(rows, STAMP_WORDS)
    floats = stamp_floats[: rows * STAMP_WORDS].view(rows, STAMP_WORDS)
    out_triples[: rows * 3] = words[:, :3].reshape(-1)
    if out_weights is not None:
        out_weights[:rows] = floats[:, WEIGHT_WORD]
    if out_scales is not None:
        out_scales[:rows] = floats[:, SCALE_WORD]


@functools.cache
def stamps_kernel(has_weight: bool, has_scale: bool) -> TritonKernel:
    """Triples (A, 3), and weights and scales (A,) where wanted, of the rows that ``num_rows`` (1,) counts.

    A stamp is 8 words: source rank, token, k, fp32 weight, fp32 scale.
    """
    arguments = (
        (True, Arg("stamps", "*i32", "in")),
        (True, Arg("stamp_floats", "*fp32", "in", interleaved_with="stamps")),
        (True, Arg("num_rows", "*i32", "in")),
        (True, Arg("out_triples", "*i32", "out")),
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
            "STAMP_WORDS": STAMP_WORDS,
            "WEIGHT_WORD": WEIGHT_WORD,
            "SCALE_WORD": SCALE_WORD,
        },
        fallback=_stamps_fallback,
    )


def split_stamps(
    stamps: torch.Tensor,
    num_rows: int,
    launch: Launch,
    *,
    has_weight: bool = True,
    has_scale: bool = True,
    programs: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take stamps apart.

    Args:
        stamps: (A, 8) int32.
        num_rows: how many of them hold something.

    Returns:
        triples (A, 3) int32, weights (A,) fp32, scales (A,) fp32; rows from ``num_rows`` on are undefined.
    """
    check_tensor("stamps", stamps, shape=["any", STAMP_WORDS], dtypes=[torch.int32])
    capacity = stamps.shape[0]
    triples = torch.empty((capacity, 3), dtype=torch.int32)
    weights, scales = (torch.empty(capacity, dtype=torch.float32) for _ in range(2))
    extra = [tensor for tensor, wanted in ((weights, has_weight), (scales, has_scale)) if wanted]
    number = torch.tensor([num_rows], dtype=torch.int32)
    inputs = [stamps, stamps.view(torch.float32), number]
    launch(stamps_kernel(has_weight, has_scale), [*inputs, triples, *extra, capacity], programs)
    return triples, weights, scales


def _inputs(s: Shape, r: Draw) -> Inputs:
    stamps = r.words(r.tokens, STAMP_WORDS)
    stamps[:, WEIGHT_WORD : SCALE_WORD + 1] = r.uniform(r.tokens, 2).view(torch.int32)
    return {
        "stamps": stamps,
        "stamp_floats": Hole("stamps"),
        "num_rows": torch.tensor([r.tokens - 1], dtype=torch.int32),
        "out_triples": blank(r.tokens, 3),
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
