from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch
from moe_triton.kernels.route import route_kernel
from tests.kernels.calls import route
from tests.kernels.models import route_model
from tests.kernels.routes import LAUNCHES, Launch, kernel_settings


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


@pytest.mark.parametrize("target", ["cpu", "npu"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_that_are_taken_are_those_that_are_numbered(target: str, dtype: torch.dtype) -> None:
    ids = torch.tensor([2, 3, 1, 0, 2, 1, 0, 1, 0, 3, 3, 2, -1, 2, 2, 0], dtype=dtype)
    outputs = [torch.full((size,), -7, dtype=torch.int32) for size in (len(ids), len(ids), 4)]
    launch(route_kernel(target, True, dtype == torch.int64), [ids, *outputs, len(ids), 4], 2)
    taken, expand_idx, counts = (output.tolist() for output in outputs)
    assert taken == ids.tolist()
    assert (expand_idx, counts) == route_model(taken, 4)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_route_ignores_ids_past_the_last_expert(launch: Launch) -> None:
    topk_idx = torch.tensor([[3, 2**31 - 1], [-(2**31), 3]], dtype=torch.int32)
    expand_idx, counts = route(topk_idx, 4, launch)
    assert expand_idx.tolist() == [0, 0, 0, 1]
    assert counts.tolist() == [0, 0, 0, 2]
