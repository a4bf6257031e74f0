"""Arrange: every received row to expert order, taking row, scale, origin and weight apart.

Shape symbols:
    A   receive capacity in rows
    T   tokens of this rank
    K   experts per token
    S   shared experts

Rows are taken in the order of the output, each from the slot of the window that ``row_slots`` says. Rows of
this rank for itself need not go through the window: they are copied from where they are, token by token, so
that the K copies of a token's row find it in the cache. Their places follow from counts that peers can write:
one that is not among the rows of its own entry is left out, so that none lies outside the output.

Everything moves as 4-byte words: an int8, bf16 or fp16 row of H elements, H a multiple of 32, is a whole
number of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from moe_triton.core.checks import check_positive
from moe_triton.core.kernel import Arg, TritonKernel, chosen_args, numbers
from moe_triton.core.records import STATUS_ENTRY
from moe_triton.kernels.arrange_fallback import SLOT_WORDS, arrange_fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.own_rows import own_row
from moe_triton.kernels.scales import copy_words
from moe_triton.kernels.zones import ZONE_STRIDE, turn_zone, zone_offset
from moe_triton.layout import ORIGIN, STAMP, WORD_BYTES, SlotLayout

__all__ = ["SLOT_WORDS", "OwnRows", "arrange_kernel"]


@triton.jit
def _share(number):
    """The first of this program's part of so many, and the first behind it."""
    per_program = tl.cdiv(number, tl.num_programs(0))
    begin = tl.program_id(0) * per_program
    return begin, tl.minimum(begin + per_program, number)


@triton.jit
def _take_row(
    i,
    slots,
    slot_scales,
    row_slots,
    out_rows,
    out_scales,
    out_origins,
    out_weights,
    MAY_BE_OWN: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    SCALE_WORD: tl.constexpr,
    ORIGIN_WORD: tl.constexpr,
    WEIGHT_WORD: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    ORIGIN_WORDS: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
):
    """Row i out of its slot."""
    number = tl.load(row_slots + i)
    if (number >= 0) if MAY_BE_OWN else True:  # without own rows there is no branch
        slot = tl.cast(number, tl.int64) * SLOT_WORDS
        row = tl.cast(i, tl.int64)
        copy_words(slots + slot, out_rows, row, ROW_WORDS)
        copy_words(slots + slot + ORIGIN_WORD, out_origins, row, ORIGIN_WORDS)
        if out_scales is not None:
            copy_words(slot_scales + slot + SCALE_WORD, out_scales, row, NUM_SCALES)
        if out_weights is not None:
            copy_words(slot_scales + slot + WEIGHT_WORD, out_weights, row, 1)


