from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch
from moe_triton.kernels.weighted_sum import weighted_sum_kernel
from tests.kernels.calls import weighted_sum
from tests.kernels.models import weighted_sum_model
from tests.kernels.routes import DTYPES, LAUNCHES, Launch, assert_same_bits, kernel_settings


def expected(
    slots: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor | None, topk: int
) -> torch.Tensor:
    rows = [
        weighted_sum_model(
            slots[t].float().numpy(),
            topk_idx[t].numpy(),
            None if weights is None else weights[t].numpy(),
            topk,
        )
        for t in range(slots.shape[0])
    ]
    return torch.from_numpy(np.array(rows)).to(slots.dtype)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("hidden", "topk", "num_shared", "has_weights"),
    [(32, 1, 0, True), (96, 8, 0, True), (2880, 3, 2, True), (32, 2, 1, False)],
)
@kernel_settings
@given(
    seed=st.integers(0, 2**31), tokens=st.integers(1, 6), scale=st.sampled_from([1.0, 1e-30, 1e4, 1e38]),
    programs=st.integers(1, 4), gap=st.sampled_from([0, 32]), monsters=st.integers(0, 3),
)  # fmt: skip
def test_weighted_sum(
    launch: Launch,
    dtype: torch.dtype,
    hidden: int,
    topk: int,
    num_shared: int,
    has_weights: bool,
    seed: int,
    tokens: int,
    scale: float,
    programs: int,
    gap: int,
    monsters: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spaced = torch.randn((tokens, topk + num_shared, hidden + gap), generator=generator) * scale
    for n in range(monsters):
        at = torch.randint(0, spaced.numel(), (1,), generator=generator)
        spaced.view(-1)[at] = [float("nan"), float("inf"), -float("inf")][n]
    slots = spaced.to(dtype)[:, :, :hidden]
    topk_idx = torch.randint(-1, 4, (tokens, topk), generator=generator, dtype=torch.int32)
    weights = torch.rand((tokens, topk), generator=generator) if has_weights else None
    got = weighted_sum(slots, topk_idx, weights, launch, programs=programs)
    assert_same_bits(got, expected(slots, topk_idx, weights, topk))


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unrouted_entries_add_nothing_whatever_they_hold(launch: Launch, dtype: torch.dtype) -> None:
    slots = torch.full((2, 3, 32), float("nan"), dtype=dtype)
    weights = torch.full((2, 3), float("inf"))
    slots[0, 1], weights[0, 1] = 2.0, 0.5
    topk_idx = torch.tensor([[-1, 7, -1], [-1, -1, -1]], dtype=torch.int32)
    out = weighted_sum(slots, topk_idx, weights, launch)
    assert_same_bits(out, torch.tensor([[1.0] * 32, [0.0] * 32], dtype=dtype))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_product_and_sum_are_rounded_apart(launch: Launch) -> None:
    """A fused multiply-add would keep the product's low bits, and here they decide the result."""
    value = torch.tensor(1.0 + 2.0**-7)
    slots = torch.empty((1, 2, 32), dtype=torch.bfloat16)
    slots[0, 0], slots[0, 1] = -value, value
    for low in range(1, 64):
        weight = torch.tensor(1.0) + low * 2.0**-23
        weights = torch.tensor([[1.0, float(weight)]])
        out = weighted_sum(slots, torch.zeros((1, 2), dtype=torch.int32), weights, launch)
        want = (value * weight - value).bfloat16()
        assert_same_bits(out[0], want.expand(32).contiguous())


@settings(kernel_settings, max_examples=10)
@given(
    hidden=st.integers(1, 256).map(lambda n: 32 * n),
    topk=st.integers(1, 16),
    num_shared=st.integers(0, 2),
    dtype=st.sampled_from(DTYPES),
)
def test_any_hidden_size_and_topk(hidden: int, topk: int, num_shared: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(hidden)
    slots = torch.randn((2, topk + num_shared, hidden), generator=generator).to(dtype)
    topk_idx = torch.randint(-1, 4, (2, topk), generator=generator, dtype=torch.int32)
    weights = torch.rand((2, topk), generator=generator)
    got = weighted_sum(slots, topk_idx, weights, launch)
    assert_same_bits(got, expected(slots, topk_idx, weights, topk))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_bfloat16_rounds_ties_to_even_and_overflows_to_infinity(launch: Launch) -> None:
    halves = torch.tensor(
        [1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 3.3961e38, -3.3961e38, 2.0**-134] + [0.0] * 26
    )
    slots = torch.ones((1, 1, 32), dtype=torch.bfloat16)
    for column in range(6):
        out = weighted_sum(slots, torch.zeros((1, 1), dtype=torch.int32), halves[None, column, None], launch)
        assert_same_bits(out[0], halves[column].bfloat16().expand(32).contiguous())


@pytest.mark.parametrize("launch", LAUNCHES)
def test_chunks_write_their_own_tokens_only(launch: Launch) -> None:
    slots = torch.randn((5, 2, 32)).half()
    ids, weights = torch.zeros((5, 2), dtype=torch.int32), torch.rand((5, 2))
    whole = weighted_sum(slots, ids, weights, launch)
    out = torch.full_like(whole, 9.0)
    launch(weighted_sum_kernel(torch.float16, 32, 2), [slots, ids, weights, out, 64, 32, 2, 2, 8], 1)
    assert torch.equal(out[2:4], whole[2:4])
    assert (out[:2] == 9).all()
    assert (out[4:] == 9).all()


def test_the_rolled_form_for_the_npu_agrees() -> None:
    slots = torch.randn((6, 9, 96)).bfloat16()
    ids = torch.randint(-1, 3, (6, 8), dtype=torch.int32)
    weights = torch.rand((6, 8))
    out = torch.empty((6, 96), dtype=torch.bfloat16)
    kernel = weighted_sum_kernel(torch.bfloat16, 96, 8, 1, target="npu")
    launch(kernel, [slots, ids, weights, out, 9 * 96, 96, 0, 6, 10**6], 4)
    assert_same_bits(out, expected(slots, ids, weights, 8))
