"""Gather: rows by index, taking row and scale apart: what MPI's routes need where ours arrange.

Shape symbols: N rows. Everything moves as 4-byte words.
"""
# The bodies of Triton kernels are not Python to a type checker; constants are upper case by convention.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs
# ruff: noqa: N803

from __future__ import annotations

import functools

import torch

from moe_triton.core.kernel import Arg, TritonKernel
from moe_triton.kernels.language import tl, triton


@triton.jit
def _gather_kernel(
    slots,
    slot_scales,
    order,
    out_rows,
    out_scales,
    num_rows,
    slot_stride,
    ROW_WORDS: tl.constexpr,
    SCALE_WORD: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    words = tl.arange(0, ROW_WORDS)
    for row in range(0, num_rows):
        slot = tl.load(order + row).to(tl.int64) * slot_stride
        at = tl.cast(row, tl.int64)
        tl.store(out_rows + at * ROW_WORDS + words, tl.load(slots + slot + words))
        if HAS_SCALE:
            tl.store(out_scales + at, tl.load(slot_scales + slot + SCALE_WORD))


def _gather_fallback(
    programs: int,
    *,
    slots: torch.Tensor,
    slot_scales: torch.Tensor,
    order: torch.Tensor,
    out_rows: torch.Tensor,
    out_scales: torch.Tensor,
    num_rows: int,
    slot_stride: int,
    ROW_WORDS: int,
    SCALE_WORD: int,
    HAS_SCALE: bool,
) -> None:
    rows = slots[: slots.numel() // slot_stride * slot_stride].view(-1, slot_stride)
    chosen = rows[order[:num_rows].long()]
    out_rows[: num_rows * ROW_WORDS] = chosen[:, :ROW_WORDS].reshape(-1)
    if HAS_SCALE:
        out_scales[:num_rows] = chosen[:, SCALE_WORD].view(torch.float32)


@functools.cache
def gather_kernel(row_words: int, scale_word: int = 0, has_scale: bool = False) -> TritonKernel:
    """``out_rows[i] = slots[order[i]]``, and the scale that stands ``scale_word`` words into each slot."""
    return TritonKernel(
        name="gather",
        fn=_gather_kernel,
        args=(
            Arg("slots", "*i32", "in"),
            Arg("slot_scales", "*fp32", "in", interleaved_with="slots"),
            Arg("order", "*i32", "in"),
            Arg("out_rows", "*i32", "out"),
            Arg("out_scales", "*fp32", "out"),
            Arg("num_rows", "i32", "value"),
            Arg("slot_stride", "i64", "value"),
        ),
        constants={"ROW_WORDS": row_words, "SCALE_WORD": scale_word, "HAS_SCALE": has_scale},
        fallback=_gather_fallback,
    )
