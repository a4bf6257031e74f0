from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch
from moe_triton.kernels.block_places import block_places_kernel
from tests.kernels.routes import LAUNCHES, Launch, kernel_settings

BLOCK, ROW = 100_000, 32


def model(ids: list[int], per_rank: int, num_ranks: int) -> tuple[list[int], list[int]]:
    """Each result's offset, and each rank's rows, one by one."""
    blocks: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for i, expert in enumerate(ids):
        if 0 <= expert < per_rank * num_ranks:
            blocks[expert // per_rank].append((expert, i))
    offsets = [0] * len(ids)
    for rank, block in enumerate(blocks):
        for place, (_, i) in enumerate(sorted(block)):
            offsets[i] = rank * BLOCK + place * ROW
    return offsets, [len(block) for block in blocks]


def places(
    ids: list[int], per_rank: int, num_ranks: int, target: str, run: Launch, programs: int = 1
) -> tuple[list[int], list[int]]:
    kernel = block_places_kernel(target)
    offsets = torch.full((len(ids),), -7, dtype=torch.int64)
    expected = torch.full((num_ranks,), -7, dtype=torch.int32)
    counts = [torch.full((per_rank * num_ranks,), -7, dtype=torch.int32)] if target == "cpu" else []
    numbers = [len(ids), per_rank * num_ranks, per_rank, num_ranks, BLOCK, ROW]
    run(kernel, [torch.tensor(ids, dtype=torch.int32), *counts, offsets, expected, *numbers], programs)
    return offsets.tolist(), expected.tolist()


@pytest.mark.parametrize("target", ["cpu", "npu"])
@pytest.mark.parametrize("run", LAUNCHES)
@kernel_settings
@given(data=st.data(), per_rank=st.integers(1, 9), num_ranks=st.integers(1, 9), entries=st.integers(0, 80))
def test_results_lie_by_rank_then_expert_then_entry(
    run: Launch, target: str, data: st.DataObject, per_rank: int, num_ranks: int, entries: int
) -> None:
    some = st.integers(-1, per_rank * num_ranks + 1)
    ids = data.draw(st.lists(some, min_size=entries, max_size=entries))
    assert places(ids, per_rank, num_ranks, target, run) == model(ids, per_rank, num_ranks)


@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize("target", ["cpu", "npu"])
@pytest.mark.parametrize(("per_rank", "num_ranks"), [(1, 384), (24, 8), (7, 33), (512, 2)])
def test_any_number_of_programs_finds_the_same(
    target: str, per_rank: int, num_ranks: int, programs: int
) -> None:
    generator = torch.Generator().manual_seed(per_rank)
    ids = torch.randint(-2, per_rank * num_ranks + 3, (500,), generator=generator, dtype=torch.int32).tolist()
    found = places(ids, per_rank, num_ranks, target, launch, programs)
    assert found == model(ids, per_rank, num_ranks)
