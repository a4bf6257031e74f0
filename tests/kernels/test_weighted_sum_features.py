"""Each feature of a weighted sum, and useful combinations of them."""

from __future__ import annotations

import ctypes
import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch, load
from moe_triton.core.errors import ArgumentError
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum_kernel
from tests.kernels.routes import DTYPES, FORMS, Launch, assert_same_bits, kernel_settings
from tests.kernels.weighted_sum_case import NUM_EXPERTS, Case

FEATURES = [
    SumFeatures(masked=True),
    SumFeatures(masked=True, clears=True),
    SumFeatures(shared_x=True),
    SumFeatures(special=True),
    SumFeatures(quantized=True),
    SumFeatures(by_expert=True),
    SumFeatures(by_offset=True),
    SumFeatures(fp32_out=True),
    SumFeatures(masked=True, shared_x=True, special=True),
    SumFeatures(special=True, quantized=True),
    SumFeatures(masked=True, special=True, by_expert=True),
    SumFeatures(by_expert=True, fp32_out=True, shared_x=True),
    SumFeatures(quantized=True, by_expert=True),
    SumFeatures(masked=True, shared_x=True, special=True, quantized=True, fp32_out=True),
    SumFeatures(masked=True, shared_x=True, special=True, by_offset=True, fp32_out=True),
    SumFeatures(True, True, True, True, by_expert=True, fp32_out=True),
    SumFeatures(own=True),
    SumFeatures(masked=True, shared_x=True, special=True, own=True, fp32_out=True),
    SumFeatures(listed=True),
    SumFeatures(own=True, listed=True, masked=True, clears=True),
    SumFeatures(True, True, True, quantized=True, listed=True, turns=True, clears=True),
    SumFeatures(turns=True),
    SumFeatures(masked=True, clears=True, shared_x=True, special=True, turns=True),
]


def names_of(features: SumFeatures) -> str:
    return "-".join(name for name, is_on in dataclasses.asdict(features).items() if is_on) or "plain"


def with_forms(*features: SumFeatures) -> pytest.MarkDecorator:
    """Each of them in each form that a CPU can run.

    The quantised form for the NPU is none: its loop would yield a reshaped buffer, a new one in each turn.
    """
    return pytest.mark.parametrize(
        ("launch", "target", "features"),
        [
            pytest.param(*form.values, chosen, id=f"{form.id}-{names_of(chosen)}")
            for form in FORMS
            for chosen in features
            if not (chosen.quantized and form.values[1] == "npu")
        ],
    )


