"""Places: where the rows of a dispatch belong in outputs that other rounds or gaps share.

Shape symbols:
    W   ranks
    E   experts of this rank
    A   rows that one round can deliver
    N   entries, a pair of expert and source rank each, expert by expert: E * W

A call's counts say where each entry's rows begin (`starts_kernel`). Each round then takes the places behind
those of the rounds before (`places_kernel`): place i is where row i of the round goes, or -1 where it has
none. Counts come from peers: none of them leads to a place outside its own entry, or behind the outputs.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.kernel import Arg, TritonKernel, alike, chosen_args, numbers
from moe_triton.core.records import MAX_CALL_TOKENS as MAX_COUNT
from moe_triton.kernels.cases import I32, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.programs import part_of
from moe_triton.kernels.scales import copy_words
from moe_triton.kernels.zones import ZONE, ZONE_STRIDE, in_zone, zone_offset

_MAX_ROWS = 2**31 - 1
_TILE = 64  # int32 that are moved at once


@triton.jit
def _starts_kernel(
    counts, starts, limits, recv_offsets, tokens_per_expert, zone,
    source_stride, first_column, num_local_experts, num_ranks, alignment, stride, zone_stride,
    MAX_COUNT: tl.constexpr, MAX_ROWS: tl.constexpr,
):  # fmt: skip
    if zone is not None:
        counts += zone_offset(zone, zone_stride)
    # each sum goes on from the one before: one program has them all
    for _ in range(0, (tl.program_id(0) == 0).to(tl.int32)):
        begin = tl.cast(0, tl.int64)
        total = tl.cast(0, tl.int64)
        for expert in range(0, num_local_experts):
            row, before = begin, total
            for source in range(0, num_ranks):
                at = counts + source * source_stride + first_column + expert
                count = tl.minimum(tl.maximum(tl.load(at), 0), MAX_COUNT).to(tl.int64)
                entry = expert * num_ranks + source
                tl.store(starts + entry, tl.minimum(row, MAX_ROWS).to(tl.int32))
                row += count
                total += count
                tl.store(limits + entry, tl.minimum(row, MAX_ROWS).to(tl.int32))
                tl.store(recv_offsets + entry, tl.minimum(total, MAX_ROWS).to(tl.int32))
            tl.store(tokens_per_expert + expert, total - before)
            begin = tl.where(stride > 0, begin + stride, (row + alignment - 1) // alignment * alignment)


@fallback
def _starts_fallback(a: Arguments) -> None:
    experts, ranks = a.num_local_experts, a.num_ranks
    table = in_zone(a.counts, a.zone, a.zone_stride)
    columns = table.as_strided(
        (ranks, experts), (a.source_stride, 1), table.storage_offset() + a.first_column
    )
    counts = columns.long().clamp(0, MAX_COUNT).T
    rows = counts.sum(1)
    spans = torch.full_like(rows, a.stride) if a.stride > 0 else -(-rows // a.alignment) * a.alignment
    begins = (spans.cumsum(0) - spans)[:, None]
    ends = counts.cumsum(1)
    size = experts * ranks

    def stored(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.clamp(max=_MAX_ROWS).int().flatten()

    a.starts[:size] = stored(begins + ends - counts)
    a.limits[:size] = stored(begins + ends)
    a.recv_offsets[:size] = stored(counts.flatten().cumsum(0))
    a.tokens_per_expert[:experts] = rows


@functools.cache
def starts_kernel(zoned: bool = False) -> TritonKernel:
    """Where the rows of each entry of a call belong.

    ``counts`` has a row for each source rank, ``source_stride`` words apart: rows for local expert e are word
    ``first_column + e``. Entry (e, s) has the places from ``starts`` (N,) to ``limits`` (N,). An expert's
    places begin at the next multiple of ``alignment`` behind the one before, or ``stride`` places behind
    it where that is not 0. ``recv_offsets`` (N,) are the inclusive prefix sums of rows, without gaps,
    ``tokens_per_expert`` (E,) the rows of each expert.

    Args:
        zoned: ``counts`` is zone 0's, and ``zone`` (1,) names the zone, ``zone_stride`` words from the other.
    """
    args, absent = chosen_args(
        (True, (Arg("counts", "*i32", "in"),)),
        (True, alike("*i32", "starts limits recv_offsets", "out")),
        (True, Arg("tokens_per_expert", "*i64", "out")),
        (zoned, ZONE),
        (True, numbers("i32", "source_stride first_column num_local_experts num_ranks alignment stride")),
        (zoned, ZONE_STRIDE),
    )
    return TritonKernel(
        name="starts",
        fn=_starts_kernel,
        args=args,
        constants={**absent, "MAX_COUNT": MAX_COUNT, "MAX_ROWS": _MAX_ROWS},
        fallback=_starts_fallback,
    )


@triton.jit
def _places_kernel(recv_offsets, starts, limits, places, num_entries, capacity, room, TILE: tl.constexpr):
    begin, end = part_of(num_entries)
    cols = tl.arange(0, TILE)
    for entry in range(begin, end):
        first = tl.where(entry > 0, tl.load(recv_offsets + tl.maximum(entry - 1, 0)), 0)
        first = tl.minimum(tl.maximum(first, 0), room)
        last = tl.minimum(tl.maximum(tl.load(recv_offsets + entry), first), room)
        start = tl.load(starts + entry)
        limit = tl.minimum(tl.load(limits + entry), capacity)
        for row in range(first, last, TILE):
            place = start + (row - first) + cols
            place = tl.where(place < limit, place, -1)
            tl.store(places + row + cols, place, mask=row + cols < last)
        tl.store(starts + entry, tl.minimum(start + (last - first), tl.load(limits + entry)))


@fallback
def _places_fallback(a: Arguments) -> None:
    ends = a.recv_offsets[: a.num_entries].long().clamp(0, a.room).cummax(0).values
    firsts = torch.cat([ends.new_zeros(1), ends[:-1]])
    counts = ends - firsts
    starts, limits = (table[: a.num_entries].long() for table in (a.starts, a.limits))
    index = torch.arange(int(ends[-1])) - firsts.repeat_interleave(counts)
    place = starts.repeat_interleave(counts) + index
    limit = limits.clamp(max=a.capacity).repeat_interleave(counts)
    a.places[: len(place)] = torch.where(place < limit, place, -1).int()
    a.starts[: a.num_entries] = torch.minimum(starts + counts, limits).int()


@functools.cache
def places_kernel() -> TritonKernel:
    """The place of each row of a round, from its own ``recv_offsets`` (N,).

    Row i of entry n gets ``starts[n] + i - recv_offsets[n - 1]``, or -1 if that is not below ``limits[n]``
    and ``capacity``. ``starts`` (N,) moves on behind the rows of the round. ``places`` (A,) has ``room``
    entries, of which those of the round's rows are written.
    """
    args, absent = chosen_args(
        (True, (Arg("recv_offsets", "*i32", "in"), Arg("starts", "*i32", "inout"))),
        (True, (Arg("limits", "*i32", "in"), Arg("places", "*i32", "out"))),
        (True, numbers("i32", "num_entries capacity room")),
    )
    return TritonKernel(
        name="places",
        fn=_places_kernel,
        args=args,
        constants={**absent, "TILE": _TILE},
        fallback=_places_fallback,
    )


@triton.jit
def _add_counts_kernel(counts, totals, number, kept, TILE: tl.constexpr):
    begin, end = part_of(tl.cdiv(number, TILE))
    for i in range(begin, end):
        cols = i * TILE + tl.arange(0, TILE)
        mask = cols < number
        added = tl.load(counts + cols, mask=mask, other=0)
        tl.store(totals + cols, tl.load(totals + cols, mask=mask, other=0) * kept + added, mask=mask)


@fallback
def _add_counts_fallback(a: Arguments) -> None:
    totals = a.totals[: a.number]
    totals[:] = totals * a.kept + a.counts[: a.number]


@functools.cache
def add_counts_kernel() -> TritonKernel:
    """``totals[i] = totals[i] * kept + counts[i]`` of so many int32; ``kept`` is 1, or 0 to begin anew."""
    args, absent = chosen_args(
        (True, (Arg("counts", "*i32", "in"), Arg("totals", "*i32", "inout"))),
        (True, numbers("i32", "number kept")),
    )
    return TritonKernel(
        name="add_counts",
        fn=_add_counts_kernel,
        args=args,
        constants={**absent, "TILE": _TILE},
        fallback=_add_counts_fallback,
    )


@triton.jit
def _move_rows_kernel(
    rows, places, num_rows, out, room, capacity, WORDS: tl.constexpr, GATHERS: tl.constexpr
):
    begin, end = part_of(tl.minimum(tl.maximum(tl.load(num_rows), 0), room))
    for i in range(begin, end):
        place = tl.load(places + i)
        if (place >= 0) & (place < capacity):
            row, other = tl.cast(i, tl.int64), tl.cast(place, tl.int64)
            if GATHERS:
                copy_words(rows + other * WORDS, out, row, WORDS)
            else:
                copy_words(rows + row * WORDS, out, other, WORDS)


@fallback
def _move_rows_fallback(a: Arguments) -> None:
    count = max(0, min(int(a.num_rows[0]), a.room))
    places = a.places[:count].long()
    at = ((places >= 0) & (places < a.capacity)).nonzero()[:, 0]
    rows, out = (memory[: len(memory) // a.WORDS * a.WORDS].view(-1, a.WORDS) for memory in (a.rows, a.out))
    if a.GATHERS:
        out[at] = rows[places[at]]
    else:
        out[places[at]] = rows[at]


@functools.cache
def move_rows_kernel(words: int, gathers: bool) -> TritonKernel:
    """Rows of ``words`` int32 to their places, or with ``gathers`` from there.

    ``out[places[i]] = rows[i]``, or ``out[i] = rows[places[i]]``, for i below ``num_rows`` (1,) and ``room``.
    Places outside [0, ``capacity``) are left out.
    """
    args, absent = chosen_args(
        (True, alike("*i32", "rows places num_rows", "in")),
        (True, Arg("out", "*i32", "out")),
        (True, numbers("i32", "room capacity")),
    )
    return TritonKernel(
        name="gather_rows" if gathers else "scatter_rows",
        fn=_move_rows_kernel,
        args=args,
        constants={**absent, "WORDS": words, "GATHERS": gathers},
        fallback=_move_rows_fallback,
    )


def _counts(r: Draw) -> torch.Tensor:
    """(W, 8 + M) what ranks say; some counts nobody can have."""
    counts = r.integers(-2, 2 * r.most_rows, r.num_ranks, 8 + r.num_experts)
    counts[0, -1] = 2**31 - 1
    return counts


def _starts_inputs(s: Shape, r: Draw) -> Inputs:
    return {
        "counts": _counts(r),
        "starts": blank(r.entries),
        "limits": blank(r.entries),
        "recv_offsets": blank(r.entries),
        "tokens_per_expert": blank(r.num_local, dtype=torch.int64),
        "source_stride": 8 + r.num_experts,
        "first_column": 8 + r.rank * r.num_local,
        "alignment": 8,
        "stride": 0,
        "bytes_moved": r.entries * 16,
    }


def _places_inputs(s: Shape, r: Draw) -> Inputs:
    starts = r.integers(0, 4, r.entries) + torch.arange(r.entries, dtype=I32) * 2 * r.most_rows
    limits = starts + r.integers(0, 2 * r.most_rows, r.entries)
    rows = int(r.ends[-1])
    return {
        "starts": starts,
        "limits": limits,
        "places": blank(rows),
        "num_entries": r.entries,
        "capacity": int(limits.max()) - 3,
        "room": rows - 1,
        "bytes_moved": 4 * (rows + 4 * r.entries),
    }


def _move_inputs(s: Shape, r: Draw) -> Inputs:
    words = s.hidden // 2
    rows = r.tokens
    places = torch.randperm(rows + 3, generator=r.generator)[:rows].int()
    places[1] = -1
    return {
        "rows": r.words(rows + 3, words),
        "places": places,
        "num_rows": torch.tensor([rows - 1], dtype=I32),
        "out": blank(rows + 3, words),
        "room": rows,
        "capacity": rows + 2,
        "bytes_moved": 8 * words * (rows - 2),
    }


def _moving(name: str, *, gathers: bool) -> Family:
    return Family(
        name,
        move_rows_kernel,
        _move_inputs,
        lambda s: move_rows_kernel(s.hidden // 2, gathers),
        axes=("hidden",),
        computes=False,
        streams=True,
    )


FAMILIES = (
    Family("starts", starts_kernel, _starts_inputs, window="counts", computes=False),
    Family("places", places_kernel, _places_inputs, computes=False),
    Family(
        "add_counts",
        add_counts_kernel,
        lambda s, r: {
            "counts": r.integers(0, 9, r.num_experts),
            "totals": r.integers(0, 9, r.num_experts),
            "number": r.num_experts,
            "kept": 1,
            "bytes_moved": 12 * r.num_experts,
        },
        computes=False,
    ),
    _moving("gather_rows", gathers=True),
    _moving("scatter_rows", gathers=False),
)
