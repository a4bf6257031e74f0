"""Keep: rows that stay on their own rank go straight to the output, and their results straight into the sum.

Shape symbols:
    T   tokens of this rank
    K   experts per token
    S   shared experts
    H   hidden size
    W   ranks
    E   experts of this rank, the first of them ``first_expert``
    A   receive capacity in rows

This rank's rows for its own expert e begin in its output where those of the sources before it end::

    start[e] = recv_offsets[(e - first_expert) * W + rank - 1]

The offsets come from counts that peers can write: a row that does not lie before the end of its own entry is
left out, so that none lies outside the output.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.kernel import Arg, TritonKernel, chosen_args, numbers
from moe_triton.core.plan import Hole
from moe_triton.core.row_formats import QUANTIZED
from moe_triton.kernels.cases import F32, I32, I64, Draw, Family, Inputs, Shape, blank, subsets
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.scales import copy_words


@triton.jit
def _own_row(expert, index, recv_offsets, first_expert, num_local_experts, num_ranks, rank):
    """The row of a result of an own expert; -1 for any other, and for one that has no room."""
    row = -1
    if (expert >= first_expert) & (expert < first_expert + num_local_experts):
        entry = (expert - first_expert) * num_ranks + rank
        start = tl.where(entry > 0, tl.load(recv_offsets + tl.maximum(entry - 1, 0)), 0)
        row = tl.where(start + index < tl.load(recv_offsets + entry), start + index, -1)
    return row.to(tl.int64)


@triton.jit
def _keep_kernel(
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
    row_stride,
    first_expert,
    num_local_experts,
    num_ranks,
    rank,
    num_tokens,
    ROW_WORDS: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr,
    NUM_SCALES: tl.constexpr,
):
    per_program = tl.cdiv(num_tokens, tl.num_programs(0))
    begin = tl.program_id(0) * per_program
    words = tl.arange(0, ROW_WORDS)
    for token in range(begin, tl.minimum(begin + per_program, num_tokens)):
        for k in range(0, TOPK):
            expert, index = tl.load(topk_idx + token * TOPK + k), tl.load(expand_idx + token * TOPK + k)
            row = _own_row(expert, index, recv_offsets, first_expert, num_local_experts, num_ranks, rank)
            if row >= 0:
                source = tl.cast(token, tl.int64)
                if ROWS_PER_TOKEN > 1:
                    source = source * ROWS_PER_TOKEN + k
                tl.store(out_rows + row * ROW_WORDS + words, tl.load(rows + source * row_stride + words))
                if out_scales is not None:
                    copy_words(scales + source * row_stride, out_scales, row, NUM_SCALES)
                tl.store(out_origins + row * 3, rank)
                tl.store(out_origins + row * 3 + 1, token)
                tl.store(out_origins + row * 3 + 2, k)
                if out_weights is not None:
                    tl.store(out_weights + row, tl.load(topk_weights + token * TOPK + k))


def _own_rows(
    topk_idx: torch.Tensor,
    expand_idx: torch.Tensor,
    recv_offsets: torch.Tensor,
    first_expert: int,
    num_local_experts: int,
    num_ranks: int,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which flat results stay here, and their rows."""
    kept = ((topk_idx >= first_expert) & (topk_idx < first_expert + num_local_experts)).nonzero()[:, 0]
    entries = (topk_idx[kept].long() - first_expert) * num_ranks + rank
    ends = torch.cat([recv_offsets.new_zeros(1), recv_offsets[: num_local_experts * num_ranks]]).long()
    rows = ends[entries] + expand_idx[kept].long()
    has_room = rows < ends[entries + 1]
    return kept[has_room], rows[has_room]


def _keep_fallback(
    programs: int,
    *,
    rows: torch.Tensor,
    topk_idx: torch.Tensor,
    expand_idx: torch.Tensor,
    recv_offsets: torch.Tensor,
    out_rows: torch.Tensor,
    out_origins: torch.Tensor,
    row_stride: int,
    first_expert: int,
    num_local_experts: int,
    num_ranks: int,
    rank: int,
    num_tokens: int,
    ROW_WORDS: int,
    TOPK: int,
    ROWS_PER_TOKEN: int,
    NUM_SCALES: int,
    scales: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    out_scales: torch.Tensor | None = None,
    out_weights: torch.Tensor | None = None,
) -> None:
    entries = num_tokens * TOPK
    place = (first_expert, num_local_experts, num_ranks, rank)
    kept, to = _own_rows(topk_idx[:entries], expand_idx[:entries], recv_offsets, *place)
    if not len(kept):
        return
    tokens, ks = kept // TOPK, kept % TOPK
    source = (tokens * ROWS_PER_TOKEN + ks if ROWS_PER_TOKEN > 1 else tokens) * row_stride
    out_rows.unfold(0, ROW_WORDS, ROW_WORDS)[to] = rows[source[:, None] + torch.arange(ROW_WORDS)]
    origins = torch.stack([torch.full_like(tokens, rank), tokens, ks], 1)
    out_origins.unfold(0, 3, 3)[to] = origins.int()
    if out_scales is not None and scales is not None:
        words = scales[source[:, None] + torch.arange(NUM_SCALES)]
        out_scales.unfold(0, NUM_SCALES, NUM_SCALES)[to] = words
    if out_weights is not None and topk_weights is not None:
        out_weights[to] = topk_weights[kept]


