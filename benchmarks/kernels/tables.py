"""Kernels that count, number and name: a few integers per token, no rows."""

from __future__ import annotations

import torch

from benchmarks.kernels.case import NUM_EXPERTS, NUM_RANKS, TOPK, Arguments, Case, Tensors, make_case
from moe_triton.kernels import (
    gather_counts_kernel,
    offsets_kernel,
    own_offsets_kernel,
    returns_kernel,
    route_kernel,
    select_kernel,
    share_kernel,
    waits_of_combine_kernel,
    waits_of_dispatch_kernel,
)
from moe_triton.layout import TRAILER_WORDS

LOCAL_EXPERTS = 32
MANY_RANKS = 64


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def _ids(tokens: int) -> torch.Tensor:
    return torch.rand(tokens, NUM_EXPERTS).topk(TOPK, dim=1).indices.int()


def route_case(tokens: int) -> Case:
    ids = _ids(tokens)
    index, counts = _ints(tokens * TOPK), _ints(NUM_EXPERTS)

    def eager() -> Tensors:
        flat = ids.view(-1)
        order = torch.argsort(flat, stable=True)
        count = torch.bincount(flat, minlength=NUM_EXPERTS)
        starts = count.cumsum(0) - count
        place = torch.empty_like(order)
        place[order] = torch.arange(flat.numel()) - starts.repeat_interleave(count)
        return place.int(), count.int()

    arguments: Arguments = [ids, index, counts, ids.numel(), NUM_EXPERTS]
    return make_case(route_kernel(), arguments, [index, counts], eager, variant="int32", tokens=tokens)


def offsets_case(tokens: int) -> Case:
    received = torch.randint(0, tokens, (LOCAL_EXPERTS * NUM_RANKS,), dtype=torch.int32)
    ends, per_expert = torch.empty_like(received), torch.empty(LOCAL_EXPERTS, dtype=torch.int64)
    sizes = [received.numel(), LOCAL_EXPERTS, tokens, 10**6]

    def eager() -> Tensors:
        clamped = received.clamp(0, tokens)
        return clamped.cumsum(0, dtype=torch.int32), clamped.view(LOCAL_EXPERTS, -1).sum(1)

    return make_case(
        offsets_kernel(),
        [received, ends, per_expert, _ints(TRAILER_WORDS), *sizes],
        [ends, per_expert],
        eager,
        variant="int32",
        tokens=received.numel(),
    )


def select_case(tokens: int, *, per_entry: bool) -> Case:
    ids = _ids(tokens)
    mask = torch.rand(tokens, TOPK) < 0.5 if per_entry else torch.arange(tokens) < tokens * 3 // 4
    selected, active, count = _ints(tokens, TOPK), _ints(tokens), _ints(1)

    def eager() -> Tensors:
        if per_entry:
            takes_part, entries = mask.any(1), mask
        else:
            takes_part = mask.cumprod(0).bool()
            entries = takes_part[:, None]
        number = takes_part.cumsum(0, dtype=torch.int32)
        kept = torch.where(entries, ids, -1)
        return kept, torch.where(takes_part, number - 1, -1), number[-1:]

    return make_case(
        select_kernel(TOPK, per_entry),
        [ids, mask.view(torch.int8), selected, active, count, tokens],
        [selected, active, count],
        eager,
        variant="by entry" if per_entry else "by token",
        tokens=tokens,
    )


