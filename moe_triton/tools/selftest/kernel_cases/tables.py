"""Kernels that count, number and name: a few integers per token, no rows."""

from __future__ import annotations

import torch

from moe_triton.core.plan import Hole
from moe_triton.kernels import (
    gather_counts_kernel,
    offsets_kernel,
    own_offsets_kernel,
    places_kernel,
    result_offsets_kernel,
    returns_kernel,
    route_kernel,
    select_kernel,
    share_kernel,
    stamps_kernel,
    starts_kernel,
    turn_kernel,
    waits_of_combine_kernel,
    waits_of_dispatch_kernel,
)
from moe_triton.layout import TRAILER_WORDS
from moe_triton.tools.selftest.kernel_cases.case import (
    NUM_EXPERTS,
    NUM_RANKS,
    TOPK,
    KernelCase,
    blank,
    make_case,
)

I32, I64, F32, I8 = torch.int32, torch.int64, torch.float32, torch.int8
LOCAL = NUM_EXPERTS // NUM_RANKS
SHARED_RANKS, RANK = 2, 3


class Routing:
    """Random routing of one rank, every fourth entry or so of no expert.

    Args:
        seed: of everything.
        tokens: T.
    """

    def __init__(self, seed: int, tokens: int) -> None:
        self.tokens = tokens
        self.generator = torch.Generator().manual_seed(seed)
        popularity = torch.rand(tokens, NUM_EXPERTS, generator=self.generator)
        self.ids = popularity.topk(TOPK, dim=1).indices.int()
        self.ids[torch.rand(tokens, TOPK, generator=self.generator) < 0.25] = -1
        self.expand_idx = self.integers(0, 3, tokens, TOPK)
        self.ends = self.integers(0, 4, LOCAL * NUM_RANKS).cumsum(0, dtype=I32)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = I32) -> torch.Tensor:
        """Uniform integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype)

    def active(self) -> torch.Tensor:
        """(T,) int32: numbers of the tokens that take part, -1 for the others."""
        takes_part = torch.rand(self.tokens, generator=self.generator) < 0.7
        return torch.where(takes_part, takes_part.cumsum(0) - 1, -1).int()


def table_cases(seed: int, tokens: int, target: str) -> list[KernelCase]:
    """Cases whose work does not depend on H."""
    r = Routing(seed, tokens)
    return [*_routing(r, target), *_shared(r, target), *_counts(r, target), *_places(r, target)]


def _routing(r: Routing, target: str) -> list[KernelCase]:
    cases = [
        make_case(
            route_kernel(target),
            "int32",
            topk_idx=r.ids,
            expand_idx=blank(r.tokens * TOPK),
            counts=blank(NUM_EXPERTS),
            num_entries=r.tokens * TOPK,
            num_experts=NUM_EXPERTS,
        )
    ]
    cases += [
        make_case(
            offsets_kernel(target, cumulative),
            "running totals" if cumulative else "counts",
            recv_counts=r.integers(-3, r.tokens + 3, LOCAL * NUM_RANKS),
            recv_offsets=blank(LOCAL * NUM_RANKS),
            tokens_per_expert=blank(LOCAL, dtype=I64),
            trailer=blank(TRAILER_WORDS),
            num_entries=LOCAL * NUM_RANKS,
            num_local_experts=LOCAL,
            max_count=r.tokens,
            capacity=LOCAL * NUM_RANKS * r.tokens // 2,
        )
        for cumulative in (False, True)
    ]
    for per_entry in (False, True):
        shape = (r.tokens, TOPK) if per_entry else (r.tokens,)
        prefix = (torch.arange(r.tokens) < r.tokens * 3 // 4).to(I8)
        cases.append(
            make_case(
                select_kernel(TOPK, per_entry, target),
                "by entry" if per_entry else "by token",
                expert_ids=r.ids,
                mask=r.integers(0, 2, *shape, dtype=I8) if per_entry else prefix,
                topk_idx=blank(r.tokens, TOPK),
                active=blank(r.tokens),
                num_active=blank(1),
                num_tokens=r.tokens,
            )
        )
    return cases


def _shared(r: Routing, target: str) -> list[KernelCase]:
    outputs = {
        "shared_ranks": blank(r.tokens, 2),
        "shared_slots": blank(r.tokens),
        "shared_counts": blank(4),
    }
    sizes = {"num_tokens": r.tokens, "num_shared_ranks": 4, "rank": 6}
    own_offsets = make_case(
        own_offsets_kernel(target),
        "int32",
        recv_offsets=r.ends[:NUM_RANKS].clone(),
        out=blank(NUM_RANKS),
        num_ranks=NUM_RANKS,
        num_shared_ranks=SHARED_RANKS,
        rank=1,
        num_tokens=r.tokens,
    )
    position = {**outputs, "shared_ranks": blank(r.tokens)}
    return [
        make_case(share_kernel(False, False, target), "plain", **outputs, **sizes, num_shared_experts=2),
        make_case(
            share_kernel(False, True, target),
            "masked",
            active=r.active(),
            **outputs,
            **sizes,
            num_shared_experts=2,
        ),
        make_case(share_kernel(True, False, target), "by position", **position, **sizes),
        own_offsets,
    ]


def _counts(r: Routing, target: str) -> list[KernelCase]:
    rows = int(r.ends[-1])
    own = r.tokens  # V1's shared rank: its own tokens first, then those of the other ranks
    shared_ends = torch.tensor([own // 2, own, own + 2, own + 5], dtype=I32)
    common = {"table": torch.randperm(NUM_RANKS, generator=r.generator).int()}
    info = r.integers(0, 500, NUM_RANKS, dtype=I64)
    return [
        make_case(
            returns_kernel(False, target),
            "routed",
            recv_offsets=r.ends,
            triples=blank(rows, 3),
            num_entries=LOCAL * NUM_RANKS,
            num_ranks=NUM_RANKS,
            capacity=rows,
            first_expert=8,
        ),
        make_case(
            returns_kernel(True, target),
            "shared",
            recv_offsets=shared_ends,
            triples=blank(own + 5, 3),
            num_entries=NUM_RANKS,
            capacity=own + 5,
            rank=1,
            num_tokens=own,
            num_shared_ranks=SHARED_RANKS,
            num_experts=NUM_EXPERTS,
        ),
        *[
            make_case(
                gather_counts_kernel(target, zoned),
                "int32",
                header=r.ends[:NUM_RANKS].clone(),
                counts=r.integers(0, 20, 2),
                ep_recv_counts=blank(NUM_RANKS),
                tokens_per_expert=r.integers(0, 9, 1, dtype=I64),
                num_ranks=NUM_RANKS,
                tp_rank=0,
                capacity=15,
            )
            for zoned in (False, True)
        ],
        make_case(turn_kernel(), "int32", zone=torch.zeros(1, dtype=I32)),
        make_case(
            waits_of_dispatch_kernel(target),
            "int64",
            waited=r.integers(0, 1000, LOCAL * NUM_RANKS),
            performance_info=info.clone(),
            **common,
            num_local_experts=LOCAL,
            num_ranks=NUM_RANKS,
            num_table=NUM_RANKS,
        ),
        make_case(
            waits_of_combine_kernel(target),
            "int64",
            waited=r.integers(0, 1000, r.tokens, TOPK),
            topk_idx=r.ids,
            performance_info=info.clone(),
            **common,
            num_tokens=r.tokens,
            topk=TOPK,
            num_experts=NUM_EXPERTS,
            num_local_experts=LOCAL,
            num_shared_experts=0,
            num_shared_ranks=0,
            num_ranks=NUM_RANKS,
            rank=0,
            num_table=NUM_RANKS,
        ),
    ]


def _places(r: Routing, target: str) -> list[KernelCase]:
    routed_ranks = NUM_RANKS - SHARED_RANKS
    local = NUM_EXPERTS // routed_ranks
    entries = SHARED_RANKS + NUM_EXPERTS
    stamps = r.integers(-(2**31), 2**31, r.tokens, 8)
    stamps[:, 3:5] = torch.rand(r.tokens, 2, generator=r.generator).view(I32)
    cases = [
        make_case(
            starts_kernel(target),
            "int32",
            counts=r.integers(-2, r.tokens + 2, NUM_RANKS, entries),
            starts=blank(entries),
            recv_counts=blank(local, NUM_RANKS),
            num_ranks=NUM_RANKS,
            rank=RANK,
            num_shared_ranks=SHARED_RANKS,
            num_local_experts=local,
            count_stride=entries,
            max_count=r.tokens,
        ),
        make_case(
            result_offsets_kernel(TOPK, 1),
            "int64",
            topk_idx=r.ids,
            expand_idx=r.expand_idx,
            recv_offsets=r.ends,
            offsets=blank(r.tokens, TOPK + 1, dtype=I64),
            own_results=2**40,
            token_stride=1000,
            slot_stride=100,
            hidden=64,
            first_expert=LOCAL,
            num_local_experts=LOCAL,
            num_ranks=NUM_RANKS,
            rank=1,
            num_tokens=r.tokens,
        ),
        make_case(
            stamps_kernel(True, True),
            "weights and scales",
            stamps=stamps,
            stamp_floats=Hole("stamps"),
            num_rows=torch.tensor([r.tokens - 1], dtype=I32),
            out_triples=blank(r.tokens, 3),
            out_weights=blank(r.tokens, dtype=F32),
            out_scales=blank(r.tokens, dtype=F32),
            capacity=r.tokens,
        ),
    ]
    for num_shared in (0, 2):
        cases.append(
            make_case(
                places_kernel(TOPK, num_shared),
                f"{num_shared} shared",
                topk_idx=r.ids,
                expand_idx=r.expand_idx,
                starts=r.integers(0, 40, entries),
                shared_ranks=r.integers(0, SHARED_RANKS, r.tokens, num_shared),
                shared_slots=r.integers(0, 9, r.tokens),
                peer_offsets=r.integers(-(2**40), 2**40, NUM_RANKS, dtype=I64),
                places=blank(r.tokens, TOPK),
                shared_places=blank(r.tokens, num_shared),
                offsets=blank(r.tokens, TOPK + num_shared, dtype=I64),
                num_tokens=r.tokens,
                num_experts=NUM_EXPERTS,
                num_shared_ranks=SHARED_RANKS,
                num_local_experts=local,
                capacity=30,
                hidden=64,
            )
        )
    return cases
