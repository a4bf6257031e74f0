from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch
from moe_triton.core.errors import ArgumentError
from moe_triton.kernels.add_rows import add_rows_kernel
from tests.kernels.calls import add_rows
from tests.kernels.routes import DTYPES, LAUNCHES, Guarded, Launch, assert_same_bits, kernel_settings

MONSTERS = [float("nan"), float("inf"), -float("inf"), -0.0, 6e-8, 65504.0, 1e-39]


def expected(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    with np.errstate(all="ignore"):
        if rows.dtype == torch.float16:  # has a sum of its own, which a sum in fp32 has to equal
            return torch.from_numpy(rows.numpy() + slots.numpy())
        return torch.from_numpy(rows.float().numpy() + slots.float().numpy()).to(rows.dtype)


def draw(
    seed: int, capacity: int, hidden: int, gap: int, dtype: torch.dtype, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn((capacity, hidden), generator=generator) * scale).to(dtype)
    slots = (torch.randn((capacity, hidden + gap), generator=generator) * scale).to(dtype)
    return rows, slots[:, :hidden]


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [32, 96, 2880])
@kernel_settings
@given(
    seed=st.integers(0, 2**31), capacity=st.integers(0, 7), count=st.integers(-2, 9),
    tp_rank=st.integers(0, 1), gap=st.sampled_from([0, 32]), programs=st.integers(1, 4),
    scale=st.sampled_from([1.0, 1e-6, 3e4]),
    monsters=st.lists(st.tuples(st.sampled_from(MONSTERS), st.sampled_from(MONSTERS)), max_size=2),
)  # fmt: skip
def test_rows_up_to_the_count_are_added(
    launch: Launch,
    dtype: torch.dtype,
    hidden: int,
    seed: int,
    capacity: int,
    count: int,
    tp_rank: int,
    gap: int,
    programs: int,
    scale: float,
    monsters: list[tuple[float, float]],
) -> None:
    # one row more than there is room for: who goes too far is found out there
    rows, slots = draw(seed, capacity + 1, hidden, gap, dtype, scale)
    for n, (mine, theirs) in enumerate(monsters[:capacity]):
        rows[n, (seed + n) % hidden] = mine
        slots[n, (seed + n) % hidden] = theirs
    counts = torch.full((2,), 10**6, dtype=torch.int32)
    counts[tp_rank] = count
    out = Guarded((capacity + 1, hidden), dtype)
    arguments = [rows, slots, counts, out.tensor, tp_rank, capacity, hidden + gap]
    launch(add_rows_kernel(dtype, hidden), arguments, programs)
    written = min(max(count, 0), capacity)
    assert_same_bits(out.check()[:written], expected(rows, slots)[:written])
    assert_same_bits(out.tensor[written:], out.untouched()[written:])


@settings(kernel_settings, max_examples=10)
@given(hidden=st.integers(1, 256).map(lambda n: 32 * n), dtype=st.sampled_from(DTYPES))
def test_any_hidden_size(hidden: int, dtype: torch.dtype) -> None:
    rows, slots = draw(hidden, 3, hidden, 32, dtype)
    out = add_rows(rows, slots, torch.tensor([3, 0], dtype=torch.int32), 0, launch)
    assert_same_bits(out, expected(rows, slots))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_host_function_gives_as_many_rows_as_there_are(launch: Launch) -> None:
    rows, slots = draw(5, 4, 32, 32, torch.bfloat16)
    for count, num_rows in ((0, 0), (2, 2), (4, 4), (9, 4), (-1, 0)):
        out = add_rows(rows, slots, torch.tensor([7, count], dtype=torch.int32), 1, launch, programs=3)
        assert_same_bits(out, expected(rows, slots)[:num_rows])


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_row_leaves_its_neighbours_alone(launch: Launch, dtype: torch.dtype) -> None:
    rows, slots = draw(6, 4, 96, 0, dtype)
    counts = torch.tensor([4, 4], dtype=torch.int32)
    clean = add_rows(rows, slots, counts, 0, launch)
    rows[1] = float("nan")
    slots[2] = float("inf")
    out = add_rows(rows, slots, counts, 0, launch)
    assert out[1].isnan().all()
    assert out[2].isinf().all()
    assert torch.equal(out[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("launch", LAUNCHES)
def test_sums_round_to_nearest_even(launch: Launch) -> None:
    """1 and 1 + 2^-7 are neighbours in bf16: sums half way between go to the even one."""
    pairs = [
        (1.0, 2.0**-8, 1.0),
        (1 + 2.0**-7, 2.0**-8, 1 + 2.0**-6),
        (-1.0, -(2.0**-8), -1.0),
        (3.3895e38, 3.3895e38, float("inf")),
        (1.0, -1.0, 0.0),
    ]
    rows = torch.tensor([mine for mine, _, _ in pairs])[:, None].repeat(1, 32).bfloat16()
    slots = torch.tensor([theirs for _, theirs, _ in pairs])[:, None].repeat(1, 32).bfloat16()
    out = add_rows(rows, slots, torch.tensor([5, 0], dtype=torch.int32), 0, launch)
    assert_same_bits(out[:, 0], torch.tensor([want for _, _, want in pairs]).bfloat16())


def test_add_rows_refuses_sizes_that_no_kernel_has() -> None:
    with pytest.raises(ArgumentError, match="hidden"):
        add_rows_kernel(torch.bfloat16, 33)
    with pytest.raises(ArgumentError, match="dtype"):
        add_rows_kernel(torch.float32, 32)
