from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core.errors import ArgumentError
from moe_triton.kernels.places import places_kernel, starts_kernel
from tests.kernels.calls import places, starts
from tests.kernels.models import starts_model
from tests.kernels.routes import FORMS, LAUNCHES, Guarded, Launch, assert_same_bits, kernel_settings

I32, I64 = torch.int32, torch.int64
WILD = st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 9)

Group = tuple[int, int, int, int]
groups = st.tuples(
    st.integers(0, 3), st.integers(1, 4), st.integers(1, 3) | st.sampled_from([64, 70])
).flatmap(lambda sizes: st.tuples(*map(st.just, sizes), st.integers(0, sizes[0] + sizes[1] - 1)))
"""(R, ranks of routed experts, L, this rank)"""


def run_starts(
    launch: Launch, target: str, table: torch.Tensor, group: Group, max_count: int, gap: int, programs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shared, _, local, rank = group
    num_ranks, num_entries = table.shape
    counts = torch.full((num_ranks, num_entries + gap), 2**30, dtype=I32)
    counts[:, :num_entries] = table
    outputs = Guarded((num_entries,), I32), Guarded((1 if rank < shared else local, num_ranks), I32)
    memory = [output.tensor for output in outputs]
    sizes = [num_ranks, rank, shared, local, num_entries + gap, max_count]
    launch(starts_kernel(target), [counts, *memory, *sizes], programs)
    first, second = (output.check() for output in outputs)
    return first, second


@pytest.mark.parametrize(("launch", "target"), FORMS)
@kernel_settings
@given(
    group=groups,
    seed=st.integers(0, 2**31),
    wild=st.lists(st.tuples(st.integers(0, 2**20), WILD), max_size=4),
    max_count=st.sampled_from([1, 5, 512]),
    gap=st.sampled_from([0, 3]),
    programs=st.integers(1, 5),
)
def test_rows_start_behind_those_of_earlier_entries_and_sources(
    launch: Launch,
    target: str,
    group: Group,
    seed: int,
    wild: list[tuple[int, int]],
    max_count: int,
    gap: int,
    programs: int,
) -> None:
    """Counts that nobody can have sent are clamped where they add up, and handed on as they are."""
    shared, routed, local, rank = group
    shape = (shared + routed, shared + routed * local)
    table = torch.randint(0, max_count + 1, shape, generator=torch.Generator().manual_seed(seed), dtype=I32)
    for at, value in wild:
        table.view(-1)[at % table.numel()] = value
    got, received = run_starts(launch, target, table, group, max_count, gap, programs)
    clamped = table.clamp(0, max_count).tolist()
    assert got.tolist() == starts_model(clamped, rank, shared, local)
    first = rank if rank < shared else shared + (rank - shared) * local
    assert_same_bits(received, table[:, first : first + received.shape[0]].T.contiguous())


class Tokens:
    """A rank's tokens, and what their results' places must be, one by one."""

    def __init__(self, seed: int, num_tokens: int, topk: int, num_shared: int, group: Group) -> None:
        self.shared_ranks, routed, self.local, _ = group
        self.num_experts, self.topk, self.num_shared = routed * self.local, topk, num_shared
        self.generator = torch.Generator().manual_seed(seed)
        self.ids = self.integers(-2, self.num_experts + 2, num_tokens, topk)
        self.expand_idx = self.integers(0, 9, num_tokens, topk)
        self.starts = self.integers(0, 40, self.shared_ranks + self.num_experts)
        self.to = self.integers(0, max(self.shared_ranks, 1), num_tokens, num_shared)
        self.slots = self.integers(0, 9, num_tokens)
        self.peers = torch.randint(-(2**40), 2**40, (self.shared_ranks + routed,), generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=I32)

    def places(self) -> list[list[int]]:
        """(T, K + S)"""
        return [
            [
                int(self.starts[self.shared_ranks + e]) + int(i) if 0 <= e < self.num_experts else -1
                for e, i in zip(ids.tolist(), indices.tolist(), strict=True)
            ]
            + [int(self.starts[rank]) + int(slot) for rank in to.tolist()]
            for ids, indices, to, slot in zip(self.ids, self.expand_idx, self.to, self.slots, strict=True)
        ]

    def offsets(self, capacity: int, hidden: int) -> list[list[int]]:
        """(T, K + S)"""
        table = []
        for ids, to, row in zip(self.ids.tolist(), self.to.tolist(), self.places(), strict=True):
            ranks = [self.shared_ranks + e // self.local for e in ids] + to
            table.append(
                [
                    0 if place < 0 else int(self.peers[rank]) + min(place, capacity - 1) * hidden
                    for rank, place in zip(ranks, row, strict=True)
                ]
            )
        return table


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(("topk", "num_shared"), [(3, 0), (1, 2), (8, 1)])
@kernel_settings
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 9),
    group=groups,
    huge=st.booleans(),
    capacity=st.sampled_from([1, 7, 2**31 - 1]),
    hidden=st.sampled_from([32, 8192]),
    programs=st.integers(1, 4),
)
def test_places(
    launch: Launch,
    topk: int,
    num_shared: int,
    seed: int,
    tokens: int,
    group: Group,
    huge: bool,
    capacity: int,
    hidden: int,
    programs: int,
) -> None:
    if num_shared and not group[0]:
        group = (1, *group[1:])
    case = Tokens(seed, tokens, topk, num_shared, group)
    case.starts += 2**30 * huge  # places of 31 bits, offsets of 44
    outputs = [Guarded((tokens, width), I32) for width in (topk, num_shared)]
    offsets = Guarded((tokens, topk + num_shared), I64)
    shared = [case.to, case.slots] if num_shared else []
    arguments = [case.ids, case.expand_idx, case.starts, *shared, case.peers]
    arguments += [output.tensor for output in outputs if output.tensor.shape[1]]
    sizes = [tokens, case.num_experts, case.shared_ranks, case.local, capacity, hidden]
    launch(places_kernel(topk, num_shared), [*arguments, offsets.tensor, *sizes], programs)
    want = torch.tensor(case.places(), dtype=I64).view(tokens, topk + num_shared)
    assert_same_bits(outputs[0].check(), want[:, :topk].int())
    assert_same_bits(outputs[1].check(), want[:, topk:].int())
    want = torch.tensor(case.offsets(capacity, hidden), dtype=I64).view(tokens, topk + num_shared)
    assert_same_bits(offsets.check(), want)


