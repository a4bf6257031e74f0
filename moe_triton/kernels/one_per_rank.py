"""One row for each rank: which ranks a token goes to, and which of a rank's experts a received row is for.

Shape symbols:
    T   tokens of this rank
    K   experts per token
    M   experts of all ranks (num_experts)
    E   experts of each rank (num_local_experts)
    W   ranks
    A   rows that can be received (capacity)

A rank goes by the id of its first expert. So rows travel, are flagged and are counted as if a token had
chosen nothing but first experts, and its results come back in the ascending order of the ranks.

Loops carry single numbers; a token's or a row's K entries are loaded and stored at once where they can be.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.kernel import Arg, TritonKernel, alike, chosen_args, numbers
from moe_triton.core.plan import Placeholder
from moe_triton.kernels.cases import F32, I32, I64, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.numbering import ID_LIMIT, TAKING, given_ids, id_arguments, narrowed, taken_ids
from moe_triton.kernels.programs import part_of
from moe_triton.kernels.zones import ZONE, ZONE_STRIDE, in_zone, zone_offset
from moe_triton.layout import ORIGIN

LEAST_COLUMNS = 8  # of a tile: a unit of an AI core's memory
BLOCK = 256  # entries that are compared with an expert at once


@triton.jit
def _one_per_rank_kernel(
    given, topk_idx, results_idx,
    num_tokens, num_experts, num_local_experts,
    TOPK: tl.constexpr, COLUMNS: tl.constexpr, ID_LIMIT: tl.constexpr,
):  # fmt: skip
    ks = tl.arange(0, COLUMNS)
    # half an expert more: no rounding leads to another rank
    ranks_per_expert = 1.0 / num_local_experts.to(tl.float32)
    begin, end = part_of(num_tokens)
    for t in range(begin, end):
        at = t * TOPK + ks
        if given is not None:
            experts = narrowed(tl.load(given + at, mask=ks < TOPK, other=-1), ID_LIMIT)
            tl.store(topk_idx + at, experts, mask=ks < TOPK)
        else:
            experts = tl.load(topk_idx + at, mask=ks < TOPK, other=-1)
        ranks = tl.floor((experts.to(tl.float32) + 0.5) * ranks_per_expert).to(tl.int32)
        is_routed = (experts >= 0) & (experts < num_experts)
        # below zero, so that the next one is a maximum
        firsts = tl.where(is_routed, -ranks * num_local_experts, -ID_LIMIT)
        latest = 1
        for k in range(0, TOPK):
            latest = tl.max(tl.where(firsts < latest, firsts, -ID_LIMIT), 0)
            tl.store(results_idx + t * TOPK + k, tl.where(latest > -ID_LIMIT, -latest, -1))


@fallback
def _one_per_rank_fallback(a: Arguments) -> None:
    num_entries = a.num_tokens * a.TOPK
    if a.given is not None:
        a.topk_idx[:num_entries] = taken_ids(a.given[:num_entries])
    ids = a.topk_idx[:num_entries].view(a.num_tokens, a.TOPK)
    is_routed = (ids >= 0) & (ids < a.num_experts)
    firsts = torch.where(is_routed, ids // a.num_local_experts * a.num_local_experts, ID_LIMIT).sort(1).values
    is_new = torch.ones_like(firsts, dtype=torch.bool)
    is_new[:, 1:] = firsts[:, 1:] != firsts[:, :-1]
    ascending = torch.where(is_new, firsts, ID_LIMIT).sort(1).values
    a.results_idx[:num_entries] = torch.where(ascending < ID_LIMIT, ascending, -1).flatten()


def _columns(topk: int) -> int:
    return max(LEAST_COLUMNS, 1 << (topk - 1).bit_length())


@functools.cache
def one_per_rank_kernel(topk: int, takes: bool = False, int64: bool = False) -> TritonKernel:
    """The first expert of each rank that a token goes to, ascending, and -1 behind them.

    ``results_idx`` (T, K) has, for each token, every ``topk_idx[t, k] // E * E`` once. Ids outside [0, M) are
    no expert. With ``takes`` the ids are in ``given``, of int32 or ``int64``, and ``topk_idx`` becomes their
    copy, in which int64 ids of `ID_LIMIT` or more, of either sign, are -1.

    Example, with K 4::

        topk_idx = [7, 1, 0, 6, 5, -1, 3, 9]
        num_tokens = 2
        num_experts = 8
        num_local_experts = 2
        results_idx = [0, 6, -1, -1, 2, 4, -1, -1]

    Raises:
        ArgumentError: ``int64`` without ``takes``.
    """
    check_positive("topk", topk)
    args, absent = chosen_args(
        *id_arguments(takes, int64),
        (True, Arg("results_idx", "*i32", "out")),
        (True, numbers("i32", "num_tokens num_experts num_local_experts")),
    )
    id_bytes = 4 + (takes * (8 if int64 else 4))
    return TritonKernel(
        name="one_per_rank",
        fn=_one_per_rank_kernel,
        args=args,
        constants={**absent, "TOPK": topk, "COLUMNS": _columns(topk), "ID_LIMIT": ID_LIMIT},
        fallback=_one_per_rank_fallback,
        bytes_moved=lambda *, num_tokens, **_: num_tokens * topk * (id_bytes + 4),
    )


@triton.jit
def _clamped_to(value, size):
    return tl.minimum(tl.maximum(value, 0), size - 1)


@triton.jit
def _local_ids_kernel(
    row_ids, row_weights, origins, num_rows, places, local_idx, local_weights, zone,
    capacity, num_places, num_ranks, max_index, first_expert, num_local_experts, source_stride, zone_stride,
    TOPK: tl.constexpr, COLUMNS: tl.constexpr, ORIGIN_WORDS: tl.constexpr,
):  # fmt: skip
    if zone is not None:
        row_ids += zone_offset(zone, zone_stride)
        if row_weights is not None:
            row_weights += zone_offset(zone, zone_stride)
    ks = tl.arange(0, COLUMNS)
    begin, end = part_of(tl.minimum(tl.maximum(tl.load(num_rows), 0), capacity))
    for i in range(begin, end):
        # peers wrote the origins: they lead to no other memory than that of the tables
        source = _clamped_to(tl.load(origins + i * ORIGIN_WORDS), num_ranks)
        token = _clamped_to(tl.load(origins + i * ORIGIN_WORDS + 1), max_index)
        at = tl.cast(source, tl.int64) * source_stride + token * TOPK
        place = i if places is None else tl.load(places + i)
        row = tl.cast(place, tl.int64) * TOPK
        if True if places is None else (place >= 0) & (place < num_places):
            experts = tl.load(row_ids + at + ks, mask=ks < TOPK, other=-1) - first_expert
            is_local = (experts >= 0) & (experts < num_local_experts)
            tl.store(local_idx + row + ks, tl.where(is_local, experts, -1), mask=ks < TOPK)
            if row_weights is not None:
                weights = tl.load(row_weights + at + ks, mask=ks < TOPK, other=0.0)
                tl.store(local_weights + row + ks, tl.where(is_local, weights, 0.0), mask=ks < TOPK)


@fallback
def _local_ids_fallback(a: Arguments) -> None:
    received = max(0, min(int(a.num_rows[0]), a.capacity))
    origins = a.origins[: received * ORIGIN.num_words].view(received, ORIGIN.num_words).long()
    source, token = origins[:, 0].clamp(0, a.num_ranks - 1), origins[:, 1].clamp(0, a.max_index - 1)
    at = (source * a.source_stride + token * a.TOPK)[:, None] + torch.arange(a.TOPK)
    to = torch.arange(received)
    if a.places is not None:
        to = a.places[:received].long()
        has_place = (to >= 0) & (to < a.num_places)
        at, to = at[has_place], to[has_place]
    experts = in_zone(a.row_ids, a.zone, a.zone_stride)[at] - a.first_expert
    is_local = (experts >= 0) & (experts < a.num_local_experts)
    _rows_of(a.local_idx, a.TOPK)[to] = torch.where(is_local, experts, -1)
    if a.row_weights is not None:
        weights = in_zone(a.row_weights, a.zone, a.zone_stride)[at]
        _rows_of(a.local_weights, a.TOPK)[to] = torch.where(is_local, weights, 0)


def _rows_of(table: torch.Tensor, columns: int) -> torch.Tensor:
    return table[: len(table) // columns * columns].view(-1, columns)


@functools.cache
def local_ids_kernel(topk: int, has_weights: bool, zoned: bool = False, placed: bool = False) -> TritonKernel:
    """Of each received row the experts of this rank, counted from its first one, and their weights.

    ``row_ids`` holds the (T, K) ids of each source's tokens, ``source_stride`` words from one source to the
    next, and ``row_weights`` their weights in the same way. Row i came from token ``origins[i, 1]`` of rank
    ``origins[i, 0]``; ``local_idx`` (A, K) gets its ids less ``first_expert``, -1 for those of other ranks,
    and ``local_weights`` (A, K) its weights, 0 for those. ``num_rows`` (1,) counts the rows.

    Where ``placed``, what belongs to row i is row ``places[i]`` (A,) of these instead, and nowhere where that
    is outside [0, ``num_places``).

    Args:
        topk: K.
        has_weights: there are weights.
        zoned: the tables are those of zone 0; the rows' are in the zone that ``zone`` (1,) names,
            ``zone_stride`` words from one to the next.
        placed: rows have places.
    """
    check_positive("topk", topk)
    args, absent = chosen_args(
        (True, Arg("row_ids", "*i32", "in")),
        (has_weights, Arg("row_weights", "*fp32", "in", interleaved_with="row_ids")),
        (True, alike("*i32", "origins num_rows", "in")),
        (placed, Arg("places", "*i32", "in")),
        (True, Arg("local_idx", "*i32", "out")),
        (has_weights, Arg("local_weights", "*fp32", "out")),
        (zoned, ZONE),
        (True, numbers("i32", "capacity")),
        (placed, numbers("i32", "num_places")),
        (True, numbers("i32", "num_ranks max_index first_expert num_local_experts")),
        (True, Arg("source_stride", "i64", "value")),
        (zoned, ZONE_STRIDE),
    )
    sizes = {"TOPK": topk, "COLUMNS": _columns(topk), "ORIGIN_WORDS": ORIGIN.num_words}
    return TritonKernel("local_ids", _local_ids_kernel, args, absent | sizes, _local_ids_fallback)


@triton.jit
def _local_counts_kernel(
    local_idx, num_rows, tokens_per_expert, recv_stats,
    capacity, num_local_experts,
    TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    received = tl.minimum(tl.maximum(tl.load(num_rows), 0), capacity)
    lanes = tl.arange(0, BLOCK)
    begin, end = part_of(num_local_experts)
    for e in range(begin, end):
        count = 0
        # by so many rows at a time, so that only where they begin takes 64 bits
        for b in range(0, tl.cdiv(received, BLOCK)):
            rows = local_idx + tl.cast(b, tl.int64) * (BLOCK * TOPK)
            num_entries = tl.minimum(received - b * BLOCK, BLOCK) * TOPK
            for c in range(0, tl.cdiv(num_entries, BLOCK)):
                at = c * BLOCK + lanes
                experts = tl.load(rows + at, mask=at < num_entries, other=-1)
                # floats, which hold every id: to compare integers takes four instructions
                is_own = (experts.to(tl.float32) == tl.cast(e, tl.float32)).to(tl.float32)
                count += tl.sum(is_own, 0).to(tl.int32)
        tl.store(tokens_per_expert + e, tl.cast(count, tl.int64))
        if recv_stats is not None:
            tl.store(recv_stats + e, tl.load(recv_stats + e) + count)


@fallback
def _local_counts_fallback(a: Arguments) -> None:
    received = max(0, min(int(a.num_rows[0]), a.capacity))
    ids = a.local_idx[: received * a.TOPK].long()
    counts = ids[ids >= 0].bincount(minlength=a.num_local_experts)[: a.num_local_experts]
    a.tokens_per_expert[: a.num_local_experts] = counts
    if a.recv_stats is not None:
        a.recv_stats[: a.num_local_experts] += counts.int()


@functools.cache
def local_counts_kernel(topk: int, has_stats: bool) -> TritonKernel:
    """How many of the received rows are for each expert of this rank: ``#{(i, k): local_idx[i, k] == e}``.

    ``num_rows`` (1,) counts the rows of ``local_idx`` (A, K). With ``has_stats`` the counts are added to
    ``recv_stats`` (E,) as well.

    Example, with K 2::

        local_idx = [1, -1, 0, 1]
        num_rows = [2]
        capacity = 4
        num_local_experts = 3
        tokens_per_expert = [1, 2, 0]
    """
    check_positive("topk", topk)
    args, absent = chosen_args(
        (True, (*alike("*i32", "local_idx num_rows", "in"), Arg("tokens_per_expert", "*i64", "out"))),
        (has_stats, Arg("recv_stats", "*i32", "inout")),
        (True, numbers("i32", "capacity num_local_experts")),
    )
    sizes = {"TOPK": topk, "BLOCK": BLOCK}
    return TritonKernel("local_counts", _local_counts_kernel, args, absent | sizes, _local_counts_fallback)


def _one_per_rank_inputs(s: Shape, r: Draw) -> Inputs:
    return {**given_ids(s, r), "results_idx": blank(r.tokens, s.topk)}


def _local_ids_inputs(s: Shape, r: Draw) -> Inputs:
    ids = r.integers(-1, r.num_experts, r.num_ranks, 2, r.tokens, s.topk)
    rows = r.tokens * 2
    origins = torch.stack([r.integers(0, size, rows) for size in (r.num_ranks, r.tokens, s.topk)], 1)
    return {
        "row_ids": ids,
        "row_weights": Placeholder("row_ids", ids[0, 0].nbytes),
        "origins": origins,
        "num_rows": torch.tensor([rows - 1], dtype=I32),
        "places": torch.randperm(rows, generator=r.generator).int() - 1,
        "local_idx": blank(rows, s.topk),
        "local_weights": blank(rows, s.topk, dtype=F32),
        "capacity": rows,
        "num_places": rows - 2,
        "max_index": r.tokens,
        "source_stride": ids[0].numel(),
        "bytes_moved": (rows - 1) * (4 * ORIGIN.num_words + 8 * s.topk * (1 + s.has("has_weights"))),
    }


def _local_counts_inputs(s: Shape, r: Draw) -> Inputs:
    rows = r.tokens * 2
    return {
        "local_idx": r.integers(-1, r.num_local, rows, s.topk),
        "num_rows": torch.tensor([rows - 1], dtype=I32),
        "tokens_per_expert": blank(r.num_local, dtype=I64),
        "recv_stats": r.integers(0, 9, r.num_local),
        "capacity": rows,
        "bytes_moved": 4 * (rows - 1) * s.topk + 8 * r.num_local,
    }


FAMILIES = (
    Family("one_per_rank", one_per_rank_kernel, _one_per_rank_inputs, variants=TAKING),
    Family("local_ids", local_ids_kernel, _local_ids_inputs, window="row_ids"),
    Family("local_counts", local_counts_kernel, _local_counts_inputs),
)