@triton.jit
def _arrange_kernel(
    slots,
    slot_scales,
    row_slots,
    num_rows,
    rows_before,
    rows_taken,
    entries,
    rows,
    scales,
    topk_idx,
    topk_weights,
    expand_idx,
    recv_offsets,
    out_rows,
    out_scales,
    out_origins,
    out_weights,
    kept_zone,
    zone,
    capacity,
    num_entries,
    zone_stride,
    row_stride,
    num_local_experts,
    num_ranks,
    first_expert,
    rank,
    first_token,
    num_tokens,
    ROW_WORDS: tl.constexpr,
    SCALE_WORD: tl.constexpr,
    ORIGIN_WORD: tl.constexpr,
    WEIGHT_WORD: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    ORIGIN_WORDS: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
    ENTRY_WORDS: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr,
):
    if kept_zone is not None:
        entries += zone_offset(kept_zone, zone_stride)
    entries_per_program = tl.cdiv(num_entries, tl.num_programs(0))
    first = tl.program_id(0) * entries_per_program
    for n in range(first, tl.minimum(first + entries_per_program, num_entries)):
        tl.store(entries + n * ENTRY_WORDS + tl.arange(0, ENTRY_WORDS), tl.zeros((ENTRY_WORDS,), tl.int32))

    received = tl.minimum(tl.maximum(tl.load(num_rows), 0), capacity)
    if rows_taken is not None:
        begin, end = _share(num_local_experts * num_ranks)
        for entry in range(begin, end):
            start = tl.where(entry > 0, tl.load(recv_offsets + tl.maximum(entry - 1, 0)), 0)
            place = entry % num_ranks * num_local_experts + entry // num_ranks
            first = tl.maximum(start + tl.load(rows_before + place), 0)
            last = tl.minimum(start + tl.load(rows_taken + place), received)
            for i in range(first, last):
                _take_row(
                    i,
                    slots,
                    slot_scales,
                    row_slots,
                    out_rows,
                    out_scales,
                    out_origins,
                    out_weights,
                    False,
                    ROW_WORDS,
                    SCALE_WORD,
                    ORIGIN_WORD,
                    WEIGHT_WORD,
                    NUM_SCALES,
                    ORIGIN_WORDS,
                    SLOT_WORDS,
                )
    else:
        begin, end = _share(received)
        for i in range(begin, end):
            _take_row(
                i,
                slots,
                slot_scales,
                row_slots,
                out_rows,
                out_scales,
                out_origins,
                out_weights,
                rows is not None,
                ROW_WORDS,
                SCALE_WORD,
                ORIGIN_WORD,
                WEIGHT_WORD,
                NUM_SCALES,
                ORIGIN_WORDS,
                SLOT_WORDS,
            )
    if rows is not None:
        begin, end = _share(num_tokens)
        if first_token is not None:
            begin, end = first_token + begin, first_token + end
        for token in range(begin, end):
            for k in range(0, TOPK):
                expert, index = tl.load(topk_idx + token * TOPK + k), tl.load(expand_idx + token * TOPK + k)
                row = own_row(expert, index, recv_offsets, first_expert, num_local_experts, num_ranks, rank)
                if (row >= 0) & (row < received):
                    source = tl.cast(token, tl.int64)
                    if ROWS_PER_TOKEN > 1:
                        source = source * ROWS_PER_TOKEN + k
                    copy_words(rows + source * row_stride, out_rows, row, ROW_WORDS)
                    if out_scales is not None:
                        copy_words(scales + source * row_stride, out_scales, row, NUM_SCALES)
                    tl.store(out_origins + row * ORIGIN_WORDS, rank)
                    tl.store(out_origins + row * ORIGIN_WORDS + 1, token)
                    tl.store(out_origins + row * ORIGIN_WORDS + 2, k)
                    if out_weights is not None:
                        tl.store(out_weights + row, tl.load(topk_weights + token * TOPK + k))
    turn_zone(kept_zone, zone)


@dataclass(frozen=True)
class OwnRows:
    """This rank's rows for its own experts, where they stay out of the window.

    Attributes:
        topk: K.
        rows_per_token: 1, or K + S where each result has its own row, as with smooth scales.
    """

    topk: int
    rows_per_token: int = 1


