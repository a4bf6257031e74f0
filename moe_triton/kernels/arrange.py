"""Arrange: received slot rows to expert order, taking row, scale, origin and weight apart.

Shape symbols:
    E   experts of this rank
    W   ranks
    A   receive capacity in rows
    N   E*W entries, one block of slots each, expert-major: n = e * W + source

Everything moves as 4-byte words: an int8, bf16 or fp16 row of H elements, H a multiple of 32, is a whole
number of them.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.kernel import Arg, TritonKernel, numbers
from moe_triton.core.plan import Hole
from moe_triton.core.row_formats import QUANTIZED
from moe_triton.kernels.cases import F32, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.scales import copy_words
from moe_triton.kernels.zones import NO_ZONE, ZONE, ZONE_STRIDE, in_zone, zone_offset
from moe_triton.layout import ORIGIN, STAMP


@triton.jit
def _arrange_kernel(
    slots,
    slot_scales,
    recv_offsets,
    out_rows,
    out_scales,
    out_origins,
    out_weights,
    zone,
    num_entries,
    num_ranks,
    kept_rank,
    src_stride,
    expert_stride,
    slot_stride,
    zone_stride,
    ROW_WORDS: tl.constexpr,
    SCALE_WORD: tl.constexpr,
    ORIGIN_WORD: tl.constexpr,
    WEIGHT_WORD: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ORIGIN_WORDS: tl.constexpr,
):
    if zone is not None:
        slots += zone_offset(zone, zone_stride)
        slot_scales += zone_offset(zone, zone_stride)
    per_program = tl.cdiv(num_entries, tl.num_programs(0))
    begin = tl.minimum(tl.program_id(0) * per_program, num_entries)
    start = tl.where(begin > 0, tl.load(recv_offsets + tl.maximum(begin - 1, 0)), 0)
    for n in range(begin, tl.minimum(begin + per_program, num_entries)):
        stop = tl.load(recv_offsets + n)
        expert = (n // num_ranks).to(tl.int64)
        source = (n % num_ranks).to(tl.int64)
        block = source * src_stride + expert * expert_stride
        for i in range(0, tl.where(source == kept_rank, 0, stop - start)):
            slot = block + tl.cast(i, tl.int64) * slot_stride
            row = tl.cast(start + i, tl.int64)
            copy_words(slots + slot, out_rows, row, ROW_WORDS)
            copy_words(slot_scales + slot + SCALE_WORD, out_scales, row, NUM_SCALES)
            copy_words(slots + slot + ORIGIN_WORD, out_origins, row, ORIGIN_WORDS)
            copy_words(slot_scales + slot + WEIGHT_WORD, out_weights, row, HAS_WEIGHT)
        start = stop


def _arrange_fallback(
    programs: int,
    *,
    slots: torch.Tensor,
    slot_scales: torch.Tensor,
    recv_offsets: torch.Tensor,
    out_rows: torch.Tensor,
    out_scales: torch.Tensor,
    out_origins: torch.Tensor,
    out_weights: torch.Tensor,
    num_entries: int,
    num_ranks: int,
    kept_rank: int,
    src_stride: int,
    expert_stride: int,
    slot_stride: int,
    ROW_WORDS: int,
    SCALE_WORD: int,
    ORIGIN_WORD: int,
    WEIGHT_WORD: int,
    NUM_SCALES: int,
    HAS_WEIGHT: bool,
    zone: torch.Tensor | None = None,
    zone_stride: int = 0,
    **_: object,
) -> None:
    slots, slot_scales = (in_zone(memory, zone, zone_stride) for memory in (slots, slot_scales))
    ends = [0, *recv_offsets[:num_entries].tolist()]
    for n in range(num_entries):
        start, stop = ends[n], ends[n + 1]
        expert, source = divmod(n, num_ranks)
        if stop <= start or source == kept_rank:
            continue
        block = slots.storage_offset() + source * src_stride + expert * expert_stride
        count = stop - start
        rows = slots.as_strided((count, ROW_WORDS), (slot_stride, 1), block)
        out_rows[start * ROW_WORDS : stop * ROW_WORDS] = rows.reshape(-1)
        origins = slots.as_strided((count, 3), (slot_stride, 1), block + ORIGIN_WORD)
        out_origins[start * 3 : stop * 3] = origins.reshape(-1)
        floats = block - slots.storage_offset() + slot_scales.storage_offset()
        if NUM_SCALES:
            scales = slot_scales.as_strided((count, NUM_SCALES), (slot_stride, 1), floats + SCALE_WORD)
            out_scales[start * NUM_SCALES : stop * NUM_SCALES] = scales.reshape(-1)
        if HAS_WEIGHT:
            weights = slot_scales.as_strided((count,), (slot_stride,), floats + WEIGHT_WORD)
            out_weights[start:stop] = weights


@functools.cache
def arrange_kernel(
    row_words: int,
    scale_word: int,
    stamp_word: int,
    num_scales: int,
    has_weight: bool = False,
    zoned: bool = False,
) -> TritonKernel:
    """Copy received rows to expert order.

    ``slots`` is the dispatch region of the window as int32 words and ``slot_scales`` the same memory as
    fp32. The block of entry ``n = expert * num_ranks + source`` starts at
    ``source * src_stride + expert * expert_stride`` and holds one slot every ``slot_stride`` words.
    ``recv_offsets`` is the inclusive prefix sum of the rows per entry. The routing weight, fp32, stands
    behind the origin. Without ``num_scales`` or ``has_weight``, ``out_scales`` or ``out_weights`` is not
    written. Entries from ``kept_rank`` are left out: `keep` brings those rows; -1 leaves out none.

    Args:
        row_words: H * element size / 4.
        scale_word, stamp_word: where scales and stamp start within a slot, in words.
        num_scales: of a row.
        zoned: ``slots`` is zone 0's; the rows are in the zone that ``zone`` (1,) names, ``zone_stride``
            words from one to the next.
    """
    check_positive("row_words", row_words)
    return TritonKernel(
        name="arrange",
        fn=_arrange_kernel,
        args=(
            Arg("slots", "*i32", "in"),
            Arg("slot_scales", "*fp32", "in", interleaved_with="slots"),
            Arg("recv_offsets", "*i32", "in"),
            Arg("out_rows", "*i32", "out"),
            Arg("out_scales", "*fp32", "out"),
            Arg("out_origins", "*i32", "out"),
            Arg("out_weights", "*fp32", "out"),
            *([ZONE] if zoned else []),
            *numbers("i32", "num_entries num_ranks kept_rank"),
            *numbers("i64", "src_stride expert_stride slot_stride"),
            *([ZONE_STRIDE] if zoned else []),
        ),
        constants={
            **({} if zoned else NO_ZONE),
            "ROW_WORDS": row_words,
            "SCALE_WORD": scale_word,
            "ORIGIN_WORD": stamp_word + STAMP.word("source"),
            "WEIGHT_WORD": stamp_word + STAMP.word("weight"),
            "NUM_SCALES": num_scales,
            "HAS_WEIGHT": has_weight,
            "ORIGIN_WORDS": ORIGIN.num_words,
        },
        fallback=_arrange_fallback,
    )


def _inputs(s: Shape, r: Draw) -> Inputs:
    words = s.slot_bytes // 4
    rows, row_words = int(r.ends[-1]), s.slot.row_bytes // 4
    copied = rows - r.rows_from(r.rank)
    return {
        "slots": r.words(r.num_ranks, r.num_local, r.most_rows, words),
        "slot_scales": Hole("slots"),
        "recv_offsets": r.ends,
        "out_rows": blank(rows, row_words),
        "out_scales": blank(rows, s.slot.num_scales, dtype=F32),
        "out_origins": blank(rows, 3),
        "out_weights": blank(rows, dtype=F32),
        "num_entries": r.entries,
        "num_ranks": r.num_ranks,
        "kept_rank": r.rank,
        "src_stride": r.num_local * r.most_rows * words,
        "expert_stride": r.most_rows * words,
        "slot_stride": words,
        "bytes_moved": 8 * copied * (row_words + 3 + s.slot.num_scales + s.has("weights")),
    }


def _build(s: Shape) -> TritonKernel:
    words = [n // 4 for n in (s.slot.row_bytes, s.slot.scale_offset, s.slot.stamp_offset)]
    return arrange_kernel(*words, s.slot.num_scales, s.has("weights"), zoned=s.zoned)


FAMILIES = (
    Family(
        "arrange",
        arrange_kernel,
        _inputs,
        _build,
        axes=("hidden",),
        features=(*QUANTIZED, "weights"),
        computes=False,
    ),
)
