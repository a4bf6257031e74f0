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
are ignored. A wait of 0, for a flag that was there at the first look, counts as one of 1: who reads entries
takes 0 for a rank that nothing was waited for from, and the rank that comes last would have no others.

On a CPU every result raises its source's entry. An AI core may not see its own recent store when it loads the
entry again, and a scalar load takes it a few hundred cycles: there a program has sources of its own, loads
waits as tiles, and each entry once.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.kernel import Arg, TritonKernel, alike, numbers
from moe_triton.core.space import Space
from moe_triton.kernels.cases import I64, Draw, Family, Inputs, Shape
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.programs import part_of

EXPERTS = 32  # whose waits are one tile
BLOCK = 128
BLOCKS = 16, 32, 64, 128, 256, 512


@triton.jit
def _raise_entry(performance_info, table, num_table, source, waited):
    at = tl.load(table + source)
    # a loop of one iteration or none: in a branch, the CPU's compiler would allocate a buffer that it never
    # frees
    is_recorded = ((at >= 0) & (at < num_table) & (waited >= 0)).to(tl.int32)
    for _ in range(0, is_recorded):
        seen = tl.load(performance_info + at)
        tl.store(performance_info + at, tl.maximum(seen, tl.maximum(waited, 1).to(tl.int64)))


@triton.jit
def _raise_entry_once(performance_info, table, num_table, source, waited):
    """``waited`` is a tile: its maximum is taken when the entry is there, so that both come side by side."""
    at = tl.load(table + source)
    is_entry = (at >= 0) & (at < num_table)
    at = tl.where(is_entry, at, 0)
    seen = tl.load(performance_info + at)
    longest = tl.max(waited, 0)
    for _ in range(0, (is_entry & (longest >= 0)).to(tl.int32)):
        tl.store(performance_info + at, tl.maximum(seen, tl.maximum(longest, 1).to(tl.int64)))


