from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core.errors import ArgumentError
from moe_triton.kernels.select import select_kernel
from tests.kernels.calls import select
from tests.kernels.models import select_model
from tests.kernels.routes import FORMS, LAUNCHES, Guarded, Launch, kernel_settings

I32 = torch.int32


def run_select(
    launch: Launch, target: str, ids: torch.Tensor, mask: torch.Tensor, programs: int
) -> tuple[list[list[int]], list[int], int]:
    num_tokens, topk = ids.shape
    topk_idx, active_index, num_active = (
        Guarded(ids.shape, I32),
        Guarded((num_tokens,), I32),
        Guarded((1,), I32),
    )
    kernel = select_kernel(topk, mask.dim() == 2, target, ids.dtype == torch.int64)
    outputs = [topk_idx, active_index, num_active]
    arguments = [ids, mask.view(torch.int8), *(output.tensor for output in outputs), num_tokens]
    launch(kernel, arguments, programs)
    return topk_idx.check().tolist(), active_index.check().tolist(), int(num_active.check())


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("topk", [1, 6, 8])
@kernel_settings
@given(
    data=st.data(),
    tokens=st.integers(0, 12) | st.integers(60, 140),
    first_false=st.integers(0, 150),
    programs=st.integers(1, 4),
)
def test_a_mask_of_tokens_ends_at_its_first_false(
    launch: Launch,
    target: str,
    topk: int,
    data: st.DataObject,
    tokens: int,
    first_false: int,
    programs: int,
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    ids = torch.randint(-1, 99, (tokens, topk), generator=generator, dtype=I32)
    mask = torch.rand(tokens, generator=generator) < 0.8
    mask[:first_false] = True
    mask[first_false : first_false + 1] = False
    topk_idx, active_index, num_active = run_select(launch, target, ids, mask, programs)
    assert (topk_idx, active_index) == select_model(ids.tolist(), mask.tolist())
    assert num_active == min(first_false, tokens)


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("topk", [1, 6, 8])
@kernel_settings
@given(
    data=st.data(),
    tokens=st.integers(0, 12) | st.integers(60, 140),
    density=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    programs=st.integers(1, 4),
)
def test_a_mask_of_entries_numbers_tokens_with_any(
    launch: Launch,
    target: str,
    topk: int,
    data: st.DataObject,
    tokens: int,
    density: float,
    programs: int,
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    ids = torch.randint(-1, 99, (tokens, topk), generator=generator, dtype=I32)
    mask = torch.rand((tokens, topk), generator=generator) < density
    topk_idx, active_index, num_active = run_select(launch, target, ids, mask, programs)
    assert (topk_idx, active_index) == select_model(ids.tolist(), mask.tolist())
    assert num_active == int(mask.any(1).sum())


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("shape", [(3,), (3, 2)])
def test_any_byte_but_zero_is_true(launch: Launch, target: str, shape: tuple[int, ...]) -> None:
    mask = torch.full(shape, -128, dtype=torch.int8)
    topk_idx, active_index, num_active = run_select(launch, target, torch.ones((3, 2), dtype=I32), mask, 1)
    assert (topk_idx, active_index, num_active) == ([[1, 1]] * 3, [0, 1, 2], 3)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_select(launch: Launch) -> None:
    ids = torch.tensor([[4, 5], [6, 7], [8, 9]], dtype=I32)
    topk_idx, active_index, num_active = select(ids, torch.tensor([True, False, True]), launch)
    assert topk_idx.tolist() == [[4, 5], [-1, -1], [-1, -1]]
    assert active_index.tolist() == [0, -1, -1]
    assert num_active == 1
    mask = torch.tensor([[False, True], [False, False], [True, True]])
    topk_idx, active_index, num_active = select(ids, mask, launch)
    assert topk_idx.tolist() == [[-1, 5], [-1, -1], [8, 9]]
    assert active_index.tolist() == [0, -1, 1]
    assert num_active == 2


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("per_entry", [False, True])
def test_select_takes_int64(launch: Launch, target: str, per_entry: bool) -> None:
    """As a plan of an NPU has them: what is beyond any expert is none, whatever its low half."""
    given = torch.tensor([[3, 2**32 + 3], [-(2**40), 2**24], [2**24 - 1, -1], [7, 8]])
    mask = torch.tensor([True, True, True, False])
    mask = mask[:, None].expand(4, 2).contiguous() if per_entry else mask
    topk_idx, active_index, num_active = run_select(launch, target, given, mask, 2)
    assert topk_idx == [[3, -1], [-1, -1], [2**24 - 1, -1], [-1, -1]]
    assert (active_index, num_active) == ([0, 1, 2, -1], 3)


def test_select_refuses_sizes_that_no_kernel_has() -> None:
    with pytest.raises(ArgumentError, match="topk"):
        select_kernel(0, False)
