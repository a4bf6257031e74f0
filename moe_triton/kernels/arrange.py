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
from dataclasses import dataclass, replace

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.kernel import Arg, TritonKernel, alike, chosen_args, numbers
from moe_triton.core.plan import Placeholder
from moe_triton.core.records import STATUS_ENTRY
from moe_triton.core.row_formats import QUANTIZED
from moe_triton.kernels.cases import F32, I32, Draw, Family, Features, Inputs, Shape, blank
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.own_rows import own_row, own_rows
from moe_triton.kernels.programs import part_of
from moe_triton.kernels.scales import copy_words
from moe_triton.kernels.zones import ZONE_STRIDE, in_zone, turn_cell, turn_zone, zone_offset
from moe_triton.layout import ORIGIN, STAMP, UB_ALIGN, WORD_BYTES, SlotLayout
from moe_triton.reference import expand_index

SLOT_WORDS = UB_ALIGN // WORD_BYTES  # of a unit of `row_slots`


@triton.jit
def _arrange_kernel(
    slots, slot_scales, row_slots, num_rows, places, rows_before, rows_taken, entries,
    rows, scales, topk_idx, topk_weights, expand_idx, recv_offsets,
    out_rows, out_scales, out_origins, out_weights, kept_zone, zone,
    capacity, num_entries, zone_stride, row_stride,
    num_local_experts, num_ranks, first_expert, rank, first_token, num_tokens,
    ROW_WORDS: tl.constexpr, SCALE_WORD: tl.constexpr, ORIGIN_WORD: tl.constexpr, WEIGHT_WORD: tl.constexpr,
    NUM_SCALES: tl.constexpr, ORIGIN_WORDS: tl.constexpr, SLOT_WORDS: tl.constexpr, ENTRY_WORDS: tl.constexpr,
    TOPK: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr,
):  # fmt: skip
    if kept_zone is not None:
        entries += zone_offset(kept_zone, zone_stride)
    begin, end = part_of(num_entries)
    for n in range(begin, end):
        tl.store(entries + n * ENTRY_WORDS + tl.arange(0, ENTRY_WORDS), tl.zeros((ENTRY_WORDS,), tl.int32))

    received = tl.minimum(tl.maximum(tl.load(num_rows), 0), capacity)
    # rows of a part are some of each entry; without parts, each program has a stretch of all
    begin, end = (0, 1) if rows_taken is None else part_of(num_local_experts * num_ranks)
    for entry in range(begin, end):
        if rows_taken is None:
            first, last = part_of(received)
        else:
            start = tl.where(entry > 0, tl.load(recv_offsets + tl.maximum(entry - 1, 0)), 0)
            place = entry % num_ranks * num_local_experts + entry // num_ranks
            first = tl.maximum(start + tl.load(rows_before + place), 0)
            last = tl.minimum(start + tl.load(rows_taken + place), received)
        for i in range(first, last):
            number = tl.load(row_slots + i)
            # own rows are in no slot; where there are none, there is no branch
            if True if rows is None or rows_taken is not None else number >= 0:
                slot = tl.cast(number, tl.int64) * SLOT_WORDS
                copy_words(slots + slot + ORIGIN_WORD, out_origins, tl.cast(i, tl.int64), ORIGIN_WORDS)
                row = tl.cast(i if places is None else tl.load(places + i), tl.int64)
                if True if places is None else row >= 0:
                    copy_words(slots + slot, out_rows, row, ROW_WORDS)
                    if out_scales is not None:
                        copy_words(slot_scales + slot + SCALE_WORD, out_scales, row, NUM_SCALES)
                    if out_weights is not None:
                        copy_words(slot_scales + slot + WEIGHT_WORD, out_weights, row, 1)
    if rows is not None:
        begin, end = part_of(num_tokens)
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
                    tl.store(out_origins + row * ORIGIN_WORDS, rank)
                    tl.store(out_origins + row * ORIGIN_WORDS + 1, token)
                    tl.store(out_origins + row * ORIGIN_WORDS + 2, k)
                    place = row if places is None else tl.load(places + row).to(tl.int64)
                    if True if places is None else place >= 0:
                        copy_words(rows + source * row_stride, out_rows, place, ROW_WORDS)
                        if out_scales is not None:
                            copy_words(scales + source * row_stride, out_scales, place, NUM_SCALES)
                        if out_weights is not None:
                            tl.store(out_weights + place, tl.load(topk_weights + token * TOPK + k))
    turn_zone(kept_zone, zone)


