from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels.const_experts import const_alphas_kernel
from moe_triton.reference.arithmetic import exp_of_nonpositive, softmax_of_two, sum_of_row
from tests.kernels.calls import const_alphas
from tests.kernels.routes import (
    DTYPES,
    FORMS,
    LAUNCHES,
    Guarded,
    Launch,
    assert_same_bits,
    kernel_settings,
)

I32 = torch.int32
MONSTERS = [float("nan"), float("inf"), -float("inf")]
STRANGE_IDS = [-(2**31), -1, 2**31 - 1]


def expected(
    x: torch.Tensor, ids: torch.Tensor, alpha1: torch.Tensor, alpha2: torch.Tensor, first_const: int
) -> torch.Tensor:
    alphas = torch.zeros((*ids.shape, 2))
    for t, row in enumerate(ids.tolist()):
        for k, e in enumerate(row):
            c = e - first_const
            if not 0 <= c < len(alpha1):
                continue
            if alpha1.dim() == 1:
                pair = float(alpha1[c]), float(alpha2[c])
            else:
                token = x[t].float().numpy()
                with np.errstate(all="ignore"):
                    products = [alpha[c].float().numpy() * token for alpha in (alpha1, alpha2)]
                pair = softmax_of_two(*(sum_of_row(product) for product in products))
            alphas[t, k] = torch.tensor(np.array(pair, np.float32))
    return alphas


def words_of(alphas: torch.Tensor, kernel: TritonKernel) -> torch.Tensor:
    """Alphas as the kernel takes them: numbers, or their bits."""
    return alphas.view(next(arg.dtype for arg in kernel.args if arg.name == "alphas"))


def draw(
    seed: int,
    tokens: int,
    hidden: int,
    topk: int,
    num_const: int,
    dtype: torch.dtype,
    *,
    per_element: bool,
    first_const: int = 10,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids around those of the constant experts, and both alphas."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn((tokens, hidden), generator=generator) * scale).to(dtype)
    ids = torch.randint(
        first_const - 1, first_const + num_const + 1, (tokens, topk), generator=generator, dtype=I32
    )
    shape = (num_const, hidden) if per_element else (num_const,)
    alpha1, alpha2 = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return x, ids, alpha1, alpha2


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@kernel_settings
@given(
    seed=st.integers(0, 2**31), tokens=st.integers(0, 6) | st.sampled_from([43, 90]),
    num_const=st.integers(1, 4) | st.just(18),
    strange=st.lists(st.sampled_from(STRANGE_IDS), max_size=3), programs=st.integers(1, 4),
)  # fmt: skip
def test_alphas_that_are_numbers(
    launch: Launch,
    target: str,
    dtype: torch.dtype,
    seed: int,
    tokens: int,
    num_const: int,
    strange: list[int],
    programs: int,
) -> None:
    x, ids, alpha1, alpha2 = draw(seed, tokens, 32, 3, num_const, dtype, per_element=False)
    ids.view(-1)[: len(strange)] = torch.tensor(strange, dtype=I32)[: ids.numel()]
    alpha1[0] = float("nan")  # stays with its expert
    alpha2[-1] = -0.0
    alphas = Guarded((tokens, 3, 2), torch.float32)
    kernel = const_alphas_kernel(dtype, 32, 3, False, target)
    arguments = [x, ids, alpha1, alpha2, words_of(alphas.tensor, kernel), 0, tokens, 10, num_const]
    launch(kernel, arguments, programs)
    assert_same_bits(alphas.check(), expected(x, ids, alpha1, alpha2, 10))


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "topk"), [(32, 1), (96, 4), (2880, 2)])
@kernel_settings
@given(
    seed=st.integers(0, 2**31), tokens=st.integers(0, 4), num_const=st.integers(1, 3),
    scale=st.sampled_from([1.0, 0.03, 1e-5, 0.0, 30.0]), programs=st.integers(1, 4),
    monsters=st.lists(st.sampled_from(MONSTERS), max_size=2),
)  # fmt: skip
def test_alphas_of_rows_are_a_softmax(
    launch: Launch,
    dtype: torch.dtype,
    hidden: int,
    topk: int,
    seed: int,
    tokens: int,
    num_const: int,
    scale: float,
    programs: int,
    monsters: list[float],
) -> None:
    x, ids, alpha1, alpha2 = draw(seed, tokens, hidden, topk, num_const, dtype, per_element=True, scale=scale)
    for n, monster in enumerate(monsters[:tokens]):
        x[n, (seed + n) % hidden] = monster
    got = const_alphas(x, ids, alpha1, alpha2, 10, launch, programs=programs)
    assert_same_bits(got, expected(x, ids, alpha1, alpha2, 10))