@with_forms(*FEATURES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(kernel_settings, max_examples=12)
@given(
    seed=st.integers(0, 2**31), tokens=st.integers(0, 7), chunk=st.tuples(*[st.integers(0, 7)] * 2),
    programs=st.integers(1, 8), gap=st.sampled_from([0, 32]),
    special=st.sampled_from([(2, 1, 2), (0, 2, 1), (1, 0, 3), (0, 0, 2), (0, 2, 0), (3, 0, 0)]),
)  # fmt: skip
def test_features(
    launch: Launch,
    target: str,
    dtype: torch.dtype,
    features: SumFeatures,
    seed: int,
    tokens: int,
    chunk: tuple[int, int],
    programs: int,
    gap: int,
    special: tuple[int, int, int],
) -> None:
    hidden = 128 if target == "npu" else 96  # two programs may share a token: a half is a multiple of 32
    case = Case(features, dtype, hidden, 4, 1, True, seed, tokens, special, gap)
    first_token = min(chunk[0], tokens)
    case.check(launch, target, programs, first_token, min(chunk[1], tokens - first_token))


@with_forms(
    SumFeatures(special=True),
    SumFeatures(quantized=True),
    SumFeatures(by_expert=True),
    SumFeatures(by_offset=True),
    SumFeatures(own=True),
)
def test_features_without_weights_and_shared_experts(
    launch: Launch, target: str, features: SumFeatures
) -> None:
    for seed in range(6):
        Case(features, torch.bfloat16, 32, 3, 0, False, seed, 6).check(launch, target, 2, 0, 6)


@with_forms(
    SumFeatures(),
    SumFeatures(special=True, quantized=True),
    SumFeatures(by_offset=True),
    SumFeatures(own=True),
)
def test_several_shared_experts(launch: Launch, target: str, features: SumFeatures) -> None:
    for seed in range(6):
        Case(features, torch.float16, 32, 2, 4, True, seed, 6).check(launch, target, 3, 0, 6)


@settings(kernel_settings, max_examples=8)
@given(
    hidden=st.integers(1, 256).map(lambda n: 32 * n),
    topk=st.integers(1, 16),
    dtype=st.sampled_from(DTYPES),
    features=st.sampled_from(FEATURES),
)
def test_any_hidden_size_and_topk(hidden: int, topk: int, dtype: torch.dtype, features: SumFeatures) -> None:
    Case(features, dtype, hidden, topk, 1, True, hidden, 2).check(launch, "cpu", 1, 0, 2)


@with_forms(
    SumFeatures(), SumFeatures(special=True), SumFeatures(by_expert=True), SumFeatures(by_offset=True)
)
def test_ids_of_no_expert_add_nothing(launch: Launch, target: str, features: SumFeatures) -> None:
    """Nor do they lead outside the slots."""
    case = Case(features, torch.bfloat16, 32, 4, 1, True, 1, 2)
    case.ids[0] = torch.tensor([2**31 - 1, -(2**31), NUM_EXPERTS + sum(case.special), -1])
    case.check(launch, target, 1, 0, 2)
    assert_same_bits(case.expected()[0], case.values[case.where(0, 4)].to(torch.bfloat16))


@pytest.mark.parametrize(("launch", "target"), FORMS)
def test_a_constant_expert_rounds_three_times(launch: Launch, target: str) -> None:
    """Fused, a1 * x + a2 * v would keep the low bits of a product, and here they are all that is left."""
    case = Case(SumFeatures(special=True, fp32_out=True), torch.bfloat16, 32, 1, 0, False, 2, 60)
    case.ids[:] = NUM_EXPERTS + 3
    case.ori_x[:] = 1 + 2.0**-7
    case.const_v[:] = -1.0
    case.alphas[:, 0, 0] = 1 + torch.arange(1.0, 61) * 2.0**-23
    case.alphas[:, 0, 1] = case.alphas[:, 0, 0] * (1 + 2.0**-7)
    assert not case.expected().any()
    case.check(launch, target, 2, 0, 60)


@pytest.mark.parametrize("counts", [(2, 0, 0), (1, 2, 0)])
@pytest.mark.parametrize("target", ["cpu", "npu"])
def test_what_no_id_leads_to_is_not_read(counts: tuple[int, int, int], target: str) -> None:
    """Null addresses stand for the tensors that zero and copy experts have no use for."""
    case = Case(SumFeatures(special=True), torch.bfloat16, 32, 3, 0, True, 3, 5, special=counts)
    out = torch.empty((5, 32), dtype=torch.bfloat16)
    arguments = case.arguments(out, 0, 5)
    null = {"alphas", "const_v"} | (set() if counts[1] else {"ori_x"})
    kernel = case.kernel(target)
    words = [
        0 if arg.name in null else value.data_ptr() if isinstance(value, torch.Tensor) else value
        for arg, value in zip(kernel.args, arguments, strict=True)
    ]
    load(kernel).function((ctypes.c_uint64 * len(words))(*words), 1, 0)
    assert_same_bits(out, case.expected())


@with_forms(SumFeatures(special=True), SumFeatures(masked=True, special=True, by_expert=True))
@pytest.mark.parametrize("weight", [math.inf, -math.inf, math.nan])
def test_a_zero_expert_adds_nothing_whatever_its_weight(
    launch: Launch, target: str, features: SumFeatures, weight: float
) -> None:
    case = Case(features, torch.bfloat16, 32, 4, 1, True, 6, 3)
    case.active_index[:] = 0
    zero, copy, constant = NUM_EXPERTS, NUM_EXPERTS + 2, NUM_EXPERTS + 3
    case.ids[:] = torch.tensor([[0, zero, 1, -1], [0, zero, copy, -1], [constant, zero, copy, 1]])
    case.weights[:, 1] = weight
    assert case.expected().isfinite().all()
    case.check(launch, target, 2, 0, 3)


@with_forms(
    SumFeatures(masked=True, shared_x=True, special=True),
    SumFeatures(special=True, quantized=True),
    SumFeatures(masked=True, special=True, by_expert=True),
    SumFeatures(masked=True, special=True, by_offset=True),
)
def test_a_bad_token_leaves_its_neighbours_alone(launch: Launch, target: str, features: SumFeatures) -> None:
    case = Case(features, torch.bfloat16, 32, 3, 1, True, 4, 4)
    case.active_index[:] = 0
    case.ids[:] = torch.tensor([[0, NUM_EXPERTS + 2, NUM_EXPERTS + 3]] * 4)  # routed, copy, constant
    case.ids[:, 0] = torch.arange(4)
    case.ori_x[1, 3] = float("nan")
    case.alphas[2, 2, 0] = float("inf")
    want = case.expected()
    assert want[1].isnan().any()
    assert not want[2].isfinite().all()
    assert want[[0, 3]].isfinite().all()
    case.check(launch, target, 2, 0, 4)


@pytest.mark.parametrize("features", [f for f in FEATURES if not f.quantized], ids=names_of)
@pytest.mark.parametrize("programs", [5, 6, 48])
def test_programs_that_outnumber_tokens_share_them(features: SumFeatures, programs: int) -> None:
    """The form for the NPU, with too few programs for all halves, just enough, and more."""
    case = Case(features, torch.bfloat16, 192, 3, 1, True, programs, 4)
    case.check(launch, "npu", programs, 1, 3)


def test_bytes_moved_count_every_row_once() -> None:
    def moved(features: SumFeatures, num_shared: int = 1) -> int:
        kernel = weighted_sum_kernel(torch.bfloat16, 64, 2, num_shared, features=features)
        assert kernel.bytes_moved is not None
        return int(kernel.bytes_moved(num_tokens=3, first_token=0, num_local_experts=5 * features.own))

    entries = 2 * (4 + 4)
    assert moved(SumFeatures()) == 3 * (3 * 128 + 128 + entries)
    assert moved(SumFeatures(shared_x=True), 0) == 3 * (2 * 128 + 128 + 128 + entries)
    assert moved(SumFeatures(fp32_out=True)) == 3 * (3 * 128 + 256 + entries)
    assert moved(SumFeatures(quantized=True)) == 3 * (3 * (64 + 16) + 128 + entries)
    assert moved(SumFeatures(by_expert=True)) == 3 * (3 * 128 + 128 + entries + 2 * 4)
    assert moved(SumFeatures(own=True)) == 3 * (3 * 128 + 128 + entries + 2 * 4) + 5 * 2 * 4
    assert moved(SumFeatures(by_offset=True)) == 3 * (3 * 128 + 128 + entries + 3 * 8)
    # the data decide
    for features in (SumFeatures(masked=True), SumFeatures(special=True), SumFeatures(listed=True)):
        assert weighted_sum_kernel(torch.bfloat16, 64, 2, features=features).bytes_moved is None


def test_what_no_mask_leaves_out_cannot_be_cleared() -> None:
    with pytest.raises(ArgumentError, match=r"features.clears is True.*Set features.masked"):
        weighted_sum_kernel(torch.bfloat16, 32, 2, features=SumFeatures(clears=True))


def test_by_expert_there_is_one_shared_expert_at_most() -> None:
    with pytest.raises(ArgumentError, match="num_shared"):
        weighted_sum_kernel(torch.bfloat16, 32, 2, 2, features=SumFeatures(by_expert=True))


@pytest.mark.parametrize("other", ["by_expert", "by_offset"])
def test_listed_tokens_have_slots_by_token(other: str) -> None:
    features = dataclasses.replace(SumFeatures(listed=True), **{other: True})
    with pytest.raises(ArgumentError, match=f"listed is True.*Leave out features.{other}"):
        weighted_sum_kernel(torch.bfloat16, 32, 2, features=features)


@with_forms(SumFeatures(listed=True), SumFeatures(listed=True, masked=True, own=True))
@pytest.mark.parametrize("programs", [1, 3, 16])
@pytest.mark.parametrize("bounds", [(1, 7), (0, 8), (-(2**31), 2**31 - 1), (3, 3), (5, 2), (2**31 - 1, -1)])
def test_only_tokens_that_are_listed_are_summed(
    launch: Launch, target: str, features: SumFeatures, programs: int, bounds: tuple[int, int]
) -> None:
    """What is no token is no address either, nor are bounds beyond the list."""
    case = Case(features, torch.bfloat16, 64, 3, 1, True, 7, 8)
    case.listed = torch.tensor([7, -1, 2, 2**31 - 1, 0, -(2**31), 8, 5], dtype=torch.int32)
    case.bounds = torch.tensor(bounds, dtype=torch.int32)
    case.active_index[:] = torch.tensor([0, -1, 0, 0, 0, 0, 0, -1])
    case.check(launch, target, programs, 0, 8)


@pytest.mark.parametrize("other", ["by_expert", "by_offset", "quantized", "zoned"])
def test_own_results_are_found_beside_slots_by_token_only(other: str) -> None:
    features = dataclasses.replace(SumFeatures(own=True), **{other: True})
    with pytest.raises(ArgumentError, match=f"own is True.*Leave out features.{other}"):
        weighted_sum_kernel(torch.bfloat16, 32, 2, features=features)


@pytest.mark.parametrize("other", ["by_expert", "quantized"])
def test_by_offset_there_are_plain_rows_only(other: str) -> None:
    features = dataclasses.replace(SumFeatures(by_offset=True), **{other: True})
    with pytest.raises(ArgumentError, match=f"by_offset is True.*Leave out features.{other}"):
        weighted_sum_kernel(torch.bfloat16, 32, 2, features=features)