def _copy_rows(
    source: torch.Tensor, at: torch.Tensor, stride: int, out: torch.Tensor, to: torch.Tensor, words: int
) -> None:
    """Row ``at[i]`` of ``words`` words, rows being ``stride`` words apart, is ``out``'s row ``to[i]``."""
    if len(at):
        out.unfold(0, words, words)[to] = source.unfold(0, words, stride)[at]


@fallback
def _arrange_fallback(a: Arguments) -> None:
    in_zone(a.entries, a.kept_zone, a.zone_stride)[: a.num_entries * STATUS_ENTRY.num_words] = 0
    received = max(0, min(int(a.num_rows[0]), a.capacity))
    table = a.row_slots[:received].long()
    to = (table >= 0).nonzero()[:, 0] if a.rows_taken is None else _taken_rows(received, a)
    at = table[to]
    _copy_rows(a.slots[a.ORIGIN_WORD :], at, SLOT_WORDS, a.out_origins, to, ORIGIN.num_words)
    (at,), to = _placed(a, to, at)
    _copy_rows(a.slots, at, SLOT_WORDS, a.out_rows, to, a.ROW_WORDS)
    if a.out_scales is not None:
        _copy_rows(a.slot_scales[a.SCALE_WORD :], at, SLOT_WORDS, a.out_scales, to, a.NUM_SCALES)
    if a.out_weights is not None:
        _copy_rows(a.slot_scales[a.WEIGHT_WORD :], at, SLOT_WORDS, a.out_weights, to, 1)
    if a.rows is not None:
        _arrange_own_rows(received, a)
    turn_cell(a.kept_zone, a.zone)