@pytest.mark.parametrize("launch", LAUNCHES)
@kernel_settings
@given(counts=st.lists(WILD, min_size=3 * 7, max_size=3 * 7), capacity=st.integers(1, 30))
def test_counts_of_peers_never_lead_outside_of_their_results(
    launch: Launch, counts: list[int], capacity: int
) -> None:
    """One shared rank and two of three experts each; whatever the counts say, offsets stay in a window."""
    table = torch.tensor(counts, dtype=I32).view(3, 7)
    ids = torch.arange(6, dtype=I32).view(2, 3)
    to, slots = torch.zeros((2, 1), dtype=I32), torch.tensor([0, 1], dtype=I32)
    first, _ = starts(table, 1, launch, num_shared_ranks=1, max_count=4)
    _, _, offsets = places(
        ids, torch.full((6,), 3, dtype=I32), first, torch.tensor([1000, 0, -1000]), launch,
        num_experts=6, capacity=capacity, hidden=32, num_shared_ranks=1, shared=(to, slots),
    )  # fmt: skip
    bases = torch.tensor([[0, 0, 0, 1000], [-1000, -1000, -1000, 1000]])
    rows = (offsets - bases) / 32
    assert ((rows >= 0) & (rows < capacity) & (rows == rows.floor())).all()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_host_functions(launch: Launch) -> None:
    # rank 0 holds the shared expert, ranks 1 and 2 two experts each
    counts = torch.tensor([[2, 1, 0, 1, 0], [1, 0, 2, 0, 0], [3, 1, 1, 2, 1]], dtype=I32)
    first, received = starts(counts, 2, launch, num_shared_ranks=1, max_count=4, programs=2)
    assert first.tolist() == [3, 1, 4, 1, 3]
    assert received.tolist() == [[1, 0, 2], [0, 0, 1]]
    ids = torch.tensor([[0, 2], [-1, 3], [2, 1]], dtype=I32)
    expand_idx = torch.tensor([0, 0, 0, 0, 1, 0], dtype=I32)
    shared = torch.zeros((3, 1), dtype=I32), torch.arange(3, dtype=I32)
    got, shared_places, offsets = places(
        ids, expand_idx, first, torch.tensor([-500, -300, 0]), launch,
        num_experts=4, capacity=6, hidden=10, num_shared_ranks=1, shared=shared, programs=2,
    )  # fmt: skip
    assert got.tolist() == [[1, 1], [-1, 3], [2, 4]]
    assert shared_places.tolist() == [[3], [4], [5]]
    assert offsets.tolist() == [[-290, 10, -470], [0, 30, -460], [20, -260, -450]]


def test_places_refuses_sizes_that_no_kernel_has() -> None:
    with pytest.raises(ArgumentError, match="topk"):
        places_kernel(0)
