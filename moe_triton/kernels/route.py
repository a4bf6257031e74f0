"""Route: where each (token, k) goes within its expert, and where each received block of rows starts.

Shape symbols:
    T   tokens of this rank
    K   experts per token
    M   experts of all ranks (num_experts)
    E   experts of this rank (num_local_experts)
    W   ranks
    B   ids that the NPU form compares at once, as a B x B tile

One source serves two machines. Scalar code takes about 1 ns per id on a CPU and a few hundred on an
AI core, where a comparison of two blocks of ids is one vector instruction per row: ``SCALAR`` chooses.
The compare form needs no exchange between programs: each recomputes what precedes its own blocks.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.kernel import Arg, TritonKernel, chosen_args, numbers
from moe_triton.core.records import TRAILER, TRAILER_MARK
from moe_triton.kernels.cases import I64, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.language import tl, triton

BLOCK = 64


@triton.jit
def _route_kernel(
    topk_idx,
    expand_idx,
    counts,
    num_entries,
    num_experts,
    SCALAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if SCALAR:
        _route_scalar(topk_idx, expand_idx, counts, num_entries, num_experts)
    else:
        _route_compare(topk_idx, expand_idx, counts, num_entries, num_experts, BLOCK)


@triton.jit
def _route_scalar(topk_idx, expand_idx, counts, num_entries, num_experts):
    # the running counts are one chain of dependences: the first program walks it alone
    is_first = (tl.program_id(0) == 0).to(tl.int32)
    for e in range(0, num_experts * is_first):
        tl.store(counts + e, 0)
    for i in range(0, num_entries * is_first):
        e = tl.load(topk_idx + i)
        index = 0
        if (e >= 0) & (e < num_experts):
            index = tl.load(counts + e)
            tl.store(counts + e, index + 1)
        tl.store(expand_idx + i, index)


@triton.jit
def _route_compare(topk_idx, expand_idx, counts, num_entries, num_experts, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    num_blocks = tl.cdiv(num_entries, BLOCK)
    per_program = tl.cdiv(num_blocks, tl.num_programs(0))
    first = tl.program_id(0) * per_program
    for b in range(first, tl.minimum(first + per_program, num_blocks)):
        at = b * BLOCK + lanes
        ids = tl.load(topk_idx + at, mask=at < num_entries, other=-1)
        valid = (ids >= 0) & (ids < num_experts)
        earlier = tl.zeros((BLOCK,), tl.int32)
        for c in range(0, b):
            others = tl.load(topk_idx + c * BLOCK + lanes)
            earlier += tl.sum((ids[:, None] == others[None, :]).to(tl.int32), 1)
        same = (ids[:, None] == ids[None, :]).to(tl.int32)
        precedes = (lanes[None, :] < lanes[:, None]).to(tl.int32)
        earlier += tl.sum(same * precedes, 1)
        tl.store(expand_idx + at, tl.where(valid, earlier, 0), mask=at < num_entries)

    num_groups = tl.cdiv(num_experts, BLOCK)
    groups_per_program = tl.cdiv(num_groups, tl.num_programs(0))
    first_group = tl.program_id(0) * groups_per_program
    for g in range(first_group, tl.minimum(first_group + groups_per_program, num_groups)):
        experts = g * BLOCK + lanes
        total = tl.zeros((BLOCK,), tl.int32)
        for c in range(0, num_blocks):
            at = c * BLOCK + lanes
            ids = tl.load(topk_idx + at, mask=at < num_entries, other=-1)
            total += tl.sum((experts[:, None] == ids[None, :]).to(tl.int32), 1)
        tl.store(counts + experts, total, mask=experts < num_experts)


def _route_fallback(
    programs: int,
    *,
    topk_idx: torch.Tensor,
    expand_idx: torch.Tensor,
    counts: torch.Tensor,
    num_entries: int,
    num_experts: int,
    **_: object,
) -> None:
    ids = topk_idx[:num_entries].long()
    valid = (ids >= 0) & (ids < num_experts)
    one_hot = torch.zeros((num_entries, num_experts), dtype=torch.int32)
    one_hot[valid] = torch.nn.functional.one_hot(ids[valid], num_experts).to(torch.int32)
    before = one_hot.cumsum(0, dtype=torch.int32) - one_hot
    index = before.gather(1, ids.clamp(0, num_experts - 1)[:, None])[:, 0]
    expand_idx[:num_entries] = torch.where(valid, index, 0)
    counts[:num_experts] = one_hot.sum(0, dtype=torch.int32)


@functools.cache
def route_kernel(target: str = "cpu") -> TritonKernel:
    """``expand_idx[i] = #{j < i : topk_idx[j] == topk_idx[i]}`` and ``counts[e]``, over T*K flat ids.

    Ids outside [0, M) are "no expert": index 0, not counted. On the CPU the first program does all.
    """
    return TritonKernel(
        name="route",
        fn=_route_kernel,
        args=(
            Arg("topk_idx", "*i32", "in"),
            Arg("expand_idx", "*i32", "out"),
            Arg("counts", "*i32", "inout"),
            *numbers("i32", "num_entries num_experts"),
        ),
        constants={"SCALAR": target == "cpu", "BLOCK": BLOCK},
        fallback=_route_fallback,
        bytes_moved=lambda *, num_entries, num_experts, **_: 8 * num_entries + 4 * num_experts,
    )


@triton.jit
def _offsets_kernel(
    recv_counts,
    recv_offsets,
    tokens_per_expert,
    recv_stats,
    trailer,
    num_entries,
    num_local_experts,
    max_count,
    capacity,
    CUMULATIVE: tl.constexpr,
    HAS_STATS: tl.constexpr,
    SCALAR: tl.constexpr,
    BLOCK: tl.constexpr,
    MARK: tl.constexpr,
    MARK_WORD: tl.constexpr,
    TOTAL_WORD: tl.constexpr,
):
    num_ranks = num_entries // num_local_experts
    if SCALAR:
        total = _offsets_scalar(
            recv_counts,
            recv_offsets,
            tokens_per_expert,
            recv_stats,
            num_ranks,
            num_local_experts,
            max_count,
            capacity,
            CUMULATIVE,
            HAS_STATS,
        )
    else:
        total = _offsets_compare(
            recv_counts,
            recv_offsets,
            tokens_per_expert,
            recv_stats,
            num_ranks,
            num_local_experts,
            max_count,
            capacity,
            CUMULATIVE,
            HAS_STATS,
            BLOCK,
        )
    # the scalar form works in the first program; of the others the last has seen every count
    if tl.program_id(0) == (0 if SCALAR else tl.num_programs(0) - 1):
        tl.store(trailer + MARK_WORD, MARK)
        tl.store(trailer + TOTAL_WORD, total)


@triton.jit
def _offsets_scalar(
    recv_counts,
    recv_offsets,
    tokens_per_expert,
    recv_stats,
    num_ranks,
    num_local_experts,
    max_count,
    capacity,
    CUMULATIVE: tl.constexpr,
    HAS_STATS: tl.constexpr,
):
    is_first = (tl.program_id(0) == 0).to(tl.int32)
    total = 0
    for e in range(0, num_local_experts * is_first):
        before = total
        for n in range(e * num_ranks, (e + 1) * num_ranks):
            count = tl.load(recv_counts + n)
            total = tl.minimum(total + tl.minimum(tl.maximum(count, 0), max_count), capacity)
            tl.store(recv_offsets + n, total)
        if HAS_STATS:
            tl.store(recv_stats + e, tl.load(recv_stats + e) + total - before)
        if CUMULATIVE:
            tl.store(tokens_per_expert + e, tl.cast(total, tl.int64))
        else:
            tl.store(tokens_per_expert + e, tl.cast(total - before, tl.int64))
    return total


@triton.jit
def _offsets_compare(
    recv_counts,
    recv_offsets,
    tokens_per_expert,
    recv_stats,
    num_ranks,
    num_local_experts,
    max_count,
    capacity,
    CUMULATIVE: tl.constexpr,
    HAS_STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK)
    num_entries = num_ranks * num_local_experts
    num_blocks = tl.cdiv(num_entries, BLOCK)
    per_program = tl.cdiv(num_blocks, tl.num_programs(0))
    first = tl.program_id(0) * per_program
    last = tl.minimum(first + per_program, num_blocks)
    total = _sum_clamped(recv_counts, 0, tl.minimum(first * BLOCK, num_entries), max_count, BLOCK)
    for b in range(first, last):
        at = b * BLOCK + lanes
        block = _clamped(recv_counts, at, num_entries, max_count)
        up_to = (lanes[None, :] <= lanes[:, None]).to(tl.int32)
        ends = tl.sum(up_to * block[None, :], 1) + total
        tl.store(recv_offsets + at, tl.minimum(ends, capacity), mask=at < num_entries)
        total += tl.sum(block, 0)

    experts_per_program = tl.cdiv(num_local_experts, tl.num_programs(0))
    first_expert = tl.program_id(0) * experts_per_program
    last_expert = tl.minimum(first_expert + experts_per_program, num_local_experts)
    first_entry = tl.minimum(first_expert * num_ranks, num_entries)
    total = _sum_clamped(recv_counts, 0, first_entry, max_count, BLOCK)
    for e in range(first_expert, last_expert):
        before = tl.minimum(total, capacity)
        total += _sum_clamped(recv_counts, e * num_ranks, (e + 1) * num_ranks, max_count, BLOCK)
        if HAS_STATS:
            tl.store(recv_stats + e, tl.load(recv_stats + e) + tl.minimum(total, capacity) - before)
        if CUMULATIVE:
            before = 0
        tl.store(tokens_per_expert + e, tl.cast(tl.minimum(total, capacity) - before, tl.int64))
    return tl.minimum(total, capacity)


@triton.jit
def _sum_clamped(recv_counts, begin, end, max_count, BLOCK: tl.constexpr):
    total = 0
    for b in range(0, tl.cdiv(end - begin, BLOCK)):
        at = begin + b * BLOCK + tl.arange(0, BLOCK)
        total += tl.sum(_clamped(recv_counts, at, end, max_count), 0)
    return total


@triton.jit
def _clamped(recv_counts, at, end, max_count):
    count = tl.load(recv_counts + at, mask=at < end, other=0)
    return tl.minimum(tl.maximum(count, 0), max_count)


def _offsets_fallback(
    programs: int,
    *,
    recv_counts: torch.Tensor,
    recv_offsets: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    recv_stats: torch.Tensor | None = None,
    trailer: torch.Tensor,
    num_entries: int,
    num_local_experts: int,
    max_count: int,
    capacity: int,
    CUMULATIVE: bool = False,
    **_: object,
) -> None:
    counts = recv_counts[:num_entries].clamp(0, max_count)
    ends = counts.cumsum(0, dtype=torch.int32).clamp(max=capacity)
    recv_offsets[:num_entries] = ends
    trailer[TRAILER.word("mark")] = TRAILER_MARK
    trailer[TRAILER.word("num_rows")] = ends[-1]
    totals = ends.view(num_local_experts, -1)[:, -1].long()
    before = torch.zeros_like(totals)
    if not CUMULATIVE:
        before[1:] = totals[:-1]
    tokens_per_expert[:num_local_experts] = totals - before
    if recv_stats is not None:
        recv_stats[:num_local_experts] += totals.diff(prepend=totals.new_zeros(1)).int()


@functools.cache
def offsets_kernel(target: str = "cpu", cumulative: bool = False, recv_stats: bool = False) -> TritonKernel:
    """Where each block of received rows ends, from the counts that peers sent.

    The counts come from other processes: each is clamped to [0, max_count] and the running sums to
    ``capacity``, so that nothing that reads the offsets can leave its buffers. Entry
    ``n = e * W + source``, expert-major. With ``cumulative``, ``tokens_per_expert[e]`` is the running total
    up to and including e. The trailer, (2,), gets a mark and the total. With ``recv_stats`` each expert's
    count is added to what stands there.
    """
    arguments = (
        (True, Arg("recv_counts", "*i32", "in")),
        (True, Arg("recv_offsets", "*i32", "out")),
        (True, Arg("tokens_per_expert", "*i64", "out")),
        (recv_stats, Arg("recv_stats", "*i32", "inout")),
        (True, Arg("trailer", "*i32", "out")),
        *((True, arg) for arg in numbers("i32", "num_entries num_local_experts max_count capacity")),
    )
    args, absent = chosen_args(arguments)
    return TritonKernel(
        name="offsets",
        fn=_offsets_kernel,
        args=args,
        constants={
            **absent,
            "CUMULATIVE": cumulative,
            "HAS_STATS": recv_stats,
            "SCALAR": target == "cpu",
            "BLOCK": BLOCK,
            "MARK": TRAILER_MARK,
            "MARK_WORD": TRAILER.word("mark"),
            "TOTAL_WORD": TRAILER.word("num_rows"),
        },
        fallback=_offsets_fallback,
        bytes_moved=lambda *, num_entries, num_local_experts, **_: 8 * num_entries + 8 * num_local_experts,
    )


def _route_inputs(s: Shape, r: Draw) -> Inputs:
    return {
        "topk_idx": r.ids,
        "expand_idx": blank(r.tokens * s.topk),
        "counts": blank(r.num_experts),
        "num_entries": r.tokens * s.topk,
        "num_experts": r.num_experts,
    }


def _offsets_inputs(s: Shape, r: Draw) -> Inputs:
    return {
        "recv_counts": r.integers(-3, r.tokens + 3, r.entries),
        "recv_offsets": blank(r.entries),
        "tokens_per_expert": blank(r.num_local, dtype=I64),
        "recv_stats": r.integers(0, 1000, r.num_local),
        "trailer": blank(TRAILER.num_words),
        "num_entries": r.entries,
        "num_local_experts": r.num_local,
        "max_count": r.tokens,
        "capacity": r.entries * r.tokens // 2,
    }


FAMILIES = (
    Family("route", route_kernel, _route_inputs),
    Family(
        "offsets",
        offsets_kernel,
        _offsets_inputs,
        variants=((), ("cumulative",), ("recv_stats",)),  # no caller has both
    ),
)
