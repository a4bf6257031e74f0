"""Which ranks tokens go to, and which of a rank's experts received rows are for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core.errors import ArgumentError
from moe_triton.kernels.one_per_rank import local_counts_kernel, local_ids_kernel, one_per_rank_kernel
from moe_triton.layout import ORIGIN
from tests.kernels.routes import LAUNCHES, Guarded, Launch, kernel_settings

I32, I64, F32 = torch.int32, torch.int64, torch.float32
NUM_RANKS, TOKENS = 3, 5  # of the tables


@pytest.mark.parametrize("run", LAUNCHES)
@pytest.mark.parametrize(("topk", "takes", "dtype"), [(1, False, I32), (6, True, I64), (8, True, I32)])
@kernel_settings
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 20),
    per_rank=st.integers(1, 5),
    num_ranks=st.integers(1, 9),
    programs=st.integers(1, 4),
)
def test_each_rank_comes_once_and_in_order(
    run: Launch,
    topk: int,
    takes: bool,
    dtype: torch.dtype,
    seed: int,
    tokens: int,
    per_rank: int,
    num_ranks: int,
    programs: int,
) -> None:
    num_experts, generator = per_rank * num_ranks, torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, num_experts + 2, (tokens, topk), generator=generator, dtype=dtype)
    found, copy = Guarded(ids.shape, I32), Guarded(ids.shape, I32)
    first = [ids, copy.tensor] if takes else [ids]
    numbers = [tokens, num_experts, per_rank]
    kernel = one_per_rank_kernel(topk, takes, takes and dtype == I64)
    run(kernel, [*first, found.tensor, *numbers], programs)
    expected = []
    for chosen in ids.tolist():
        ranks = sorted({expert // per_rank for expert in chosen if 0 <= expert < num_experts})
        expected.append([rank * per_rank for rank in ranks] + [-1] * (topk - len(ranks)))
    assert found.check().tolist() == expected
    if takes:
        assert torch.equal(copy.check(), ids.int())


def test_only_ids_that_are_taken_have_64_bits() -> None:
    with pytest.raises(ArgumentError, match="int64 is True"):
        one_per_rank_kernel(2, False, True)


def far(values: list[list[int]], seed: int) -> list[list[int]]:
    """Some origins as no rank writes them."""
    generator = torch.Generator().manual_seed(seed)
    for row in values:
        if torch.rand(1, generator=generator) < 0.2:
            row[:2] = torch.randint(-(2**31), 2**31, (2,), generator=generator).tolist()
    return values


@pytest.mark.parametrize("run", LAUNCHES)
@pytest.mark.parametrize(("zoned", "placed"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("topk", "has_weights"), [(8, True), (6, False), (1, True)])
@kernel_settings
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(-1, 14),
    capacity=st.integers(0, 12),
    programs=st.integers(1, 4),
)
def test_rows_have_the_ids_of_their_tokens(
    run: Launch,
    zoned: bool,
    placed: bool,
    topk: int,
    has_weights: bool,
    seed: int,
    rows: int,
    capacity: int,
    programs: int,
) -> None:
    """Whatever counts, origins and places say, nothing outside the tables is read, or behind rows written."""
    generator = torch.Generator().manual_seed(seed)
    first, number, zone = 4, 3, seed % 2
    tables = torch.randint(-1, 12, (2, NUM_RANKS, 2, TOKENS, topk), generator=generator, dtype=I32)
    tables[:, :, 1] = torch.rand(2, NUM_RANKS, TOKENS, topk, generator=generator).view(I32)
    origins = [
        [int(torch.randint(0, size, (1,), generator=generator)) for size in (NUM_RANKS, TOKENS, topk)]
        for _ in range(max(capacity, 1))
    ]
    origins = far(origins, seed)
    ids, weights = Guarded((capacity, topk), I32), Guarded((capacity, topk), F32)
    before = ids.untouched().clone(), weights.untouched().clone()
    windows = [tables.view(-1)] if zoned else [tables[zone].view(-1)]
    window = windows[0]
    arguments: list[torch.Tensor | int] = [window]
    if has_weights:
        arguments.append(window.view(F32)[TOKENS * topk :])
    arguments += [torch.tensor(origins, dtype=I32), torch.tensor([rows], dtype=I32)]
    places = torch.randperm(capacity + 2, generator=generator)[:capacity].int() - 1
    arguments += [places, ids.tensor] if placed else [ids.tensor]
    arguments += [weights.tensor] if has_weights else []
    arguments += [torch.tensor([zone], dtype=I32)] if zoned else []
    num_places = max(0, capacity - 1)
    arguments += [capacity, num_places] if placed else [capacity]
    arguments += [NUM_RANKS, TOKENS, first, number, 2 * TOKENS * topk]
    arguments += [tables[0].numel()] if zoned else []
    run(local_ids_kernel(topk, has_weights, zoned, placed), arguments, programs)
    want, wanted = before
    for row in range(max(0, min(rows, capacity))):
        source = min(max(origins[row][0], 0), NUM_RANKS - 1)
        token = min(max(origins[row][1], 0), TOKENS - 1)
        local = tables[zone, source, 0, token] - first
        is_local = (local >= 0) & (local < number)
        place = int(places[row]) if placed else row
        if placed and not 0 <= place < num_places:
            continue
        want[place] = torch.where(is_local, local, -1)
        wanted[place] = torch.where(is_local, tables[zone, source, 1, token].view(F32), 0)
    assert torch.equal(ids.check(), want)
    if has_weights:
        assert torch.equal(weights.check().view(I32), wanted.view(I32))
    assert ORIGIN.num_words == 3


@pytest.mark.parametrize("run", LAUNCHES)
@pytest.mark.parametrize(("topk", "has_stats"), [(8, False), (6, True), (1, True)])
@kernel_settings
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(-1, 720),
    experts=st.integers(1, 9),
    programs=st.integers(1, 4),
)
def test_rows_are_counted_for_each_expert(
    run: Launch, topk: int, has_stats: bool, seed: int, rows: int, experts: int, programs: int
) -> None:
    capacity, generator = 700, torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts, (capacity, topk), generator=generator, dtype=I32)
    counts, stats = Guarded((experts,), I64), Guarded((experts,), I32)
    stats.tensor.copy_(torch.arange(experts))
    given = [stats.tensor] if has_stats else []
    arguments = [ids, torch.tensor([rows], dtype=I32), counts.tensor, *given, capacity, experts]
    run(local_counts_kernel(topk, has_stats), arguments, programs)
    there = ids[: max(0, min(rows, capacity))]
    want = torch.tensor([int((there == expert).sum()) for expert in range(experts)])
    assert torch.equal(counts.check(), want)
    assert torch.equal(stats.check(), (torch.arange(experts) + want * has_stats).int())
