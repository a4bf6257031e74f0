from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch
from moe_triton.kernels.route import offsets_kernel, route_kernel
from moe_triton.layout import TRAILER_MARK
from tests.kernels.calls import offsets, route
from tests.kernels.models import route_model
from tests.kernels.routes import FORMS, LAUNCHES, Guarded, Launch, kernel_settings

WORKED_EXAMPLE = "2 3 5 6 9 11 13 16 16 17 18 22 24 27 28 30 31 32 33 34 35 36 39 41 43 44 45 46 47 47 47 50"


@pytest.mark.parametrize("launch", LAUNCHES)
@kernel_settings
@given(data=st.data(), num_experts=st.integers(1, 70), tokens=st.integers(0, 40), topk=st.integers(1, 8))
def test_route_numbers_the_entries_of_each_expert(
    launch: Launch, data: st.DataObject, num_experts: int, tokens: int, topk: int
) -> None:
    some_experts = st.integers(-1, num_experts - 1) | st.just(0)
    ids = data.draw(st.lists(some_experts, min_size=tokens * topk, max_size=tokens * topk))
    topk_idx = torch.tensor(ids, dtype=torch.int32).view(tokens, topk)
    expand_idx, counts = route(topk_idx, num_experts, launch)
    assert (expand_idx.tolist(), counts.tolist()) == route_model(ids, num_experts)


@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize("target", ["cpu", "npu"])
@pytest.mark.parametrize("num_entries", [1, 63, 64, 65, 500])
def test_both_forms_agree_for_any_number_of_programs(target: str, num_entries: int, programs: int) -> None:
    generator = torch.Generator().manual_seed(num_entries)
    ids = torch.randint(-2, 103, (num_entries,), generator=generator, dtype=torch.int32)
    expand_idx = torch.full_like(ids, -7)
    counts = torch.full((100,), -7, dtype=torch.int32)
    launch(route_kernel(target), [ids, expand_idx, counts, num_entries, 100], programs)
    assert (expand_idx.tolist(), counts.tolist()) == route_model(ids.tolist(), 100)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_route_ignores_ids_past_the_last_expert(launch: Launch) -> None:
    topk_idx = torch.tensor([[3, 2**31 - 1], [-(2**31), 3]], dtype=torch.int32)
    expand_idx, counts = route(topk_idx, 4, launch)
    assert expand_idx.tolist() == [0, 0, 0, 1]
    assert counts.tolist() == [0, 0, 0, 2]


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("cumulative", [False, True])
@kernel_settings
@given(data=st.data(), experts=st.integers(1, 9), ranks=st.integers(1, 9), max_count=st.integers(0, 512))
def test_offsets_clamps_what_peers_claim(
    launch: Launch, cumulative: bool, data: st.DataObject, experts: int, ranks: int, max_count: int
) -> None:
    claims = st.integers(0, max_count) | st.integers(-(2**31), 2**31 - 1)
    counts = data.draw(st.lists(claims, min_size=experts * ranks, max_size=experts * ranks))
    received = torch.tensor(counts, dtype=torch.int32)
    recv_offsets, tokens = offsets(received, experts, max_count, launch, cumulative=cumulative)
    clamped = torch.tensor([min(max(count, 0), max_count) for count in counts])
    assert recv_offsets.tolist() == clamped.cumsum(0).tolist()
    per_expert = clamped.view(experts, ranks).sum(1)
    assert tokens.tolist() == (per_expert.cumsum(0) if cumulative else per_expert).tolist()
    assert tokens.dtype == torch.int64


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize(("experts", "ranks"), [(1, 1), (3, 5), (1, 130), (24, 8), (8, 256)])
def test_offsets_never_pass_the_capacity(
    launch: Launch, target: str, cumulative: bool, programs: int, experts: int, ranks: int
) -> None:
    generator = torch.Generator().manual_seed(experts)
    counts = torch.randint(-5, 600, (experts * ranks,), generator=generator, dtype=torch.int32)
    for capacity in (0, 130 * experts * ranks, 512 * experts * ranks):
        recv_offsets = Guarded(counts.shape, torch.int32)
        tokens = Guarded((experts,), torch.int64)
        trailer = Guarded((2,), torch.int32)
        outputs = [recv_offsets.tensor, tokens.tensor, trailer.tensor]
        arguments = [counts, *outputs, experts * ranks, experts, 512, capacity]
        launch(offsets_kernel(target, cumulative), arguments, programs)
        total, ends = 0, []
        for count in counts.tolist():
            total = min(total + min(max(count, 0), 512), capacity)
            ends.append(total)
        totals = ends[ranks - 1 :: ranks]
        per_expert = [after - before for before, after in zip([0, *totals], totals, strict=False)]
        assert recv_offsets.check().tolist() == ends
        assert trailer.check().tolist() == [TRAILER_MARK, ends[-1]]
        assert tokens.check().tolist() == (totals if cumulative else per_expert)


def test_cumulative_counts_of_the_worked_example() -> None:
    """docs/operators.md, "Worked example": rank 0's ep_recv_counts and its expert_token_nums of type 0."""
    ends = [int(n) for n in WORKED_EXAMPLE.split()]
    counts = torch.tensor(ends, dtype=torch.int32).diff(prepend=torch.zeros(1, dtype=torch.int32))
    recv_offsets, tokens = offsets(counts, 16, 48, launch, cumulative=True)
    assert recv_offsets.tolist() == ends
    assert tokens.tolist() == [3, 6, 11, 16, 17, 22, 27, 30, 32, 34, 36, 41, 44, 46, 47, 50]