@settings(kernel_settings, max_examples=8)
@given(
    hidden=st.integers(1, 256).map(lambda n: 32 * n),
    topk=st.integers(1, 16),
    dtype=st.sampled_from(DTYPES),
    per_element=st.booleans(),
)
def test_any_hidden_size_and_topk(hidden: int, topk: int, dtype: torch.dtype, per_element: bool) -> None:
    x, ids, alpha1, alpha2 = draw(hidden, 2, hidden, topk, 2, dtype, per_element=per_element, scale=0.03)
    got = const_alphas(x, ids, alpha1, alpha2, 10, launch)
    assert_same_bits(got, expected(x, ids, alpha1, alpha2, 10))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_logits_alike_and_far_apart(launch: Launch) -> None:
    x = torch.ones((3, 32), dtype=torch.bfloat16)
    ids = torch.tensor([[0], [1], [2]], dtype=I32)
    alpha1 = torch.tensor([1.0, 8.0, -8.0])[:, None].repeat(1, 32).bfloat16()
    alpha2 = torch.tensor([1.0, -8.0, 8.0])[:, None].repeat(1, 32).bfloat16()
    got = const_alphas(x, ids, alpha1, alpha2, 0, launch)
    assert got[:, 0].tolist() == [[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_softmax_is_right_to_fp32s_precision(launch: Launch) -> None:
    """Where a token has a single element that counts, its logits are exact."""
    logits = torch.linspace(-30, 30, 241)
    x = torch.zeros((241, 32), dtype=torch.float16)
    x[:, 5] = logits
    alpha1, alpha2 = torch.ones((1, 32)).half(), torch.zeros((1, 32)).half()
    got = const_alphas(x, torch.zeros((241, 1), dtype=I32), alpha1, alpha2, 0, launch)
    exact = torch.softmax(torch.stack([x[:, 5].double(), torch.zeros(241).double()], 1), 1)
    torch.testing.assert_close(got[:, 0].double(), exact, rtol=4e-7, atol=0)


def test_exp_is_within_one_unit_in_the_last_place() -> None:
    """Of every result, those below the normal numbers included."""
    x = -torch.cat([torch.linspace(0, 105, 200_001), torch.logspace(-9, 0, 20_001)])
    got, exact = exp_of_nonpositive(x.numpy()), np.exp(np.maximum(x.double().numpy(), -104.0))
    unit = np.spacing(np.maximum(exact.astype(np.float32), np.float32(2.0**-126)))
    assert (np.abs(got.astype(np.float64) - exact) <= unit).all()


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_token_leaves_its_neighbours_alone(launch: Launch, dtype: torch.dtype) -> None:
    x, _, alpha1, alpha2 = draw(3, 4, 96, 2, 2, dtype, per_element=True, scale=0.1)
    ids = torch.tensor([[10, 11]] * 4, dtype=I32)
    clean = const_alphas(x, ids, alpha1, alpha2, 10, launch)
    x[1, 7] = float("nan")
    x[2, 8] = float("inf")
    got = const_alphas(x, ids, alpha1, alpha2, 10, launch)
    assert got[1:3].isnan().all()
    assert torch.equal(got[[0, 3]], clean[[0, 3]])
    assert not const_alphas(x, ids - 10, alpha1, alpha2, 10, launch).any()  # no constant expert, no NaN


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("per_element", [False, True])
def test_chunks_write_their_own_tokens_only(launch: Launch, target: str, per_element: bool) -> None:
    x, ids, alpha1, alpha2 = draw(4, 5, 32, 2, 2, torch.float16, per_element=per_element)
    alphas = Guarded((5, 2, 2), torch.float32)
    kernel = const_alphas_kernel(torch.float16, 32, 2, per_element, target)
    launch(kernel, [x, ids, alpha1, alpha2, words_of(alphas.tensor, kernel), 2, 2, 10, 2], 2)
    want = expected(x, ids, alpha1, alpha2, 10)
    torch.testing.assert_close(alphas.check()[2:4], want[2:4], rtol=1e-5, atol=1e-7)
    outside = [0, 1, 4]
    assert_same_bits(alphas.tensor[outside], alphas.untouched()[outside])


def test_the_form_for_the_npu_differs_by_the_order_of_the_sum_only() -> None:
    x, ids, alpha1, alpha2 = draw(5, 6, 2880, 4, 3, torch.bfloat16, per_element=True, scale=0.03)
    alphas = torch.empty((6, 4, 2))
    arguments = [x, ids, alpha1, alpha2, alphas, 0, 6, 10, 3]
    launch(const_alphas_kernel(torch.bfloat16, 2880, 4, True, "npu"), arguments, 2)
    torch.testing.assert_close(alphas, expected(x, ids, alpha1, alpha2, 10), rtol=1e-4, atol=1e-7)


def test_const_experts_refuses_sizes_that_no_kernel_has() -> None:
    with pytest.raises(ArgumentError, match="topk"):
        const_alphas_kernel(torch.bfloat16, 32, 0, False)
    with pytest.raises(ArgumentError, match="hidden"):
        const_alphas_kernel(torch.bfloat16, 40, 1, True)
