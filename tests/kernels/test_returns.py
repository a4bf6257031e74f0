from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch_fallback
from moe_triton.kernels.returns import own_offsets_kernel, returns_kernel
from tests.kernels.calls import own_offsets, returns, returns_shared
from tests.kernels.models import shared_piece_model
from tests.kernels.routes import FORMS, LAUNCHES, Guarded, Launch, assert_same_bits, kernel_settings

I32 = torch.int32
WILD = st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 20)


def prefix_sums(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts, dtype=I32).cumsum(0, dtype=I32)


@pytest.mark.parametrize(("launch", "target"), FORMS)
@kernel_settings
@given(
    data=st.data(),
    ranks=st.integers(1, 6),
    experts=st.integers(1, 4),
    first_expert=st.integers(0, 500),
    most=st.sampled_from([0, 2, 140]),
    spare=st.integers(0, 3),
    programs=st.integers(1, 5),
)
def test_rows_of_routed_experts_go_back_in_order_of_arrival(
    launch: Launch,
    target: str,
    data: st.DataObject,
    ranks: int,
    experts: int,
    first_expert: int,
    most: int,
    spare: int,
    programs: int,
) -> None:
    entries = experts * ranks
    counts = data.draw(st.lists(st.integers(0, most), min_size=entries, max_size=entries))
    want = [
        [source, i, first_expert + expert]
        for expert in range(experts)
        for source in range(ranks)
        for i in range(counts[expert * ranks + source])
    ]
    origins = Guarded((len(want) + spare, 3), I32)
    sizes = [entries, ranks, len(want) + spare, first_expert]
    arguments = [prefix_sums(counts), origins.tensor, *sizes]
    launch(returns_kernel(False, target), arguments, programs)
    assert origins.check()[: len(want)].tolist() == want
    assert_same_bits(origins.check()[len(want) :], origins.untouched()[len(want) :])


@pytest.mark.parametrize(("launch", "target"), FORMS)
@kernel_settings
@given(
    shared_ranks=st.integers(1, 6),
    groups=st.integers(1, 4),
    tokens=st.integers(0, 20) | st.integers(100, 200),
    data=st.data(),
    programs=st.integers(1, 5),
)
def test_rows_of_the_shared_expert_go_back_to_their_tokens(
    launch: Launch,
    target: str,
    shared_ranks: int,
    groups: int,
    tokens: int,
    data: st.DataObject,
    programs: int,
) -> None:
    """Every token that V1's formula sends to this rank, source by source, its own ones first."""
    rank = data.draw(st.integers(0, shared_ranks - 1))
    ranks = shared_ranks * (1 + groups)
    own = [[rank, token, 77] for token in range(tokens)]
    others = [
        [source, token, 77]
        for source in range(shared_ranks, ranks)
        for token in range(tokens)
        if shared_piece_model(token, source, tokens, shared_ranks) == rank
    ]
    counts = [0] * ranks
    for source, _, _ in own + others:
        counts[source] += 1
    true_offsets = prefix_sums(counts)

    reported = Guarded((ranks,), I32)
    arguments = [true_offsets, reported.tensor, ranks, shared_ranks, rank, tokens]
    launch(own_offsets_kernel(target), arguments, programs)
    pieces = [shared_piece_model(token, rank, tokens, shared_ranks) for token in range(tokens)]
    split = [pieces.count(m) for m in range(shared_ranks)]
    assert reported.check().tolist() == prefix_sums(split + counts[shared_ranks:]).tolist()

    capacity = len(own + others)
    for offsets in (reported.tensor, true_offsets):
        origins = Guarded((capacity, 3), I32)
        sizes = [ranks, capacity, rank, tokens, shared_ranks, 77]
        launch(returns_kernel(True, target), [offsets, origins.tensor, *sizes], programs)
        assert origins.check().tolist() == own + others


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("shared", [False, True])
@kernel_settings
@given(offsets=st.lists(WILD, min_size=6, max_size=6), programs=st.integers(1, 3))
@example(offsets=[9, -(2**31), 4, -(2**31), 2**31 - 1, 9], programs=1)
def test_offsets_never_become_rows_outside_the_capacity(
    launch: Launch, target: str, shared: bool, offsets: list[int], programs: int
) -> None:
    capacity, results = 9, []
    for run in (launch, launch_fallback):
        origins = Guarded((capacity, 3), I32)
        sizes = [6, capacity, 1, 8, 2, 77] if shared else [6, 3, capacity, 40]
        arguments = [torch.tensor(offsets, dtype=I32), origins.tensor, *sizes]
        run(returns_kernel(shared, target), arguments, programs)
        results.append(origins.check().tolist())
    assert results[0] == results[1]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_host_functions(launch: Launch) -> None:
    origins = returns(torch.tensor([1, 3, 3, 4], dtype=I32), 2, 5, launch, first_expert=6, programs=2)
    assert origins.tolist() == [[0, 0, 6], [1, 0, 6], [1, 1, 6], [1, 0, 7], [0, 0, 0]]
    # 4 ranks, 2 of them shared, 3 tokens each: rank 2 sends token 0 to rank 0, rank 3 tokens 0 and 1
    offsets = own_offsets(torch.tensor([3, 3, 4, 6], dtype=I32), 2, 0, 3, launch)
    assert offsets.tolist() == [1, 3, 4, 6]
    origins = returns_shared(
        offsets, 6, launch, rank=0, num_tokens=3, num_shared_ranks=2, num_experts=9, programs=3
    )
    assert origins.tolist() == [[0, 0, 9], [0, 1, 9], [0, 2, 9], [2, 0, 9], [3, 0, 9], [3, 1, 9]]