@functools.cache
def keep_kernel(
    row_words: int, topk: int, num_scales: int, has_weight: bool, rows_per_token: int = 1
) -> TritonKernel:
    """Copy the rows of results that stay on this rank to where they belong in its own output.

    Token t's row, of ``row_words`` words, starts ``t * row_stride`` words after ``rows``, its scales as far
    after ``scales``; with ``rows_per_token`` K + S, result k of t has row ``t * (K + S) + k``. The place in
    the output is ``start[e] + expand_idx[t, k]``; origin (rank, t, k) and weight go there too.
    """
    check_positive("row_words", row_words)
    check_positive("topk", topk)
    arguments = (
        (True, Arg("rows", "*i32", "in")),
        (num_scales > 0, Arg("scales", "*fp32", "in", interleaved_with="rows")),
        (True, Arg("topk_idx", "*i32", "in")),
        (has_weight, Arg("topk_weights", "*fp32", "in")),
        (True, Arg("expand_idx", "*i32", "in")),
        (True, Arg("recv_offsets", "*i32", "in")),
        (True, Arg("out_rows", "*i32", "out")),
        (num_scales > 0, Arg("out_scales", "*fp32", "out")),
        (True, Arg("out_origins", "*i32", "out")),
        (has_weight, Arg("out_weights", "*fp32", "out")),
        (True, Arg("row_stride", "i64", "value")),
        *((True, arg) for arg in numbers("i32", "first_expert num_local_experts num_ranks rank num_tokens")),
    )
    args, absent = chosen_args(arguments)
    return TritonKernel(
        name="keep",
        fn=_keep_kernel,
        args=args,
        constants={
            **absent,
            "ROW_WORDS": row_words,
            "TOPK": topk,
            "ROWS_PER_TOKEN": rows_per_token,
            "NUM_SCALES": num_scales,
        },
        fallback=_keep_fallback,
    )


@triton.jit
def _result_offsets_kernel(
    topk_idx,
    expand_idx,
    recv_offsets,
    offsets,
    own_results,
    token_stride,
    slot_stride,
    hidden,
    first_expert,
    num_local_experts,
    num_ranks,
    rank,
    num_tokens,
    TOPK: tl.constexpr,
    NUM_SHARED: tl.constexpr,
):
    per_program = tl.cdiv(num_tokens, tl.num_programs(0))
    begin = tl.program_id(0) * per_program
    width = TOPK + NUM_SHARED
    for token in range(begin, tl.minimum(begin + per_program, num_tokens)):
        slots = tl.cast(token, tl.int64) * token_stride
        for k in range(0, TOPK):
            expert, index = tl.load(topk_idx + token * TOPK + k), tl.load(expand_idx + token * TOPK + k)
            row = _own_row(expert, index, recv_offsets, first_expert, num_local_experts, num_ranks, rank)
            offset = tl.where(row >= 0, own_results + row * hidden, slots + k * slot_stride)
            tl.store(offsets + token * width + k, offset)
        for s in tl.static_range(NUM_SHARED):
            tl.store(offsets + token * width + TOPK + s, slots + (TOPK + s) * slot_stride)


