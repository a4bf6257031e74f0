from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch
from moe_triton.errors import ArgumentError
from moe_triton.kernel import TritonKernel
from moe_triton.kernels import offsets, offsets_kernel, route, route_kernel
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


@pytest.mark.parametrize("launch", LAUNCHES)
def test_route_ignores_ids_past_the_last_expert(launch: Launch) -> None:
    topk_idx = torch.tensor([[3, 2**31 - 1], [-(2**31), 3]], dtype=torch.int32)
    expand_idx, counts = route(topk_idx, 4, launch)
    assert expand_idx.tolist() == [0, 0, 0, 1]
    assert counts.tolist() == [0, 0, 0, 2]


@pytest.mark.parametrize("launch", LAUNCHES)
@kernel_settings
@given(data=st.data(), experts=st.integers(1, 9), ranks=st.integers(1, 9), max_count=st.integers(0, 512))
def test_offsets_clamps_what_peers_claim(
    launch: Launch, data: st.DataObject, experts: int, ranks: int, max_count: int
) -> None:
    claims = st.integers(0, max_count) | st.integers(-(2**31), 2**31 - 1)
    counts = data.draw(st.lists(claims, min_size=experts * ranks, max_size=experts * ranks))
    recv_offsets, tokens = offsets(torch.tensor(counts, dtype=torch.int32), experts, max_count, launch)
    clamped = torch.tensor([min(max(count, 0), max_count) for count in counts])
    assert recv_offsets.tolist() == clamped.cumsum(0).tolist()
    assert tokens.tolist() == clamped.view(experts, ranks).sum(1).tolist()
    assert tokens.dtype == torch.int64


@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize("target", ["cpu", "npu"])
@pytest.mark.parametrize(("experts", "ranks"), [(1, 1), (3, 5), (1, 130), (24, 8), (8, 256)])
def test_offsets_forms_agree(target: str, experts: int, ranks: int, programs: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    counts = torch.randint(-5, 600, (experts * ranks,), generator=generator, dtype=torch.int32)
    results = []
    for run, form in ((launch, target), (_fallback, "cpu")):
        recv_offsets = torch.full_like(counts, -7)
        tokens = torch.full((experts,), -7)
        arguments = [counts, recv_offsets, tokens, experts * ranks, experts, 512]
        run(offsets_kernel(form), arguments, programs)
        results.append((recv_offsets.tolist(), tokens.tolist()))
    assert results[0] == results[1]


def _fallback(kernel: TritonKernel, arguments: list[torch.Tensor | int], programs: int) -> None:
    from moe_triton.backends.cpu.triton import launch_fallback

    launch_fallback(kernel, arguments, programs)


def test_route_refuses_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="topk_idx is of dtype"):
        route(torch.zeros((2, 2), dtype=torch.int64), 4, launch)
    with pytest.raises(ArgumentError, match="topk_idx is of shape"):
        route(torch.zeros(4, dtype=torch.int32), 4, launch)
    with pytest.raises(ArgumentError, match="num_experts"):
        route(torch.zeros((2, 2), dtype=torch.int32), 0, launch)
    with pytest.raises(ArgumentError, match="multiple of num_local_experts"):
        offsets(torch.zeros(5, dtype=torch.int32), 2, 8, launch)