def share_case(tokens: int, *, masked: bool) -> Case:
    experts, ranks, rank = 2, 8, 13
    active = torch.arange(tokens, dtype=torch.int32)
    active[tokens * 3 // 4 :] = -1
    to, slots, counts = _ints(tokens, experts), _ints(tokens), _ints(ranks)

    def eager() -> Tensors:
        number = active if masked else torch.arange(tokens, dtype=torch.int32)
        replicas = ranks // experts
        first = torch.arange(experts, dtype=torch.int32) * replicas + rank % replicas
        sent = number >= 0
        per_rank = torch.zeros(ranks, dtype=torch.int32)
        per_rank[first] = sent.sum(dtype=torch.int32)
        return torch.where(sent[:, None], first, -1), number, per_rank

    arguments: Arguments = [*([active] if masked else []), to, slots, counts, tokens, experts, ranks, rank]
    return make_case(
        share_kernel(False, masked),
        arguments,
        [to, slots, counts],
        eager,
        variant="masked" if masked else "int32",
        tokens=tokens,
    )


def share_by_position_case(tokens: int) -> Case:
    ranks, rank = 4, 13
    to, slots, counts = _ints(tokens), _ints(tokens), _ints(ranks)

    def eager() -> Tensors:
        per_rank = (torch.arange(rank, rank + ranks + 1) * tokens).floor_divide(ranks).diff()
        pieces = torch.arange(ranks).repeat_interleave(per_rank)
        starts = per_rank.cumsum(0) - per_rank
        return pieces.int(), (torch.arange(tokens) - starts[pieces]).int(), per_rank.int()

    arguments: Arguments = [to, slots, counts, tokens, ranks, rank]
    kernel = share_kernel(True, False)
    return make_case(kernel, arguments, [to, slots, counts], eager, variant="int32", tokens=tokens)


def waits_of_dispatch_case() -> Case:
    waited = torch.randint(0, 1000, (LOCAL_EXPERTS * NUM_RANKS,), dtype=torch.int32)
    table = torch.randperm(NUM_RANKS, dtype=torch.int32)
    seen = torch.zeros(NUM_RANKS, dtype=torch.int64)
    other = seen.clone()

    def eager() -> Tensors:
        longest = waited.view(LOCAL_EXPERTS, NUM_RANKS).amax(0).long()
        other.scatter_reduce_(0, table.long(), longest, "amax")
        return (other,)

    arguments: Arguments = [waited, table, seen, LOCAL_EXPERTS, NUM_RANKS, NUM_RANKS]
    kernel = waits_of_dispatch_kernel()
    return make_case(kernel, arguments, [seen], eager, variant="int64", tokens=waited.numel())


def waits_of_combine_case(tokens: int) -> Case:
    ids = _ids(tokens)
    waited = torch.randint(0, 1000, (tokens, TOPK), dtype=torch.int32)
    table = torch.randperm(NUM_RANKS, dtype=torch.int32)
    seen = torch.zeros(NUM_RANKS, dtype=torch.int64)
    other = seen.clone()
    per_rank = NUM_EXPERTS // NUM_RANKS

    def eager() -> Tensors:
        at = table[(ids // per_rank).view(-1)].long()
        other.scatter_reduce_(0, at, waited.view(-1).long(), "amax")
        return (other,)

    sizes = [tokens, TOPK, NUM_EXPERTS, per_rank, 0, 0, NUM_RANKS, 0, NUM_RANKS]
    arguments: Arguments = [waited, ids, table, seen, *sizes]
    kernel = waits_of_combine_kernel()
    return make_case(kernel, arguments, [seen], eager, variant="int64", tokens=tokens)


def returns_case(tokens: int) -> Case:
    """Every rank sends every expert two rows for 64 tokens, 8 of 256 experts each."""
    entries = LOCAL_EXPERTS * NUM_RANKS
    counts = torch.full((entries,), max(tokens * TOPK // NUM_EXPERTS, 1), dtype=torch.int32)
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = int(ends[-1])
    triples = _ints(rows, 3)

    def eager() -> Tensors:
        per_entry = ends.diff(prepend=ends.new_zeros(1))
        entry = torch.arange(entries, dtype=torch.int32).repeat_interleave(per_entry)
        starts = (ends - per_entry).repeat_interleave(per_entry)
        index = torch.arange(rows, dtype=torch.int32) - starts
        return (torch.stack([entry % NUM_RANKS, index, entry // NUM_RANKS], 1),)

    return make_case(
        returns_kernel(shared=False),
        [ends, triples, entries, NUM_RANKS, rows, 0],
        [triples],
        eager,
        variant="int32",
        tokens=rows,
        moved=12 * rows + 4 * entries,
    )


def returns_shared_case(tokens: int) -> Case:
    ranks, shared_ranks, rank = MANY_RANKS, 4, 1
    per_source = max(tokens // shared_ranks, 1)
    tokens = per_source * shared_ranks  # so that all pieces are as long
    ends = (torch.arange(ranks, dtype=torch.int32) + 1) * per_source
    rows = int(ends[-1])
    triples = _ints(rows, 3)

    def eager() -> Tensors:
        per_entry = ends.diff(prepend=ends.new_zeros(1))
        entry = torch.arange(ranks, dtype=torch.int32).repeat_interleave(per_entry)
        starts = (ends - per_entry).repeat_interleave(per_entry)
        row = torch.arange(rows, dtype=torch.int32)
        first = (rank + entry) * tokens // shared_ranks - entry * tokens // shared_ranks
        own = entry < shared_ranks
        source = torch.where(own, rank, entry)
        index = torch.where(own, row, row - starts + first)
        return (torch.stack([source, index, torch.full_like(source, NUM_EXPERTS)], 1),)

    return make_case(
        returns_kernel(shared=True),
        [ends, triples, ranks, rows, rank, tokens, shared_ranks, NUM_EXPERTS],
        [triples],
        eager,
        variant="int32",
        tokens=rows,
        moved=12 * rows + 4 * ranks,
    )


def own_offsets_case(tokens: int) -> Case:
    ranks, shared_ranks, rank = MANY_RANKS, 4, 1
    ends = (torch.arange(ranks, dtype=torch.int32) + 1) * tokens
    out = _ints(ranks)

    def eager() -> Tensors:
        pieces = (torch.arange(rank, rank + shared_ranks + 1) * tokens).floor_divide(shared_ranks)
        return (torch.cat([(pieces[1:] - pieces[0]).int(), ends[shared_ranks:]]),)

    arguments: Arguments = [ends, out, ranks, shared_ranks, rank, tokens]
    return make_case(own_offsets_kernel(), arguments, [out], eager, variant="int32", tokens=ranks)


def gather_counts_case(tokens: int) -> Case:
    ranks, capacity = MANY_RANKS, MANY_RANKS * tokens
    header = torch.arange(ranks, dtype=torch.int32) * tokens
    counts = torch.tensor([capacity // 2, capacity // 3], dtype=torch.int32)
    ends, per_expert = _ints(ranks), torch.zeros(1, dtype=torch.int64)
    other = per_expert.clone()

    def eager() -> Tensors:
        other.add_(counts[1].clamp(0, capacity))
        return header.clamp(0, capacity), other

    arguments: Arguments = [header, counts, ends, per_expert, ranks, 0, capacity]
    kernel = gather_counts_kernel()
    return make_case(kernel, arguments, [ends, per_expert], eager, variant="int32", tokens=ranks)
