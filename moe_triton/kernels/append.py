"""Append: the tensor-parallel peer's rows and counts after this rank's own.

Shape symbols:
    EP   ranks of the expert-parallel group
    A    rows of one rank at most (capacity)

Counts and rows come from another process: counts are clamped to [0, A], so that no row lands outside the
2*A rows that the output has room for.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.kernel import Arg, TritonKernel, alike, chosen_args, numbers
from moe_triton.core.plan import Placeholder
from moe_triton.core.records import STAMP
from moe_triton.core.row_formats import QUANTIZED
from moe_triton.core.space import Space, named_features
from moe_triton.kernels.cases import F32, I32, I64, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.programs import part_of
from moe_triton.kernels.scales import copy_words
from moe_triton.kernels.zones import ZONE, ZONE_STRIDE, in_zone, zone_offset

BLOCK = 64
BLOCKS = 16, 32, 64, 128, 256


@triton.jit
def _clamped(value, capacity):
    return tl.minimum(tl.maximum(value, 0), capacity)


@triton.jit
def _append_kernel(
    slots, slot_scales, counts, out_rows, out_scales, zone,
    tp_rank, capacity, slot_stride, zone_stride,
    ROW_WORDS: tl.constexpr, SCALE_WORD: tl.constexpr, NUM_SCALES: tl.constexpr,
):  # fmt: skip
    if zone is not None:
        slots += zone_offset(zone, zone_stride)
        slot_scales += zone_offset(zone, zone_stride)
    own = _clamped(tl.load(counts + tp_rank), capacity)
    num_rows = _clamped(tl.load(counts + 1 - tp_rank), capacity)
    begin, end = part_of(num_rows)
    words = tl.arange(0, ROW_WORDS)
    for i in range(begin, end):
        slot = tl.cast(i, tl.int64) * slot_stride
        row = tl.cast(own + i, tl.int64)
        tl.store(out_rows + row * ROW_WORDS + words, tl.load(slots + slot + words))
        copy_words(slot_scales + slot + SCALE_WORD, out_scales, row, NUM_SCALES)


@fallback
def _append_fallback(a: Arguments) -> None:
    slots, slot_scales = (in_zone(memory, a.zone, a.zone_stride) for memory in (a.slots, a.slot_scales))
    own, num_rows = (min(max(int(a.counts[r]), 0), a.capacity) for r in (a.tp_rank, 1 - a.tp_rank))
    if not num_rows:
        return
    stop = own + num_rows
    rows = slots.as_strided((num_rows, a.ROW_WORDS), (a.slot_stride, 1), slots.storage_offset())
    a.out_rows[own * a.ROW_WORDS : stop * a.ROW_WORDS] = rows.reshape(-1)
    if a.NUM_SCALES:
        at = slot_scales.storage_offset() + a.SCALE_WORD
        scales = slot_scales.as_strided((num_rows, a.NUM_SCALES), (a.slot_stride, 1), at)
        a.out_scales[own * a.NUM_SCALES : stop * a.NUM_SCALES] = scales.reshape(-1)


@functools.cache
def append_kernel(row_words: int, scale_word: int, num_scales: int, zoned: bool = False) -> TritonKernel:
    """Copy the peer's rows from its slots to behind this rank's own.

    ``slots`` are the rows that came from the peer as int32 words, one slot every ``slot_stride`` words, and
    ``slot_scales`` the same memory as fp32. ``counts`` holds the rows of both ranks by their number
    in the tensor-parallel group; ``out_rows`` has room for 2*A rows. Without ``num_scales``,
    ``out_scales`` is not written.

    Args:
        row_words: H * element size / 4.
        scale_word: where the scales start within a slot, in words.
        num_scales: of a row.
        zoned: ``slots`` is zone 0's; the rows are in the zone that ``zone`` (1,) names, ``zone_stride``
            words from one to the next.
    """
    check_positive("row_words", row_words)
    args, absent = chosen_args(
        (True, (Arg("slots", "*i32", "in"), Arg("slot_scales", "*fp32", "in", interleaved_with="slots"))),
        (True, (Arg("counts", "*i32", "in"), Arg("out_rows", "*i32", "out"))),
        (True, Arg("out_scales", "*fp32", "out")),
        (zoned, ZONE),
        (True, (*numbers("i32", "tp_rank capacity"), Arg("slot_stride", "i64", "value"))),
        (zoned, ZONE_STRIDE),
    )
    constants = {"ROW_WORDS": row_words, "SCALE_WORD": scale_word, "NUM_SCALES": num_scales}
    return TritonKernel("append", _append_kernel, args, absent | constants, _append_fallback)


@triton.jit
def _gather_counts_kernel(
    header, counts, ep_recv_counts, tokens_per_expert, zone,
    num_ranks, tp_rank, capacity, zone_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if zone is not None:
        header += zone_offset(zone, zone_stride)
    # one of the sums is read and written: the first program does all
    is_first = (tl.program_id(0) == 0).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    for b in range(0, tl.cdiv(num_ranks, BLOCK) * is_first):
        at = b * BLOCK + lanes
        ends = tl.load(header + at, mask=at < num_ranks, other=0)
        tl.store(ep_recv_counts + at, _clamped(ends, capacity), mask=at < num_ranks)
    # a loop of one turn or none: in a branch, the CPU's compiler would give the store a buffer never freed
    for _ in range(0, is_first):
        others = _clamped(tl.load(counts + 1 - tp_rank), capacity)
        tl.store(tokens_per_expert, tl.load(tokens_per_expert) + tl.cast(others, tl.int64))


@fallback
def _gather_counts_fallback(a: Arguments) -> None:
    header = in_zone(a.header, a.zone, a.zone_stride)
    a.ep_recv_counts[: a.num_ranks] = header[: a.num_ranks].clamp(0, a.capacity)
    a.tokens_per_expert[0] += a.counts[1 - a.tp_rank].clamp(0, a.capacity)


@functools.cache
def gather_counts_kernel(target: str = "cpu", zoned: bool = False) -> TritonKernel:
    """The peer's running sums after this rank's own, and both ranks' rows of the one local expert.

    ``header`` holds the peer's ep_recv_counts, ``ep_recv_counts`` is where they go, and the peer's entry of
    ``counts`` is added to ``tokens_per_expert[0]``. The same form serves every target. ``zoned`` is of
    ``header``, as in `append_kernel`.
    """
    args, absent = chosen_args(
        (True, alike("*i32", "header counts", "in")),
        (True, (Arg("ep_recv_counts", "*i32", "out"), Arg("tokens_per_expert", "*i64", "inout"))),
        (zoned, ZONE),
        (True, numbers("i32", "num_ranks tp_rank capacity")),
        (zoned, ZONE_STRIDE),
    )
    return TritonKernel(
        name="gather_counts",
        fn=_gather_counts_kernel,
        args=args,
        constants={**absent, "BLOCK": BLOCK},
        fallback=_gather_counts_fallback,
        space=Space({"BLOCK": BLOCKS}, named_features(zoned=zoned)),
        bytes_moved=lambda *, num_ranks, **_: 8 * num_ranks + 20,
    )


def _append_inputs(s: Shape, r: Draw) -> Inputs:
    words, row_words = s.slot_bytes // 4, s.slot.row_bytes // 4
    return {
        "slots": r.words(r.tokens, words),
        "slot_scales": Placeholder("slots"),
        "counts": torch.tensor([3, r.tokens - 1], dtype=I32),
        "out_rows": blank(2 * r.tokens, row_words),
        "out_scales": blank(2 * r.tokens, s.slot.num_scales, dtype=F32),
        "tp_rank": 0,
        "capacity": r.tokens,
        "slot_stride": words,
        "bytes_moved": 8 * (r.tokens - 1) * (row_words + s.slot.num_scales),
    }


def _build_append(s: Shape) -> TritonKernel:
    scale = s.slot.scale_offset // 4 + (STAMP.word("scale") if s.has("stamped") else 0)
    return append_kernel(s.slot.row_bytes // 4, scale, s.slot.num_scales, s.zoned)


def _gather_counts_inputs(s: Shape, r: Draw) -> Inputs:
    return {
        "header": r.ends[: r.num_ranks].clone(),
        "counts": r.integers(0, 20, 2),
        "ep_recv_counts": blank(r.num_ranks),
        "tokens_per_expert": r.integers(0, 9, 1, dtype=I64),
        "tp_rank": 0,
        "capacity": 15,
    }


FAMILIES = (
    Family(
        "append",
        append_kernel,
        _append_inputs,
        _build_append,
        axes=("hidden",),
        features=(*QUANTIZED, "stamped"),  # whose only scale is a word of the stamp, as in fullmesh_v2
        variants=((), *((name,) for name in QUANTIZED), ("int8", "stamped")),
        computes=False,
    ),
    Family("gather_counts", gather_counts_kernel, _gather_counts_inputs, window="header"),
)
