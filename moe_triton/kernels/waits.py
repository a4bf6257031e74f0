"""Waits: the longest time that each source rank was ever waited for.

Shape symbols:
    T    tokens of this rank
    K    experts per token
    M    routed experts of all ranks
    E    routed experts of each MoE rank
    S    shared experts
    R    ranks of shared experts, [0, R)
    EP   ranks

The caller's ``performance_info`` has an entry per rank of its own numbering; ``table`` maps a rank of the
group to its entry. Ranks without a valid entry are not recorded, no two ranks share one, and negative waits
are ignored.

On a CPU every result raises its source's entry. An AI core may not see its own recent store when it loads the
entry again, so there each entry is loaded once, and stored once with all its results.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.kernel import Arg, TritonKernel, numbers
from moe_triton.core.space import Space
from moe_triton.kernels.cases import I64, Draw, Family, Inputs, Shape
from moe_triton.kernels.language import tl, triton

BLOCK = 64
BLOCKS = 16, 32, 64, 128
MAX_RESULTS = 32  # K + S, rounded up: 16 + 4 at most


@triton.jit
def _raise_entry(performance_info, table, num_table, source, waited):
    at = tl.load(table + source)
    # a loop of one iteration or none: in a branch, the CPU's compiler would allocate a buffer that it never
    # frees
    is_recorded = ((at >= 0) & (at < num_table) & (waited >= 0)).to(tl.int32)
    for _ in range(0, is_recorded):
        seen = tl.load(performance_info + at)
        tl.store(performance_info + at, tl.maximum(seen, waited.to(tl.int64)))


@triton.jit
def _waits_of_dispatch_kernel(
    waited,
    table,
    performance_info,
    num_local_experts,
    num_ranks,
    num_table,
):
    # programs share entries of one cache line: the first one does all
    is_first = (tl.program_id(0) == 0).to(tl.int32)
    for source in range(0, num_ranks * is_first):
        longest = tl.load(waited + source)
        for e in range(1, num_local_experts):
            longest = tl.maximum(longest, tl.load(waited + e * num_ranks + source))
        _raise_entry(performance_info, table, num_table, source, longest)


def _waits_of_dispatch_fallback(
    programs: int,
    *,
    waited: torch.Tensor,
    table: torch.Tensor,
    performance_info: torch.Tensor,
    num_local_experts: int,
    num_ranks: int,
    num_table: int,
) -> None:
    longest = waited[: num_local_experts * num_ranks].view(num_local_experts, num_ranks).amax(0)
    _raise_entries(performance_info, table[:num_ranks], num_table, longest)


def _raise_entries(
    performance_info: torch.Tensor, table: torch.Tensor, num_table: int, waited: torch.Tensor
) -> None:
    recorded = (table >= 0) & (table < num_table) & (waited >= 0)
    performance_info.scatter_reduce_(0, table[recorded].long(), waited[recorded].long(), "amax")


@functools.cache
def waits_of_dispatch_kernel(target: str = "cpu") -> TritonKernel:
    """Raise each source rank's entry to the longest wait for any of its E status entries.

    ``waited`` (E*EP,) holds microseconds, entry ``e * EP + source``. The first program does all. The
    same form serves every target.
    """
    return TritonKernel(
        name="waits_of_dispatch",
        fn=_waits_of_dispatch_kernel,
        args=(
            Arg("waited", "*i32", "in"),
            Arg("table", "*i32", "in"),
            Arg("performance_info", "*i64", "inout"),
            *numbers("i32", "num_local_experts num_ranks num_table"),
        ),
        constants={},
        fallback=_waits_of_dispatch_fallback,
        bytes_moved=lambda *, num_local_experts, num_ranks, **_: (4 * num_local_experts + 20) * num_ranks,
    )


@triton.jit
def _waits_of_combine_kernel(
    waited,
    topk_idx,
    table,
    performance_info,
    num_tokens,
    topk,
    num_experts,
    num_local_experts,
    num_shared_experts,
    num_shared_ranks,
    num_ranks,
    rank,
    num_table,
    SCALAR: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_RESULTS: tl.constexpr,
):
    if SCALAR:
        _waits_of_results(
            waited,
            topk_idx,
            table,
            performance_info,
            num_tokens,
            topk,
            num_experts,
            num_local_experts,
            num_shared_experts,
            num_shared_ranks,
            num_ranks,
            rank,
            num_table,
        )
    else:
        _waits_of_sources(
            waited,
            topk_idx,
            table,
            performance_info,
            num_tokens,
            topk,
            num_experts,
            num_local_experts,
            num_shared_experts,
            num_shared_ranks,
            num_ranks,
            rank,
            num_table,
            BLOCK,
            MAX_RESULTS,
        )


@triton.jit
def _waits_of_results(
    waited,
    topk_idx,
    table,
    performance_info,
    num_tokens,
    topk,
    num_experts,
    num_local_experts,
    num_shared_experts,
    num_shared_ranks,
    num_ranks,
    rank,
    num_table,
):
    is_first = (tl.program_id(0) == 0).to(tl.int32)
    # a product instead of a division each: id * 2^40 / E, rounded up, is exact below 2^20 experts
    factor = ((1 << 40) // num_local_experts.to(tl.int64)) + 1
    for t in range(0, num_tokens * is_first):
        results = waited + t * (topk + num_shared_experts)
        for k in range(0, topk):
            expert = tl.load(topk_idx + t * topk + k)
            inside = tl.minimum(tl.maximum(expert, 0), num_experts - 1)
            source = num_shared_ranks + ((inside.to(tl.int64) * factor) >> 40).to(tl.int32)
            is_routed = (expert == inside) & (source < num_ranks)
            for _ in range(0, is_routed.to(tl.int32)):
                _raise_entry(performance_info, table, num_table, source, tl.load(results + k))
        for s in range(0, num_shared_experts):
            replicas = num_shared_ranks // num_shared_experts
            source = s * replicas + rank % replicas
            _raise_entry(performance_info, table, num_table, source, tl.load(results + topk + s))


@triton.jit
def _waits_of_sources(
    waited,
    topk_idx,
    table,
    performance_info,
    num_tokens,
    topk,
    num_experts,
    num_local_experts,
    num_shared_experts,
    num_shared_ranks,
    num_ranks,
    rank,
    num_table,
    BLOCK: tl.constexpr,
    MAX_RESULTS: tl.constexpr,
):
    is_first = (tl.program_id(0) == 0).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    ks = tl.arange(0, MAX_RESULTS)
    num_results = topk + num_shared_experts
    for source in range(0, num_ranks * is_first):
        # a rank of routed experts has a stretch of ids, one of shared experts a column of results
        first = (source - num_shared_ranks) * num_local_experts
        last = tl.minimum(first + num_local_experts, num_experts)
        replicas = tl.maximum(num_shared_ranks // tl.maximum(num_shared_experts, 1), 1)
        is_replica = (source < num_shared_ranks) & (source % replicas == rank % replicas)
        column = tl.where(is_replica, topk + source // replicas, -1)
        longest = -1
        for b in range(0, tl.cdiv(num_tokens, BLOCK)):
            tokens = b * BLOCK + lanes
            inside = tokens[:, None] < num_tokens
            is_routed = inside & (ks[None, :] < topk)
            experts = tl.load(topk_idx + tokens[:, None] * topk + ks[None, :], mask=is_routed, other=-1)
            us = tl.load(
                waited + tokens[:, None] * num_results + ks[None, :],
                mask=inside & (ks[None, :] < num_results),
                other=-1,
            )
            from_source = (experts >= tl.maximum(first, 0)) & (experts < last)
            from_source = from_source | (ks[None, :] == column)
            longest = tl.maximum(longest, tl.max(tl.max(tl.where(from_source, us, -1), 1), 0))
        _raise_entry(performance_info, table, num_table, source, longest)


def _waits_of_combine_fallback(
    programs: int,
    *,
    waited: torch.Tensor,
    topk_idx: torch.Tensor,
    table: torch.Tensor,
    performance_info: torch.Tensor,
    num_tokens: int,
    topk: int,
    num_experts: int,
    num_local_experts: int,
    num_shared_experts: int,
    num_shared_ranks: int,
    num_ranks: int,
    rank: int,
    num_table: int,
    **_: object,
) -> None:
    num_results = topk + num_shared_experts
    us = waited[: num_tokens * num_results].view(num_tokens, num_results)
    experts = topk_idx[: num_tokens * topk].view(num_tokens, topk)
    sources = torch.full_like(us, -1)
    routed = num_shared_ranks + experts.div(num_local_experts, rounding_mode="floor")
    is_routed = (experts >= 0) & (experts < num_experts) & (routed < num_ranks)
    sources[:, :topk] = torch.where(is_routed, routed, -1)
    if num_shared_experts:
        replicas = num_shared_ranks // num_shared_experts
        shared = torch.arange(num_shared_experts, dtype=torch.int32) * replicas + rank % replicas
        sources[:, topk:] = shared
    came = sources >= 0
    _raise_entries(performance_info, table[sources[came].long()], num_table, us[came])


@functools.cache
def waits_of_combine_kernel(target: str = "cpu") -> TritonKernel:
    """Raise each source rank's entry to the longest wait for any result that came from it.

    ``waited`` (T, K+S) holds microseconds, at least 0. The routed result of an id in [0, M) comes from rank
    ``R + id // E``, that of shared expert s from rank ``s * (R/S) + rank % (R/S)``; other ids bring none. The
    first program does all.
    """

    def bytes_moved(*, num_tokens: int, topk: int, num_shared_experts: int, num_ranks: int, **_: int) -> int:
        return 4 * num_tokens * (2 * topk + num_shared_experts) + 20 * num_ranks

    return TritonKernel(
        name="waits_of_combine",
        fn=_waits_of_combine_kernel,
        args=(
            Arg("waited", "*i32", "in"),
            Arg("topk_idx", "*i32", "in"),
            Arg("table", "*i32", "in"),
            Arg("performance_info", "*i64", "inout"),
            *numbers("i32", "num_tokens topk num_experts num_local_experts"),
            *numbers("i32", "num_shared_experts num_shared_ranks num_ranks rank num_table"),
        ),
        constants={"SCALAR": target == "cpu", "BLOCK": BLOCK, "MAX_RESULTS": MAX_RESULTS},
        fallback=_waits_of_combine_fallback,
        bytes_moved=bytes_moved,
        space=None if target == "cpu" else Space({"BLOCK": BLOCKS}),
    )


def _dispatch_inputs(s: Shape, r: Draw) -> Inputs:
    return {
        "waited": r.integers(0, 1000, r.entries),
        "table": torch.randperm(r.num_ranks, generator=r.generator).int(),
        "performance_info": r.integers(0, 500, r.num_ranks, dtype=I64),
        "num_local_experts": r.num_local,
        "num_ranks": r.num_ranks,
        "num_table": r.num_ranks,
    }


def _combine_inputs(s: Shape, r: Draw) -> Inputs:
    return {
        **_dispatch_inputs(s, r),
        "waited": r.integers(0, 1000, r.tokens, s.topk),
        "topk_idx": r.ids,
        "num_tokens": r.tokens,
        "topk": s.topk,
        "num_experts": r.num_experts,
        "num_shared_experts": 0,
        "num_shared_ranks": 0,
        "rank": 0,
    }


FAMILIES = (
    Family("waits_of_dispatch", waits_of_dispatch_kernel, _dispatch_inputs),
    Family("waits_of_combine", waits_of_combine_kernel, _combine_inputs),
)
