from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch
from moe_triton.core.errors import ArgumentError
from moe_triton.kernels.share import share_kernel
from tests.kernels.calls import share
from tests.kernels.models import shared_piece_model
from tests.kernels.routes import FORMS, LAUNCHES, Guarded, Launch, kernel_settings

I32 = torch.int32
Tables = tuple[list[list[int]], list[int], list[int]]


def run_share(
    launch: Launch, num_tokens: int, experts: int, ranks: int, rank: int, programs: int, **options: object
) -> Tables:
    active_index = options.get("active_index")
    outputs = [Guarded((num_tokens, experts), I32), Guarded((num_tokens,), I32), Guarded((ranks,), I32)]
    memory = [output.tensor for output in outputs]
    by_position = bool(options.get("by_position"))
    kernel = share_kernel(by_position, active_index is not None, str(options["target"]))
    before = [] if active_index is None else [active_index]
    sizes = [num_tokens, ranks, rank] if by_position else [num_tokens, experts, ranks, rank]
    launch(kernel, [*before, *memory, *sizes], programs)
    to, slots, counts = (output.check().tolist() for output in outputs)
    return to, slots, counts


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("masked", [False, True])
@kernel_settings
@given(
    data=st.data(),
    tokens=st.integers(0, 10) | st.integers(60, 140),
    experts=st.integers(1, 4),
    replicas=st.integers(1, 20),
    rank=st.integers(0, 200),
    programs=st.integers(1, 12),
)
def test_v2_sends_every_token_to_one_replica_of_each_expert(
    launch: Launch,
    target: str,
    masked: bool,
    data: st.DataObject,
    tokens: int,
    experts: int,
    replicas: int,
    rank: int,
    programs: int,
) -> None:
    takes_part = [True] * tokens
    if masked:
        takes_part = data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    number, numbers = 0, []
    for part in takes_part:
        numbers.append(number if part else -1)
        number += part
    active_index = torch.tensor(numbers, dtype=I32) if masked else None
    ranks = experts * replicas
    to, slots, counts = run_share(
        launch, tokens, experts, ranks, rank, programs, active_index=active_index, target=target
    )
    chosen = [s * replicas + rank % replicas for s in range(experts)]
    assert to == [chosen if part else [-1] * experts for part in takes_part]
    assert slots == numbers
    assert counts == [number if m in chosen else 0 for m in range(ranks)]


@pytest.mark.parametrize(("launch", "target"), FORMS)
@kernel_settings
@given(
    tokens=st.integers(0, 20) | st.integers(60, 140) | st.just(512),
    ranks=st.integers(1, 40),
    moe_rank=st.integers(0, 300),
    programs=st.integers(1, 4),
)
def test_v1_cuts_a_rank_s_tokens_by_the_published_formula(
    launch: Launch, target: str, tokens: int, ranks: int, moe_rank: int, programs: int
) -> None:
    rank = ranks + moe_rank
    to, slots, counts = run_share(launch, tokens, 1, ranks, rank, programs, by_position=True, target=target)
    want = [shared_piece_model(t, rank, tokens, ranks) for t in range(tokens)]
    assert to == [[m] for m in want]
    assert counts == [want.count(m) for m in range(ranks)]
    assert slots == [want[:t].count(m) for t, m in enumerate(want)]


@pytest.mark.parametrize("tokens", [0, 1, 5, 31, 64])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_v1_gives_every_shared_rank_as_many_rows(tokens: int, ranks: int) -> None:
    for first in (ranks, 2 * ranks, 2 * ranks + 1):
        totals = torch.zeros(ranks, dtype=I32)
        for rank in range(first, first + ranks):
            totals += share(tokens, ranks, rank, launch, by_position=True)[2]
        assert totals.tolist() == [tokens] * ranks


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("rank", [0, 3, 7])
@pytest.mark.parametrize("tokens", [0, 1, 100])
def test_v1_s_shared_ranks_keep_their_own_tokens(launch: Launch, target: str, rank: int, tokens: int) -> None:
    to, slots, counts = run_share(launch, tokens, 1, 8, rank, 3, by_position=True, target=target)
    assert to == [[rank]] * tokens
    assert slots == list(range(tokens))
    assert counts == [tokens if m == rank else 0 for m in range(8)]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_share(launch: Launch) -> None:
    active_index = torch.tensor([0, -1, 1], dtype=I32)
    ranks, slots, counts = share(3, 6, 4, launch, num_shared_experts=2, active_index=active_index, programs=2)
    assert ranks.tolist() == [[1, 4], [-1, -1], [1, 4]]
    assert slots.tolist() == [0, -1, 1]
    assert counts.tolist() == [0, 2, 0, 0, 2, 0]


def test_share_refuses_sizes_that_no_kernel_has() -> None:
    with pytest.raises(ArgumentError, match="masked"):
        share_kernel(True, True)
