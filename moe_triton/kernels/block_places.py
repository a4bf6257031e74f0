"""Block places: where each result of a token will be, in the block that its expert's rank writes.

Shape symbols:
    T   tokens of this rank
    K   experts per token
    M   experts of all ranks (num_experts), E of them on each rank
    W   ranks
    N   ids: T*K, flat

A rank returns this rank's rows in the order in which they came: by expert, then as this rank counts the
entries of that expert. So a result's place follows from the ids alone.

One source serves two machines, as in `moe_triton.kernels.numbering`: ``SCALAR`` chooses.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.kernel import Arg, TritonKernel, chosen_args, numbers
from moe_triton.core.space import Space
from moe_triton.kernels.cases import I64, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.numbering import TILES, WIDE_TILE, tile_fits


@triton.jit
def _block_places_kernel(
    topk_idx, counts, offsets, expected_rows,
    num_entries, num_experts, num_local_experts, num_ranks, block_stride, row_stride,
    SCALAR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    if SCALAR:
        if tl.program_id(0) == 0:
            for e in range(0, num_experts):
                tl.store(counts + e, 0)
            for i in range(0, num_entries):
                expert = tl.load(topk_idx + i)
                if (expert >= 0) & (expert < num_experts):
                    tl.store(counts + expert, tl.load(counts + expert) + 1)
            # counts become the places of each expert's next row, and end as those behind its last one
            for rank in range(0, num_ranks):
                rows = 0
                for expert in range(rank * num_local_experts, (rank + 1) * num_local_experts):
                    count = tl.load(counts + expert)
                    tl.store(counts + expert, rows)
                    rows += count
                tl.store(expected_rows + rank, rows)
            for i in range(0, num_entries):
                expert = tl.load(topk_idx + i)
                offset = tl.cast(0, tl.int64)
                if (expert >= 0) & (expert < num_experts):
                    place = tl.load(counts + expert)
                    tl.store(counts + expert, place + 1)
                    offset = (expert // num_local_experts) * block_stride + place * row_stride
                tl.store(offsets + i, offset)
    else:
        # rows of ids, and rows of ranks, each compared with all ids: those of the same rank that come before;
        # floats, which hold every id that an expert has: to compare integers takes four instructions
        lanes, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
        ranks_per_expert = 1.0 / num_local_experts.to(tl.float32)
        num_groups = tl.cdiv(num_ranks, ROWS)
        num_items = num_groups + tl.cdiv(num_entries, ROWS)
        for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
            is_count = item < num_groups
            at = tl.where(is_count, item, item - num_groups) * ROWS + lanes
            is_id = at < tl.where(is_count, 0, num_entries)
            expert = tl.load(topk_idx + at, mask=is_id, other=-1)
            expert = tl.where((expert >= 0) & (expert < num_experts), expert, -1).to(tl.float32)
            # half an expert more: no rounding leads to another rank
            rank = tl.where(is_count, at.to(tl.float32), tl.floor((expert + 0.5) * ranks_per_expert))
            first = rank * num_local_experts.to(tl.float32)
            # behind the last one of a rank everything comes before
            own = tl.where(is_count, first + num_local_experts.to(tl.float32), expert)[:, None]
            row = tl.where(is_count, -1, at).to(tl.float32)[:, None]
            number = tl.zeros((ROWS, COLS), tl.float32)
            for c in range(0, tl.cdiv(num_entries, COLS)):
                other_at = c * COLS + cols
                other = tl.load(topk_idx + other_at, mask=other_at < num_entries, other=-1)
                other = tl.where((other >= 0) & (other < num_experts), other, -1).to(tl.float32)[None, :]
                is_before = (other < own) | ((other == own) & (other_at.to(tl.float32)[None, :] < row))
                number += ((other >= first[:, None]) & is_before).to(tl.float32)
            place = tl.sum(number, 1)
            if is_count:
                tl.store(expected_rows + at, place.to(tl.int32), mask=at < num_ranks)
            else:
                is_routed = expert >= 0
                offset = rank.to(tl.int64) * block_stride + place.to(tl.int64) * row_stride
                tl.store(offsets + at, tl.where(is_routed, offset, 0), mask=is_id)


@fallback
def _block_places_fallback(a: Arguments) -> None:
    ids = a.topk_idx[: a.num_entries].long()
    is_routed = (ids >= 0) & (ids < a.num_experts)
    order = ids.masked_fill(~is_routed, a.num_experts).argsort(stable=True)[: int(is_routed.sum())]
    per_expert = ids[is_routed].bincount(minlength=a.num_experts)
    per_rank = per_expert.view(a.num_ranks, a.num_local_experts).sum(1)
    ranks = ids[order] // a.num_local_experts
    places = torch.arange(len(order)) - (per_rank.cumsum(0) - per_rank)[ranks]
    a.offsets[: a.num_entries] = 0
    a.offsets[order] = ranks * a.block_stride + places * a.row_stride
    a.expected_rows[: a.num_ranks] = per_rank.int()
    if a.counts is not None:
        ends = per_expert.view(a.num_ranks, a.num_local_experts).cumsum(1)
        a.counts[: a.num_experts] = ends.view(-1).int()


@functools.cache
def block_places_kernel(target: str = "cpu") -> TritonKernel:
    """Where result i of N is, in elements from the first row of rank 0's block; how many each rank returns::

        rank = topk_idx[i] // E
        place = #{j: topk_idx[j] // E == rank, (topk_idx[j], j) < (topk_idx[i], i)}
        offsets[i] = rank * block_stride + place * row_stride
        expected_rows[r] = #{j: topk_idx[j] // E == r}

    Ids outside [0, M) are no expert: offset 0, not counted; M is W * E. On the CPU the first program does
    all, and ``counts`` (M,) becomes the place behind each expert's last row.

    Example, of two ranks::

        topk_idx = [3, 0, 2, 3]
        num_entries = 4
        num_experts = 4
        num_local_experts = 2
        num_ranks = 2
        block_stride = 100
        row_stride = 10
        offsets = [110, 0, 100, 120]
        expected_rows = [1, 3]
        counts = [1, 1, 1, 3]
    """
    is_scalar = target == "cpu"
    args, absent = chosen_args(
        (True, Arg("topk_idx", "*i32", "in")),
        (is_scalar, Arg("counts", "*i32", "inout")),
        (True, (Arg("offsets", "*i64", "out"), Arg("expected_rows", "*i32", "out"))),
        (True, numbers("i32", "num_entries num_experts num_local_experts num_ranks")),
        (True, numbers("i64", "block_stride row_stride")),
    )
    return TritonKernel(
        name="block_places",
        fn=_block_places_kernel,
        args=args,
        constants={**absent, **WIDE_TILE, "SCALAR": is_scalar},
        fallback=_block_places_fallback,
        bytes_moved=lambda *, num_entries, num_ranks, **_: 12 * num_entries + 4 * num_ranks,
        space=None if is_scalar else Space(TILES, allows=tile_fits),
    )


def _inputs(s: Shape, r: Draw) -> Inputs:
    return {
        "counts": blank(r.num_experts),
        "offsets": blank(r.tokens * s.topk, dtype=I64),
        "expected_rows": blank(r.num_ranks),
        "num_entries": r.tokens * s.topk,
        "block_stride": 1 << 24,
        "row_stride": 7168,
    }


FAMILIES = (Family("block_places", block_places_kernel, _inputs),)