@triton.jit
def _waits_of_dispatch_kernel(
    waited, table, performance_info,
    num_local_experts, num_ranks, num_table,
    SCALAR: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    begin, end = part_of(num_ranks)
    for source in range(begin, end):
        if SCALAR:
            longest = tl.load(waited + source)
            for e in range(1, num_local_experts):
                longest = tl.maximum(longest, tl.load(waited + e * num_ranks + source))
            _raise_entry(performance_info, table, num_table, source, longest)
        else:
            longest = tl.full((EXPERTS,), -1, tl.int32)
            for b in range(0, tl.cdiv(num_local_experts, EXPERTS)):
                e = b * EXPERTS + tl.arange(0, EXPERTS)
                us = tl.load(waited + e * num_ranks + source, mask=e < num_local_experts, other=-1)
                longest = tl.maximum(longest, us)
            _raise_entry_once(performance_info, table, num_table, source, longest)


@fallback
def _waits_of_dispatch_fallback(a: Arguments) -> None:
    longest = a.waited[: a.num_local_experts * a.num_ranks].view(a.num_local_experts, a.num_ranks).amax(0)
    _raise_entries(a.performance_info, a.table[: a.num_ranks], a.num_table, longest)


def _raise_entries(
    performance_info: torch.Tensor, table: torch.Tensor, num_table: int, waited: torch.Tensor
) -> None:
    recorded = (table >= 0) & (table < num_table) & (waited >= 0)
    performance_info.scatter_reduce_(0, table[recorded].long(), waited[recorded].clamp(min=1).long(), "amax")


@functools.cache
def waits_of_dispatch_kernel(target: str = "cpu") -> TritonKernel:
    """Raise each source rank's entry to the longest wait for any of its E status entries.

    ``waited`` (E*EP,) holds microseconds, entry ``e * EP + source``. Sources are split over programs.
    """
    return TritonKernel(
        name="waits_of_dispatch",
        fn=_waits_of_dispatch_kernel,
        args=(
            *alike("*i32", "waited table", "in"),
            Arg("performance_info", "*i64", "inout"),
            *numbers("i32", "num_local_experts num_ranks num_table"),
        ),
        constants={"SCALAR": target == "cpu", "EXPERTS": EXPERTS},
        fallback=_waits_of_dispatch_fallback,
        bytes_moved=lambda *, num_local_experts, num_ranks, **_: (4 * num_local_experts + 20) * num_ranks,
    )


@triton.jit
def _waits_of_combine_kernel(
    waited, topk_idx, table, performance_info,
    num_tokens, num_experts, num_local_experts, num_shared_experts, num_shared_ranks, num_ranks, rank,
    num_table,
    TOPK: tl.constexpr, SCALAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if SCALAR:
        # results of one source are spread over all tokens: the first program does all
        is_first = (tl.program_id(0) == 0).to(tl.int32)
        # a product instead of a division each: id * 2^40 / E, rounded up, is exact below 2^20 experts
        factor = ((1 << 40) // num_local_experts.to(tl.int64)) + 1
        for t in range(0, num_tokens * is_first):
            results = waited + t * (TOPK + num_shared_experts)
            for k in range(0, TOPK):
                expert = tl.load(topk_idx + t * TOPK + k)
                inside = tl.minimum(tl.maximum(expert, 0), num_experts - 1)
                source = num_shared_ranks + ((inside.to(tl.int64) * factor) >> 40).to(tl.int32)
                is_routed = (expert == inside) & (source < num_ranks)
                for _ in range(0, is_routed.to(tl.int32)):
                    _raise_entry(performance_info, table, num_table, source, tl.load(results + k))
            for s in range(0, num_shared_experts):
                replicas = num_shared_ranks // num_shared_experts
                source = s * replicas + rank % replicas
                _raise_entry(performance_info, table, num_table, source, tl.load(results + TOPK + s))
    else:
        lanes, ks = tl.arange(0, BLOCK), tl.arange(0, TOPK)
        num_results = TOPK + num_shared_experts
        num_blocks = tl.cdiv(num_tokens, BLOCK)
        replicas = tl.maximum(num_shared_ranks // tl.maximum(num_shared_experts, 1), 1)
        begin, end = part_of(num_ranks)
        for source in range(begin, end):
            # a rank of routed experts has a stretch of ids, one of shared experts a column of results
            is_shared = source < num_shared_ranks
            first = (source - num_shared_ranks) * num_local_experts
            last = tl.minimum(first + num_local_experts, num_experts) - 1
            routed = tl.full((BLOCK, TOPK), -1, tl.int32)
            for b in range(0, tl.where(is_shared, 0, num_blocks)):
                tokens = (b * BLOCK + lanes)[:, None]
                inside = tokens < num_tokens
                experts = tl.load(topk_idx + tokens * TOPK + ks[None, :], mask=inside, other=-1)
                us = tl.load(waited + tokens * num_results + ks[None, :], mask=inside, other=-1)
                # -1 where an id is outside of the stretch: a comparison would take these rows one by one
                outside = ((experts - first) | (last - experts)) >> 31
                routed = tl.maximum(routed, us | outside)
            shared = tl.full((BLOCK,), -1, tl.int32)
            sends_shared = is_shared & (source % replicas == rank % replicas)
            for b in range(0, tl.where(sends_shared, num_blocks, 0)):
                tokens = b * BLOCK + lanes
                column = waited + tokens * num_results + TOPK + source // replicas
                shared = tl.maximum(shared, tl.load(column, mask=tokens < num_tokens, other=-1))
            longest = tl.maximum(tl.max(routed, 1), shared)
            _raise_entry_once(performance_info, table, num_table, source, longest)


@fallback
def _waits_of_combine_fallback(a: Arguments) -> None:
    num_results = a.TOPK + a.num_shared_experts
    us = a.waited[: a.num_tokens * num_results].view(a.num_tokens, num_results)
    experts = a.topk_idx[: a.num_tokens * a.TOPK].view(a.num_tokens, a.TOPK)
    sources = torch.full_like(us, -1)
    routed = a.num_shared_ranks + experts.div(a.num_local_experts, rounding_mode="floor")
    is_routed = (experts >= 0) & (experts < a.num_experts) & (routed < a.num_ranks)
    sources[:, : a.TOPK] = torch.where(is_routed, routed, -1)
    if a.num_shared_experts:
        replicas = a.num_shared_ranks // a.num_shared_experts
        shared = torch.arange(a.num_shared_experts, dtype=torch.int32) * replicas + a.rank % replicas
        sources[:, a.TOPK :] = shared
    came = sources >= 0
    _raise_entries(a.performance_info, a.table[sources[came].long()], a.num_table, us[came])


@functools.cache
def waits_of_combine_kernel(topk: int, target: str = "cpu") -> TritonKernel:
    """Raise each source rank's entry to the longest wait for any result that came from it.

    ``waited`` (T, K+S) holds microseconds, at least 0. The routed result of an id in [0, M) comes from rank
    ``R + id // E``, that of shared expert s from rank ``s * (R/S) + rank % (R/S)``; other ids bring none. On
    an NPU sources are split over programs; on a CPU the first one does all.
    """
    check_positive("topk", topk)

    def bytes_moved(*, num_tokens: int, num_shared_experts: int, num_ranks: int, **_: int) -> int:
        return 4 * num_tokens * (2 * topk + num_shared_experts) + 20 * num_ranks

    return TritonKernel(
        name="waits_of_combine",
        fn=_waits_of_combine_kernel,
        args=(
            *alike("*i32", "waited topk_idx table", "in"),
            Arg("performance_info", "*i64", "inout"),
            *numbers("i32", "num_tokens num_experts num_local_experts"),
            *numbers("i32", "num_shared_experts num_shared_ranks num_ranks rank num_table"),
        ),
        constants={"TOPK": topk, "SCALAR": target == "cpu", "BLOCK": BLOCK},
        fallback=_waits_of_combine_fallback,
        bytes_moved=bytes_moved,
        space=None if target == "cpu" else Space({"BLOCK": BLOCKS}, sizes={"topk": topk}),
    )


def _dispatch_inputs(s: Shape, r: Draw) -> Inputs:
    return {
        "waited": r.integers(0, 1000, r.entries),
        "table": torch.randperm(r.num_ranks, generator=r.generator).int(),
        "performance_info": r.integers(0, 500, r.num_ranks, dtype=I64),
        "num_table": r.num_ranks,
    }


def _combine_inputs(s: Shape, r: Draw) -> Inputs:
    return {
        **_dispatch_inputs(s, r),
        "waited": r.integers(0, 1000, r.tokens, s.topk),
        "num_shared_experts": 0,
        "num_shared_ranks": 0,
        "rank": 0,
    }


FAMILIES = (
    Family("waits_of_dispatch", waits_of_dispatch_kernel, _dispatch_inputs),
    Family("waits_of_combine", waits_of_combine_kernel, _combine_inputs),
)