@functools.cache
def arrange_kernel(
    slot: SlotLayout,
    has_weight: bool,
    own: OwnRows | None = None,
    zoned: bool = False,
    parted: bool = False,
) -> TritonKernel:
    """Copy received rows to expert order, each from the slot that ``row_slots`` (A,) says.

    ``slots`` is the window from its first byte as int32 words and ``slot_scales`` the same memory as fp32;
    ``row_slots`` counts in units of 32 bytes. ``num_rows`` (1,) counts the rows; more than ``capacity`` are
    not there. ``entries`` (N, 8), the status entries that this dispatch waited for, are cleared: every block
    of the launch before has seen them, which no launch could know of itself.

    With ``own``, a row with a negative entry is in no slot. This rank's row for its own expert e is row
    ``start[e] + expand_idx[t, k]`` of the output, where those of the sources before it end::

        start[e] = recv_offsets[(e - first_expert) * W + rank - 1]

    Token t's row, of H elements, starts ``t * row_stride`` words after ``rows``, its scales as far after
    ``scales``; with ``rows_per_token`` K + S, result k of t has row ``t * (K + S) + k``. Origin (rank, t, k)
    and weight ``topk_weights[t, k]`` go there too.

    Where ``parted``, only rows of a part: of the entry for expert e of source s, those from
    ``rows_before[s, e]`` to ``rows_taken[s, e]``, (W, E) each, behind the entry's first one,
    ``recv_offsets[e * W + s - 1]``; and with ``own``, rows of ``num_tokens`` tokens from ``first_token`` on.

    Args:
        slot: what a slot of the window holds, and where.
        has_weight: rows have a routing weight, fp32: in the window, behind the origin.
        own: rows of this rank for itself come from ``rows``; otherwise all are in the window.
        zoned: it turns the zone of the operator whose last launch it is: ``zone`` (1,) is
            ``1 - kept_zone[0]``; and ``entries`` is zone 0's, ``zone_stride`` words before the other's.
        parted: rows of a part.
    """
    check_positive("hidden", slot.hidden)
    scaled, by_entry = slot.num_scales > 0, own is not None or parted
    args, absent = chosen_args(
        (
            (True, Arg("slots", "*i32", "in")),
            (True, Arg("slot_scales", "*fp32", "in", interleaved_with="slots")),
            (True, Arg("row_slots", "*i32", "in")),
            (True, Arg("num_rows", "*i32", "in")),
            (parted, Arg("rows_before", "*i32", "in")),
            (parted, Arg("rows_taken", "*i32", "in")),
            (True, Arg("entries", "*i32", "inout", interleaved_with="slots")),
            (own is not None, Arg("rows", "*i32", "in")),
            (own is not None and scaled, Arg("scales", "*fp32", "in", interleaved_with="rows")),
            (own is not None, Arg("topk_idx", "*i32", "in")),
            (own is not None and has_weight, Arg("topk_weights", "*fp32", "in")),
            (own is not None, Arg("expand_idx", "*i32", "in")),
            (by_entry, Arg("recv_offsets", "*i32", "in")),
            (True, Arg("out_rows", "*i32", "out")),
            (scaled, Arg("out_scales", "*fp32", "out")),
            (True, Arg("out_origins", "*i32", "out")),
            (has_weight, Arg("out_weights", "*fp32", "out")),
            (zoned, Arg("kept_zone", "*i32", "in")),
            (zoned, Arg("zone", "*i32", "out")),
            *((True, arg) for arg in numbers("i32", "capacity num_entries")),
            (zoned, ZONE_STRIDE),
            (own is not None, Arg("row_stride", "i64", "value")),
            *((by_entry, arg) for arg in numbers("i32", "num_local_experts num_ranks")),
            *((own is not None, arg) for arg in numbers("i32", "first_expert rank")),
            (own is not None and parted, Arg("first_token", "i32", "value")),
            (own is not None, Arg("num_tokens", "i32", "value")),
        )
    )
    stamp_word = slot.stamp_offset // WORD_BYTES
    return TritonKernel(
        name=f"arrange{'_own' * (own is not None)}{'_part' * parted}",
        fn=_arrange_kernel,
        args=args,
        constants={
            **absent,
            "ROW_WORDS": slot.row_bytes // WORD_BYTES,
            "SCALE_WORD": slot.scale_offset // WORD_BYTES,
            "ORIGIN_WORD": stamp_word + STAMP.word("source"),
            "WEIGHT_WORD": stamp_word + STAMP.word("weight"),
            "NUM_SCALES": slot.num_scales,
            "ORIGIN_WORDS": ORIGIN.num_words,
            "SLOT_WORDS": SLOT_WORDS,
            "ENTRY_WORDS": STATUS_ENTRY.num_words,
            "TOPK": own.topk if own else 0,
            "ROWS_PER_TOKEN": own.rows_per_token if own else 0,
        },
        fallback=arrange_fallback,
    )
