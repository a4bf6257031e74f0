"""Places: where rows go in their receivers' outputs, from the counts of all ranks.

Shape symbols:
    T   tokens of this rank
    K   experts per token
    S   shared experts
    W   ranks
    R   ranks that hold shared experts, the first ones
    M   experts of all ranks
    L   experts of each rank that holds routed ones, M / (W - R)
    N   R + M entries: one for each shared rank, then one for each expert
    E   entries of this rank: 1 on a shared rank, L on others

A receiver's output is ordered by entry, then source rank, then the source's own order. So this rank's rows
for entry n begin there at::

    start[n] = sum over entries m < n of the same receiver, all sources s: count[s, m]
             + sum over sources s < rank: count[s, n]
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.kernel import Arg, TritonKernel, chosen_args, numbers
from moe_triton.kernels.cases import I64, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.language import tl, triton

BLOCK = 64


@triton.jit
def _starts_kernel(
    counts,
    starts,
    recv_counts,
    num_ranks,
    rank,
    num_shared_ranks,
    num_local_experts,
    count_stride,
    max_count,
    SCALAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    per_program = tl.cdiv(num_ranks, tl.num_programs(0))
    begin = tl.program_id(0) * per_program
    for receiver in range(begin, tl.minimum(begin + per_program, num_ranks)):
        is_shared = receiver < num_shared_ranks
        routed = num_shared_ranks + (receiver - num_shared_ranks) * num_local_experts
        first = tl.where(is_shared, receiver, routed)
        number = tl.where(is_shared, 1, num_local_experts)
        if SCALAR:
            _starts_of_receiver(counts, starts, num_ranks, rank, first, number, count_stride, max_count)
        else:
            _starts_by_block(counts, starts, num_ranks, rank, first, number, count_stride, max_count, BLOCK)
        if receiver == rank:
            for n in range(0, number):
                for source in range(0, num_ranks):
                    count = tl.load(counts + source * count_stride + first + n)
                    tl.store(recv_counts + n * num_ranks + source, count)


@triton.jit
def _starts_of_receiver(counts, starts, num_ranks, rank, first, number, count_stride, max_count):
    total = 0
    for n in range(first, first + number):
        for source in range(0, num_ranks):
            if source == rank:
                tl.store(starts + n, total)
            count = tl.load(counts + source * count_stride + n)
            total += tl.minimum(tl.maximum(count, 0), max_count)


@triton.jit
def _starts_by_block(
    counts, starts, num_ranks, rank, first, number, count_stride, max_count, BLOCK: tl.constexpr
):
    lanes = tl.arange(0, BLOCK)
    total = 0
    for b in range(0, tl.cdiv(number, BLOCK)):
        at = b * BLOCK + lanes
        # two loops: the CPU's compiler keeps one running tensor in place
        of_all = tl.zeros((BLOCK,), tl.int32)
        for source in range(0, num_ranks):
            count = tl.load(counts + source * count_stride + first + at, mask=at < number, other=0)
            of_all += tl.minimum(tl.maximum(count, 0), max_count)
        of_earlier = tl.zeros((BLOCK,), tl.int32)
        for source in range(0, rank):
            count = tl.load(counts + source * count_stride + first + at, mask=at < number, other=0)
            of_earlier += tl.minimum(tl.maximum(count, 0), max_count)
        precedes = (lanes[None, :] < lanes[:, None]).to(tl.int32)
        before = tl.sum(precedes * of_all[None, :], 1)
        tl.store(starts + first + at, total + before + of_earlier, mask=at < number)
        total += tl.sum(of_all, 0)


def _starts_fallback(
    programs: int,
    *,
    counts: torch.Tensor,
    starts: torch.Tensor,
    recv_counts: torch.Tensor,
    num_ranks: int,
    rank: int,
    num_shared_ranks: int,
    num_local_experts: int,
    count_stride: int,
    max_count: int,
    **_: object,
) -> None:
    num_entries = num_shared_ranks + (num_ranks - num_shared_ranks) * num_local_experts
    table = counts.as_strided((num_ranks, num_entries), (count_stride, 1), counts.storage_offset())
    clamped = table.clamp(0, max_count)
    of_all, of_earlier = clamped.sum(0, dtype=torch.int32), clamped[:rank].sum(0, dtype=torch.int32)
    for receiver in range(num_ranks):
        is_shared = receiver < num_shared_ranks
        first = (
            receiver if is_shared else num_shared_ranks + (receiver - num_shared_ranks) * num_local_experts
        )
        own = slice(first, first + (1 if is_shared else num_local_experts))
        before = of_all[own].cumsum(0, dtype=torch.int32) - of_all[own]
        starts[own] = before + of_earlier[own]
        if receiver == rank:
            block = table[:, own].T.reshape(-1)
            recv_counts[: block.numel()] = block


@functools.cache
def starts_kernel(target: str = "cpu") -> TritonKernel:
    """Where this rank's rows begin in each receiver's output, and what this rank itself receives.

    ``counts`` holds a row of N counts for each source, every ``count_stride`` words; they come from other
    processes, and are clamped to [0, max_count] where they add up. ``recv_counts`` (E, W) are this rank's
    columns as they are: `offsets` clamps them.
    """
    return TritonKernel(
        name="starts",
        fn=_starts_kernel,
        args=(
            Arg("counts", "*i32", "in"),
            Arg("starts", "*i32", "out"),
            Arg("recv_counts", "*i32", "out"),
            *numbers("i32", "num_ranks rank num_shared_ranks num_local_experts count_stride max_count"),
        ),
        constants={"SCALAR": target == "cpu", "BLOCK": BLOCK},
        fallback=_starts_fallback,
    )


@triton.jit
def _places_kernel(
    topk_idx,
    expand_idx,
    starts,
    shared_ranks,
    shared_slots,
    peer_offsets,
    places,
    shared_places,
    offsets,
    num_tokens,
    num_experts,
    num_shared_ranks,
    num_local_experts,
    capacity,
    hidden,
    TOPK: tl.constexpr,
    NUM_SHARED: tl.constexpr,
):
    per_program = tl.cdiv(num_tokens, tl.num_programs(0))
    begin = tl.program_id(0) * per_program
    width = TOPK + NUM_SHARED
    for token in range(begin, tl.minimum(begin + per_program, num_tokens)):
        for k in range(0, TOPK):
            expert = tl.load(topk_idx + token * TOPK + k)
            place = -1
            offset = tl.cast(0, tl.int64)
            if (expert >= 0) & (expert < num_experts):
                place = tl.load(starts + num_shared_ranks + expert) + tl.load(expand_idx + token * TOPK + k)
                rank = num_shared_ranks + expert // num_local_experts
                row = tl.minimum(place, capacity - 1).to(tl.int64)
                offset = tl.load(peer_offsets + rank) + row * hidden
            tl.store(places + token * TOPK + k, place)
            tl.store(offsets + token * width + k, offset)
        for s in tl.static_range(NUM_SHARED):
            # without masks every token goes to every shared expert
            rank = tl.load(shared_ranks + token * NUM_SHARED + s)
            place = tl.load(starts + rank) + tl.load(shared_slots + token)
            row = tl.minimum(place, capacity - 1).to(tl.int64)
            tl.store(shared_places + token * NUM_SHARED + s, place)
            tl.store(offsets + token * width + TOPK + s, tl.load(peer_offsets + rank) + row * hidden)


def _places_fallback(
    programs: int,
    *,
    topk_idx: torch.Tensor,
    expand_idx: torch.Tensor,
    starts: torch.Tensor,
    peer_offsets: torch.Tensor,
    places: torch.Tensor,
    offsets: torch.Tensor,
    num_tokens: int,
    num_experts: int,
    num_shared_ranks: int,
    num_local_experts: int,
    capacity: int,
    hidden: int,
    TOPK: int,
    NUM_SHARED: int,
    shared_ranks: torch.Tensor | None = None,
    shared_slots: torch.Tensor | None = None,
    shared_places: torch.Tensor | None = None,
) -> None:
    entries = num_tokens * TOPK
    ids = topk_idx[:entries].long()
    is_routed = (ids >= 0) & (ids < num_experts)
    experts = torch.where(is_routed, ids, 0)
    place = starts[num_shared_ranks + experts] + expand_idx[:entries]
    rows = place.clamp(max=capacity - 1).long()
    offset = peer_offsets[num_shared_ranks + experts // num_local_experts] + rows * hidden
    places[:entries] = torch.where(is_routed, place, -1)
    table = offsets[: num_tokens * (TOPK + NUM_SHARED)].view(num_tokens, TOPK + NUM_SHARED)
    table[:, :TOPK] = torch.where(is_routed, offset, 0).view(num_tokens, TOPK)
    if shared_ranks is None or shared_slots is None or shared_places is None:
        return
    ranks = shared_ranks[: num_tokens * NUM_SHARED].view(num_tokens, NUM_SHARED).long()
    place = starts[ranks] + shared_slots[:num_tokens, None]
    shared_places[: num_tokens * NUM_SHARED] = place.reshape(-1)
    table[:, TOPK:] = peer_offsets[ranks] + place.clamp(max=capacity - 1).long() * hidden


@functools.cache
def places_kernel(topk: int, num_shared: int = 0) -> TritonKernel:
    """The row of the receiver's output that each result of each token goes to, and where it is read back.

    ``places`` (T, K) is ``starts[R + id] + expand_idx``, or -1 where nothing is sent; ``shared_places``
    (T, S) is ``starts[rank] + shared_slots[t]``. ``offsets`` (T, K + S) is how many elements the answer to
    that row lies behind this rank's own first answer: ``peer_offsets`` (W,) of its rank, plus the row, no
    later than the last, times ``hidden``; 0 where there is none. Without shared experts, the shared
    arguments are absent.
    """
    check_positive("topk", topk)
    arguments = (
        (True, Arg("topk_idx", "*i32", "in")),
        (True, Arg("expand_idx", "*i32", "in")),
        (True, Arg("starts", "*i32", "in")),
        (num_shared > 0, Arg("shared_ranks", "*i32", "in")),
        (num_shared > 0, Arg("shared_slots", "*i32", "in")),
        (True, Arg("peer_offsets", "*i64", "in")),
        (True, Arg("places", "*i32", "out")),
        (num_shared > 0, Arg("shared_places", "*i32", "out")),
        (True, Arg("offsets", "*i64", "out")),
        *((True, arg) for arg in numbers("i32", "num_tokens num_experts num_shared_ranks")),
        *((True, arg) for arg in numbers("i32", "num_local_experts capacity hidden")),
    )
    args, absent = chosen_args(arguments)
    return TritonKernel(
        name="places",
        fn=_places_kernel,
        args=args,
        constants={
            **absent,
            "TOPK": topk,
            "NUM_SHARED": num_shared,
        },
        fallback=_places_fallback,
        bytes_moved=lambda *, num_tokens, **_: num_tokens * (topk * 20 + num_shared * 20),
    )


def _inputs(s: Shape, r: Draw) -> Inputs:
    routed_ranks = r.num_ranks - r.num_shared_ranks
    local = -(-r.num_experts // routed_ranks)
    entries = r.num_shared_ranks + routed_ranks * local
    return {
        "num_ranks": r.num_ranks,
        "num_experts": r.num_experts,
        "num_shared_ranks": r.num_shared_ranks,
        "num_local_experts": local,
        "num_tokens": r.tokens,
        # of starts
        "counts": r.integers(-2, r.tokens + 2, r.num_ranks, entries),
        "starts": r.integers(0, 40, entries),
        "recv_counts": blank(local, r.num_ranks),
        "rank": r.rank,
        "count_stride": entries,
        "max_count": r.tokens,
        # of places
        "topk_idx": r.ids,
        "expand_idx": r.integers(0, 3, r.tokens, s.topk),
        "shared_ranks": r.integers(0, r.num_shared_ranks, r.tokens, s.shared),
        "shared_slots": r.integers(0, 9, r.tokens),
        "peer_offsets": r.integers(-(2**40), 2**40, r.num_ranks, dtype=I64),
        "places": blank(r.tokens, s.topk),
        "shared_places": blank(r.tokens, s.shared),
        "offsets": blank(r.tokens, s.topk + s.shared, dtype=I64),
        "capacity": 30,
        "hidden": 64,
    }


FAMILIES = (
    Family("starts", starts_kernel, _inputs),
    Family("places", places_kernel, _inputs),
)