def _placed(
    a: Arguments, rows: torch.Tensor, *tables: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What tables say of the rows that have places, and those."""
    if a.places is None:
        return list(tables), rows
    places = a.places[rows].long()
    has_place = places >= 0
    return [table[has_place] for table in tables], places[has_place]


def _taken_rows(received: int, a: Arguments) -> torch.Tensor:
    """(n,) the rows that a part takes, in their order."""
    number = a.num_ranks * a.num_local_experts
    before, taken = (  # behind which other parts have theirs
        table[:number].view(a.num_ranks, a.num_local_experts).T.flatten().long()
        for table in (a.rows_before, a.rows_taken)
    )
    starts = torch.cat([a.recv_offsets.new_zeros(1), a.recv_offsets[:-1]]).long()
    ends = zip(starts + before, starts + taken, strict=True)
    rows = torch.cat([torch.arange(int(first), int(last)) for first, last in ends])
    return rows[rows < received]


def _arrange_own_rows(received: int, a: Arguments) -> None:
    before, end = a.first_token * a.TOPK, (a.first_token + a.num_tokens) * a.TOPK
    ids, indices = (table[before:end] for table in (a.topk_idx, a.expand_idx))
    flat, to = own_rows(
        ids, indices, a.recv_offsets, a.first_expert, a.num_local_experts, a.num_ranks, a.rank
    )
    flat, to = flat[to < received] + before, to[to < received]
    token, k = flat // a.TOPK, flat % a.TOPK
    source = token * a.ROWS_PER_TOKEN + k if a.ROWS_PER_TOKEN > 1 else token
    if len(to):
        origins = torch.stack([torch.full_like(token, a.rank), token, k], 1)
        a.out_origins.unfold(0, ORIGIN.num_words, ORIGIN.num_words)[to] = origins.int()
    (source, flat), to = _placed(a, to, source, flat)
    _copy_rows(a.rows, source, a.row_stride, a.out_rows, to, a.ROW_WORDS)
    if a.out_scales is not None:
        _copy_rows(a.scales, source, a.row_stride, a.out_scales, to, a.NUM_SCALES)
    if a.out_weights is not None:
        a.out_weights[to] = a.topk_weights[flat]


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
    placed: bool = False,
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

    Where ``placed``, row, scales and weight of row i go to row ``places[i]`` (A,) instead, or nowhere where
    that is negative; its origin stays with i.

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
        placed: rows have places.
    """
    check_positive("hidden", slot.hidden)
    scaled, has_own, by_entry = slot.num_scales > 0, own is not None, own is not None or parted
    args, absent = chosen_args(
        (True, (Arg("slots", "*i32", "in"), Arg("slot_scales", "*fp32", "in", interleaved_with="slots"))),
        (True, alike("*i32", "row_slots num_rows", "in")),
        (placed, Arg("places", "*i32", "in")),
        (parted, alike("*i32", "rows_before rows_taken", "in")),
        (True, Arg("entries", "*i32", "inout", interleaved_with="slots")),
        (has_own, Arg("rows", "*i32", "in")),
        (has_own and scaled, Arg("scales", "*fp32", "in", interleaved_with="rows")),
        (has_own, Arg("topk_idx", "*i32", "in")),
        (has_own and has_weight, Arg("topk_weights", "*fp32", "in")),
        (has_own, Arg("expand_idx", "*i32", "in")),
        (by_entry, Arg("recv_offsets", "*i32", "in")),
        (True, Arg("out_rows", "*i32", "out")),
        (scaled, Arg("out_scales", "*fp32", "out")),
        (True, Arg("out_origins", "*i32", "out")),
        (has_weight, Arg("out_weights", "*fp32", "out")),
        (zoned, (Arg("kept_zone", "*i32", "in"), Arg("zone", "*i32", "out"))),
        (True, numbers("i32", "capacity num_entries")),
        (zoned, ZONE_STRIDE),
        (has_own, Arg("row_stride", "i64", "value")),
        (by_entry, numbers("i32", "num_local_experts num_ranks")),
        (has_own, numbers("i32", "first_expert rank")),
        (has_own and parted, Arg("first_token", "i32", "value")),
        (has_own, Arg("num_tokens", "i32", "value")),
    )
    stamp_word = slot.stamp_offset // WORD_BYTES
    return TritonKernel(
        name=f"arrange{'_own' * has_own}{'_part' * parted}{'_placed' * placed}",
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
        fallback=_arrange_fallback,
    )


def _received(r: Draw, local_bypass: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows from each rank for each expert (E, W); of each result, its number within its expert (T * K)."""
    received = r.integers(0, r.most_rows + 1, r.num_local, r.num_ranks)
    if local_bypass:
        own = r.ids[r.ids >= 0].bincount(minlength=r.num_experts).view(r.num_ranks, r.num_local)
        received[:, r.rank] = own[r.rank]
    return received, expand_index(r.ids, r.num_experts)


def _table(s: Shape, r: Draw, received: torch.Tensor, local_bypass: bool) -> torch.Tensor:
    """The slot of each row; this rank's own are in none."""
    per_slot, slots = s.slot_bytes // UB_ALIGN, []
    for expert, counts in enumerate(received.tolist()):
        for source, count in enumerate(counts):
            first = (source * r.num_local + expert) * r.most_rows
            is_kept = local_bypass and source == r.rank
            slots += [-1 if is_kept else (first + i) * per_slot for i in range(count)]
    return torch.tensor(slots, dtype=I32)


def _of_a_part(r: Draw, received: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(W, E) how many rows earlier parts have taken, and how many with this one."""
    taken = received.T.contiguous()
    before = torch.minimum(r.integers(0, r.most_rows + 1, *taken.shape), taken)
    return before, taken


def _inputs(s: Shape, r: Draw, local_bypass: bool) -> Inputs:
    received, expand_idx = _received(r, local_bypass)
    ends = received.flatten().cumsum(0, dtype=I32)
    rows, row_words, packed = int(ends[-1]), s.slot.row_bytes // WORD_BYTES, s.slot.packed_bytes // WORD_BYTES
    before, taken = _of_a_part(r, received)
    moved = 2 * (row_words + ORIGIN.num_words + s.slot.num_scales + s.has("weights")) + 1
    return {
        "slots": r.words(r.num_ranks * r.num_local * r.most_rows, s.slot_bytes // WORD_BYTES),
        "slot_scales": Placeholder("slots"),
        "row_slots": _table(s, r, received, local_bypass),
        "num_rows": torch.tensor([rows], dtype=I32),
        "places": _some_places(r, rows),
        "rows_before": before,
        "rows_taken": taken,
        "entries": r.words(r.entries, STATUS_ENTRY.num_words),
        "rows": r.words(r.tokens * (s.topk + s.shared if s.has("smooth") else 1), packed),
        "scales": Placeholder("rows", s.slot.scale_offset),
        "topk_weights": r.uniform(r.tokens, s.topk),
        "expand_idx": expand_idx,
        "recv_offsets": ends,
        "out_rows": blank(_room(rows), row_words),
        "out_scales": blank(_room(rows), s.slot.num_scales, dtype=F32),
        "out_origins": blank(rows, ORIGIN.num_words),
        "out_weights": blank(_room(rows), dtype=F32),
        "kept_zone": torch.ones(1, dtype=I32),
        "zone": blank(1),
        "capacity": rows,
        "num_entries": r.entries,
        "row_stride": packed,
        "bytes_moved": WORD_BYTES * (rows * moved + local_bypass * 2 * r.tokens * s.topk),
    }


def _room(rows: int) -> int:
    """Rows of the outputs, of which some stay gaps where rows have places."""
    return rows + 3


def _some_places(r: Draw, rows: int) -> torch.Tensor:
    """(rows,) a place for each row but the second one."""
    places = torch.randperm(_room(rows), generator=r.generator)[:rows].int()
    places[1:2] = -1
    return places


def _build_own(s: Shape) -> TritonKernel:
    own = OwnRows(s.topk, s.topk + s.shared if s.has("smooth") else 1)
    return arrange_kernel(_slot(s), s.has("weights"), own, placed=s.has("placed"))


def _slot(s: Shape) -> SlotLayout:
    return replace(s.slot, is_flagged=True)


def _as_launched(s: Shape) -> Shape:
    """There are rows for shared experts if they are smoothed only."""
    return s if s.has("smooth") else replace(s, shared=0)


def _of_window(name: str, *, parted: bool) -> Family:
    """The family of an arrange kernel that finds all rows in the window."""
    return Family(
        name,
        arrange_kernel,
        lambda s, r: _inputs(s, r, local_bypass=False),
        lambda s: arrange_kernel(
            _slot(s), s.has("weights"), zoned=s.zoned, parted=parted, placed=s.has("placed")
        ),
        axes=("hidden",),
        features=(*QUANTIZED, "weights", *(() if parted else ("placed",))),
        window="entries",
        computes=False,
    )


_FEATURES = (*QUANTIZED, "weights", "smooth", "placed")
_SHOWN_OWN: tuple[Features, ...] = (
    *((), ("weights",), ("int8", "weights"), ("int8", "weights", "smooth")),
    *(("placed",), ("int8", "weights", "placed")),
)

FAMILIES = (
    _of_window("arrange", parted=False),
    _of_window("arrange_part", parted=True),
    Family(
        "arrange_own",
        arrange_kernel,
        lambda s, r: _inputs(s, r, local_bypass=True),
        _build_own,
        axes=("hidden", "topk", "shared"),
        features=_FEATURES,
        # of a CPU: on an NPU all rows go through the window
        variants=(*_SHOWN_OWN, ("int8_128", "weights", "smooth")),
        shown=_SHOWN_OWN,
        main=("int8", "weights", "smooth"),
        as_launched=_as_launched,
        computes=False,
    ),
)
