from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch
from moe_triton.core.errors import ArgumentError
from moe_triton.kernels.rms_norm import rms_norm_kernel
from tests.kernels.calls import rms_norm
from tests.kernels.models import rms_norm_sum_model
from tests.kernels.routes import LAUNCHES, Guarded, Launch, assert_same_bits, kernel_settings

BF16 = torch.bfloat16
MONSTERS = [float("nan"), float("inf"), -float("inf"), 3e38, 1e-44]


def expected(
    acc: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, x = torch.empty_like(residual), torch.empty_like(residual)
    rstd = torch.empty(len(acc))
    for t in range(len(acc)):
        row, inverse = rms_norm_sum_model(acc[t].numpy(), residual[t].float().numpy(), eps)
        with np.errstate(all="ignore"):
            normed = torch.from_numpy(row * inverse).to(BF16)
        y[t] = (normed.float() * gamma.float()).to(BF16)
        x[t] = torch.from_numpy(row).to(BF16)
        rstd[t] = float(inverse)
    return y, rstd, x


def draw(
    seed: int, tokens: int, hidden: int, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    acc = torch.randn((tokens, hidden), generator=generator) * scale
    residual = (torch.randn((tokens, hidden), generator=generator) * scale).to(BF16)
    return acc, residual, torch.randn(hidden, generator=generator).to(BF16)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("hidden", [32, 96, 2880])
@kernel_settings
@given(
    seed=st.integers(0, 2**31), tokens=st.integers(0, 6), programs=st.integers(1, 4),
    scale=st.sampled_from([1.0, 1e-3, 1e-20, 1e4, 1e20]), eps=st.sampled_from([1e-6, 1e-5, 0.5]),
    monsters=st.lists(st.sampled_from(MONSTERS), max_size=2),
)  # fmt: skip
def test_rms_norm(
    launch: Launch,
    hidden: int,
    seed: int,
    tokens: int,
    programs: int,
    scale: float,
    eps: float,
    monsters: list[float],
) -> None:
    acc, residual, gamma = draw(seed, tokens, hidden, scale)
    for n, monster in enumerate(monsters[:tokens]):
        acc.view(-1)[(seed + 977 * n) % acc.numel()] = monster
    got = rms_norm(acc, residual, gamma, launch, norm_eps=eps, programs=programs)
    for output, want in zip(got, expected(acc, residual, gamma, eps), strict=True):
        assert_same_bits(output, want)


@settings(kernel_settings, max_examples=10)
@given(hidden=st.integers(1, 256).map(lambda n: 32 * n))
def test_any_hidden_size(hidden: int) -> None:
    acc, residual, gamma = draw(hidden, 2, hidden)
    got = rms_norm(acc, residual, gamma, launch)
    for output, want in zip(got, expected(acc, residual, gamma, 1e-6), strict=True):
        assert_same_bits(output, want)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_row_of_zeros_has_the_scale_of_eps(launch: Launch) -> None:
    zeros = torch.zeros((1, 32))
    y, rstd, x = rms_norm(zeros, zeros.to(BF16), torch.ones(32, dtype=BF16), launch, norm_eps=0.25)
    assert rstd.tolist() == [2.0]
    assert not y.any()
    assert not x.any()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_rows_are_normed_before_they_are_rounded(launch: Launch) -> None:
    """y is of the sum, not of x, and is rounded before gamma and after it."""
    acc, residual, gamma = draw(8, 1, 2880)
    y, rstd, x = rms_norm(acc, residual, gamma, launch)
    total, factor = acc + residual.float(), gamma.float()
    assert_same_bits(y, ((total * rstd).to(BF16).float() * factor).to(BF16))
    assert not torch.equal(y, ((x.float() * rstd).to(BF16).float() * factor).to(BF16))
    assert not torch.equal(y, (total * rstd * factor).to(BF16))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_bad_token_leaves_its_neighbours_alone(launch: Launch) -> None:
    acc, residual, gamma = draw(1, 4, 96)
    clean = rms_norm(acc, residual, gamma, launch)
    acc[1, 7] = float("nan")
    residual[2, 8] = -float("inf")
    y, rstd, x = rms_norm(acc, residual, gamma, launch)
    for output, before in zip((y, rstd, x), clean, strict=True):
        assert torch.equal(output[[0, 3]], before[[0, 3]])
    assert y[1].isnan().all()
    assert rstd[1].isnan()
    assert rstd[2] == 0
    assert x[1].isnan().tolist() == [column == 7 for column in range(96)]


@pytest.mark.parametrize("launch", LAUNCHES)
@kernel_settings
@given(
    seed=st.integers(0, 2**31),
    active_index=st.lists(st.sampled_from([-1, 0, 3, -(2**31)]), max_size=7),
    before=st.integers(0, 3),
    programs=st.integers(1, 4),
)
def test_tokens_that_take_no_part_get_zeros(
    launch: Launch, seed: int, active_index: list[int], before: int, programs: int
) -> None:
    tokens = before + len(active_index)
    acc, residual, gamma = draw(seed, tokens, 96)
    numbers = torch.tensor([0] * before + active_index, dtype=torch.int32)
    y, rstd, x = Guarded((tokens, 96), BF16), Guarded((tokens,), torch.float32), Guarded((tokens, 96), BF16)
    outputs = [output.tensor for output in (y, rstd, x)]
    arguments = [acc, residual, gamma, numbers, torch.tensor([1e-6]), *outputs, before, len(active_index)]
    launch(rms_norm_kernel(96, masked=True), arguments, programs)
    for output, want in zip((y, rstd, x), expected(acc, residual, gamma, 1e-6), strict=True):
        want[numbers < 0] = 0
        assert_same_bits(output.check()[before:], want[before:])
        assert_same_bits(output.tensor[:before], output.untouched()[:before])


@pytest.mark.parametrize("launch", LAUNCHES)
def test_chunks_write_their_own_tokens_only(launch: Launch) -> None:
    acc, residual, gamma = draw(2, 5, 32)
    y, rstd, x = Guarded((5, 32), BF16), Guarded((5,), torch.float32), Guarded((5, 32), BF16)
    outputs = [output.tensor for output in (y, rstd, x)]
    launch(rms_norm_kernel(32), [acc, residual, gamma, torch.tensor([1e-6]), *outputs, 2, 2], 2)
    for output, want in zip((y, rstd, x), expected(acc, residual, gamma, 1e-6), strict=True):
        assert_same_bits(output.check()[2:4], want[2:4])
        outside = [0, 1, 4]
        assert_same_bits(output.tensor[outside], output.untouched()[outside])


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("zone", [0, 1])
@pytest.mark.parametrize("tokens", [0, 3])
def test_the_last_launch_of_an_operator_turns_its_zone(launch: Launch, zone: int, tokens: int) -> None:
    acc, residual, gamma = draw(4, tokens, 32)
    y, rstd, x = torch.empty_like(residual), torch.empty(tokens), torch.empty_like(residual)
    turned = Guarded((1,), torch.int32)
    cells = [torch.tensor([zone], dtype=torch.int32), turned.tensor]
    inputs = [acc, residual, gamma, torch.tensor([1e-6])]
    launch(rms_norm_kernel(32, turns=True), [*inputs, y, rstd, x, *cells, 0, tokens], 4)
    assert turned.check().tolist() == [1 - zone]
    for output, want in zip((y, rstd, x), expected(acc, residual, gamma, 1e-6), strict=True):
        assert_same_bits(output, want)


def test_the_form_for_the_npu_differs_by_the_order_of_the_sum_only() -> None:
    acc, residual, gamma = draw(3, 6, 2880)
    y, x, rstd = torch.empty((6, 2880), dtype=BF16), torch.empty((6, 2880), dtype=BF16), torch.empty(6)
    launch(rms_norm_kernel(2880, "npu"), [acc, residual, gamma, torch.tensor([1e-6]), y, rstd, x, 0, 6], 2)
    total = acc + residual.float()
    exact = 1 / (total.double().square().mean(1) + 1e-6).sqrt()
    torch.testing.assert_close(rstd.double(), exact, rtol=1e-5, atol=0)
    assert_same_bits(x, total.to(BF16))
    assert_same_bits(y, ((total * rstd[:, None]).to(BF16).float() * gamma.float()).to(BF16))


def test_rms_norm_refuses_sizes_that_no_kernel_has() -> None:
    with pytest.raises(ArgumentError, match="hidden"):
        rms_norm_kernel(40)