def _result_offsets_fallback(
    programs: int,
    *,
    topk_idx: torch.Tensor,
    expand_idx: torch.Tensor,
    recv_offsets: torch.Tensor,
    offsets: torch.Tensor,
    own_results: int,
    token_stride: int,
    slot_stride: int,
    hidden: int,
    first_expert: int,
    num_local_experts: int,
    num_ranks: int,
    rank: int,
    num_tokens: int,
    TOPK: int,
    NUM_SHARED: int,
) -> None:
    entries, width = num_tokens * TOPK, TOPK + NUM_SHARED
    place = (first_expert, num_local_experts, num_ranks, rank)
    kept, rows = _own_rows(topk_idx[:entries], expand_idx[:entries], recv_offsets, *place)
    table = offsets[: num_tokens * width].view(num_tokens, width)
    table.copy_(torch.arange(num_tokens)[:, None] * token_stride + torch.arange(width) * slot_stride)
    table[kept // TOPK, kept % TOPK] = own_results + rows * hidden


@functools.cache
def result_offsets_kernel(topk: int, num_shared: int = 0) -> TritonKernel:
    """Where the sum finds each result: ``offsets`` (T, K + S), in elements from the first slot.

    Result j of token t lies in its slot, ``t * token_stride + j * slot_stride``; of an own expert, in row
    ``start[e] + expand_idx[t, k]`` of the results, which begin ``own_results`` elements from the first slot.
    """
    check_positive("topk", topk)
    return TritonKernel(
        name="result_offsets",
        fn=_result_offsets_kernel,
        args=(
            Arg("topk_idx", "*i32", "in"),
            Arg("expand_idx", "*i32", "in"),
            Arg("recv_offsets", "*i32", "in"),
            Arg("offsets", "*i64", "out"),
            *numbers("i64", "own_results token_stride slot_stride"),
            *numbers("i32", "hidden first_expert num_local_experts num_ranks rank num_tokens"),
        ),
        constants={"TOPK": topk, "NUM_SHARED": num_shared},
        fallback=_result_offsets_fallback,
    )


def _keep_inputs(s: Shape, r: Draw) -> Inputs:
    """Rows to this rank's own experts: their numbers are true ones, so that no two have one place."""
    expand_idx, counts = torch.zeros(r.tokens * s.topk, dtype=I32), [0] * r.num_experts
    for entry, expert in enumerate(r.ids.flatten().tolist()):
        if expert >= 0:
            expand_idx[entry] = counts[expert]
            counts[expert] += 1
    first = r.rank * r.num_local
    received = r.integers(0, 4, r.num_local, r.num_ranks)
    received[:, r.rank] = torch.tensor(counts[first : first + r.num_local], dtype=I32)
    ends = received.flatten().cumsum(0, dtype=I32)
    words, row_words, rows = s.slot.packed_bytes // 4, s.slot.row_bytes // 4, int(ends[-1])
    moved = 2 * (row_words + s.slot.num_scales + s.has("weights")) + 3
    return {
        "rows": r.words(r.tokens * (s.topk + s.shared if s.has("smooth") else 1), words),
        "scales": Hole("rows", s.slot.scale_offset),
        "topk_idx": r.ids,
        "topk_weights": r.uniform(r.tokens, s.topk),
        "expand_idx": expand_idx,
        "recv_offsets": ends,
        "out_rows": blank(rows, row_words),
        "out_scales": blank(rows, s.slot.num_scales, dtype=F32),
        "out_origins": blank(rows, 3),
        "out_weights": blank(rows, dtype=F32),
        "row_stride": words,
        "first_expert": first,
        "num_local_experts": r.num_local,
        "num_ranks": r.num_ranks,
        "rank": r.rank,
        "num_tokens": r.tokens,
        "bytes_moved": 4 * int(received[:, r.rank].sum()) * moved + 8 * r.tokens * s.topk,
    }


def _build_keep(s: Shape) -> TritonKernel:
    rows_per_token = s.topk + s.shared if s.has("smooth") else 1
    return keep_kernel(s.slot.row_bytes // 4, s.topk, s.slot.num_scales, s.has("weights"), rows_per_token)


def _as_kept(s: Shape) -> Shape:
    """There are rows for shared experts if they are smoothed only."""
    return s if s.has("smooth") else replace(s, shared=0)


def _result_offsets_inputs(s: Shape, r: Draw) -> Inputs:
    return {
        "topk_idx": r.ids,
        "expand_idx": r.integers(0, 3, r.tokens, s.topk),
        "recv_offsets": r.ends,
        "offsets": blank(r.tokens, s.topk + s.shared, dtype=I64),
        "own_results": 2**40,
        "token_stride": 1000,
        "slot_stride": 100,
        "hidden": 64,
        "first_expert": r.rank * r.num_local,
        "num_local_experts": r.num_local,
        "num_ranks": r.num_ranks,
        "rank": r.rank,
        "num_tokens": r.tokens,
    }


_FEATURES = (*QUANTIZED, "weights", "smooth")

FAMILIES = (
    Family(
        "keep",
        keep_kernel,
        _keep_inputs,
        _build_keep,
        axes=("hidden", "topk", "shared"),
        features=_FEATURES,
        # smooth scales go with quantised rows
        variants=tuple(f for f in subsets(_FEATURES) if "smooth" not in f or QUANTIZED.keys() & set(f)),
        shown=((), ("weights",), ("int8", "weights"), ("int8", "weights", "smooth")),
        main=("int8", "weights", "smooth"),
        as_launched=_as_kept,
        computes=False,
    ),
    Family("result_offsets", result_offsets_kernel, _result_offsets_inputs),
)
