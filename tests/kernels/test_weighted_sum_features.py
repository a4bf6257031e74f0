"""Each feature of a weighted sum, and useful combinations of them."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch, load
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum_kernel
from tests.kernels.models import entry_model, sum_of_entries_model
from tests.kernels.routes import DTYPES, FORMS, Guarded, Launch, assert_same_bits, kernel_settings

NUM_EXPERTS, MAX_INDEX = 5, 7
FEATURES = [
    SumFeatures(masked=True),
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


class Case:
    """Every argument of a sum with features, by its name in the kernel, and each token's sum.

    What no sum should hold is NaN by the time the kernel runs.
    """

    def __init__(
        self,
        features: SumFeatures,
        dtype: torch.dtype,
        hidden: int,
        topk: int,
        num_shared: int,
        has_weights: bool,
        seed: int,
        tokens: int,
        special: tuple[int, int, int] = (2, 1, 2),
        gap: int = 0,
    ) -> None:
        self.features, self.dtype, self.hidden = features, dtype, hidden
        self.topk, self.num_shared, self.has_weights = topk, num_shared, has_weights
        self.special = special if features.special else (0, 0, 0)
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens = tokens
        # -2 and the ids behind the special experts are of no expert
        self.ids = self.integers(-2, NUM_EXPERTS + sum(self.special) + 2, tokens, topk)
        self.weights = torch.rand((tokens, topk), generator=self.generator) * 2 - 0.5
        self.active = self.integers(-2, 3, tokens)
        self.expand_idx = self.integers(-3, MAX_INDEX + 3, tokens, topk)  # clamped
        self.shared_x, self.ori_x = self.rows(tokens), self.rows(tokens)
        self.alphas = torch.randn((tokens, topk, 2), generator=self.generator)
        self.const_v = self.rows(self.special[2])
        self.make_slots(gap)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def rows(self, *shape: int) -> torch.Tensor:
        return torch.randn((*shape, self.hidden), generator=self.generator).to(self.dtype)

    def make_slots(self, gap: int) -> None:
        """Slots, packed as they lie in a window, and what the receiver reads in each of them."""
        width = self.topk + self.num_shared
        # by offset, results lie anywhere before and behind where the sum starts to count
        self.order = torch.randperm(self.tokens * width, generator=self.generator).view(self.tokens, width)
        self.origin = self.tokens * width // 2 if self.features.by_offset else 0
        if self.features.by_expert:
            shape: tuple[int, ...] = (NUM_EXPERTS + self.num_shared, max(MAX_INDEX, self.tokens))
        else:
            shape = (self.tokens, self.topk + self.num_shared)
        if self.features.quantized:
            self.scale_offset = self.hidden + gap
            self.slot_width = self.scale_offset + self.hidden // 4 + gap
            self.slots = self.integers(-128, 128, *shape, self.slot_width).to(torch.int8)
            scales = torch.rand((*shape, self.hidden // 8), generator=self.generator).to(self.dtype)
            end = self.scale_offset + self.hidden // 4
            self.slots[..., self.scale_offset : end] = scales.view(torch.int8)
            products = self.slots[..., : self.hidden].float() * scales.float().repeat_interleave(8, -1)
            self.values = products.to(self.dtype).float()
        else:
            self.slot_width = self.hidden + gap
            self.slots = torch.randn((*shape, self.slot_width), generator=self.generator).to(self.dtype)
            self.values = self.slots[..., : self.hidden].float()

    def where(self, token: int, k: int) -> tuple[int, int]:
        """The slot of entry k, or of a shared result from topk on."""
        if self.features.by_offset:
            first, second = divmod(int(self.order[token, k]), self.topk + self.num_shared)
            return first, second
        if not self.features.by_expert:
            return token, k
        if k >= self.topk:
            return NUM_EXPERTS, token
        return int(self.ids[token, k]), int(self.expand_idx[token, k].clamp(0, MAX_INDEX - 1))

    def spoil(self) -> None:
        """NaN where nothing was sent, and for weights and alphas of ids that have no use for them."""
        read = {
            self.where(t, k)
            for t in range(self.tokens)
            for k in range(self.topk + self.num_shared)
            if (k >= self.topk or 0 <= self.ids[t, k] < NUM_EXPERTS) and self.takes_part(t)
        }
        spoiled = self.slots.view(self.dtype) if self.features.quantized else self.slots
        for i in range(spoiled.shape[0]):
            for j in range(spoiled.shape[1]):
                if (i, j) not in read:
                    spoiled[i, j] = float("nan")
        is_expert = (self.ids >= 0) & (self.ids < NUM_EXPERTS + sum(self.special))
        self.weights[~is_expert] = float("nan")
        first_const = NUM_EXPERTS + sum(self.special[:2])
        self.alphas[(self.ids < first_const) | ~is_expert] = float("nan")

    def takes_part(self, token: int) -> bool:
        return not self.features.masked or int(self.active[token]) >= 0

    def arguments(self, out: torch.Tensor, first_token: int, num_tokens: int) -> list[torch.Tensor | int]:
        slots = self.slots.view(-1)[self.origin * self.slot_width :]
        outer, inner = self.slots.stride(0), self.slots.stride(1)
        by_name: dict[str, torch.Tensor | int] = {
            "slots": slots,
            "slot_scales": slots[self.scale_offset :].view(self.dtype) if self.features.quantized else 0,
            "topk_idx": self.ids,
            "topk_weights": self.weights,
            "expand_idx": self.expand_idx,
            "offsets": (self.order - self.origin) * self.slot_width,
            "active": self.active,
            "shared_x": self.shared_x,
            "ori_x": self.ori_x,
            "alphas": self.alphas,
            "const_v": self.const_v,
            "out": out,
            "token_stride": outer,
            "slot_stride": inner,
            "expert_stride": outer,
            "index_stride": inner,
            "first_token": first_token,
            "num_tokens": num_tokens,
            "num_experts": NUM_EXPERTS,
            "max_index": MAX_INDEX,
            "num_zero": self.special[0],
            "num_copy": self.special[1],
            "num_const": self.special[2],
        }
        return [by_name[arg.name] for arg in self.kernel("cpu").args]

    def kernel(self, target: str) -> TritonKernel:
        return weighted_sum_kernel(
            self.dtype,
            self.hidden,
            self.topk,
            self.num_shared,
            self.has_weights,
            target,
            features=self.features,
        )

    def expected(self) -> torch.Tensor:
        """(T, H) in the output's dtype, as if all tokens took part."""
        sums = np.zeros((self.tokens, self.hidden), np.float32)
        for t in range(self.tokens):
            x = self.ori_x[t].float().numpy()
            entries = []
            for k in range(self.topk):
                expert = int(self.ids[t, k])
                slot = self.values[self.where(t, k)].numpy() if 0 <= expert < NUM_EXPERTS else x
                constants = self.alphas[t, k].numpy(), self.const_v.float().numpy()
                entries.append(entry_model(expert, slot, x, *constants, NUM_EXPERTS, *self.special[:2]))
            unweighted = [self.values[self.where(t, self.topk + s)].numpy() for s in range(self.num_shared)]
            if self.features.shared_x:
                unweighted.append(self.shared_x[t].float().numpy())
            weights = self.weights[t].numpy() if self.has_weights else None
            sums[t] = sum_of_entries_model(entries, weights, unweighted, self.hidden)
        return torch.from_numpy(sums).to(self.out_dtype)

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.features.fp32_out else self.dtype

    def check(self, launch: Launch, target: str, programs: int, first_token: int, num_tokens: int) -> None:
        """Run tokens [first_token, first_token + num_tokens), and compare the whole output."""
        out = Guarded((self.tokens, self.hidden), self.out_dtype)
        want = self.expected()
        self.spoil()
        launch(self.kernel(target), self.arguments(out.tensor, first_token, num_tokens), programs)
        written = [
            first_token <= t < first_token + num_tokens and self.takes_part(t) for t in range(self.tokens)
        ]
        untouched = out.untouched()
        for t in range(self.tokens):
            assert_same_bits(out.check()[t], (want if written[t] else untouched)[t])


@with_forms(*FEATURES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(kernel_settings, max_examples=12)
@given(
    seed=st.integers(0, 2**31), tokens=st.integers(0, 7), chunk=st.tuples(*[st.integers(0, 7)] * 2),
    programs=st.integers(1, 4), gap=st.sampled_from([0, 32]),
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
    case = Case(features, dtype, 96, 4, 1, True, seed, tokens, special, gap)
    first_token = min(chunk[0], tokens)
    case.check(launch, target, programs, first_token, min(chunk[1], tokens - first_token))


@with_forms(
    SumFeatures(special=True),
    SumFeatures(quantized=True),
    SumFeatures(by_expert=True),
    SumFeatures(by_offset=True),
)
def test_features_without_weights_and_shared_experts(
    launch: Launch, target: str, features: SumFeatures
) -> None:
    for seed in range(6):
        Case(features, torch.bfloat16, 32, 3, 0, False, seed, 6).check(launch, target, 2, 0, 6)


@with_forms(SumFeatures(), SumFeatures(special=True, quantized=True), SumFeatures(by_offset=True))
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


@with_forms(
    SumFeatures(masked=True, shared_x=True, special=True),
    SumFeatures(special=True, quantized=True),
    SumFeatures(masked=True, special=True, by_expert=True),
    SumFeatures(masked=True, special=True, by_offset=True),
)
def test_a_bad_token_leaves_its_neighbours_alone(launch: Launch, target: str, features: SumFeatures) -> None:
    case = Case(features, torch.bfloat16, 32, 3, 1, True, 4, 4)
    case.active[:] = 0
    case.ids[:] = torch.tensor([[0, NUM_EXPERTS + 2, NUM_EXPERTS + 3]] * 4)  # routed, copy, constant
    case.ids[:, 0] = torch.arange(4)
    case.ori_x[1, 3] = float("nan")
    case.alphas[2, 2, 0] = float("inf")
    want = case.expected()
    assert want[1].isnan().any()
    assert not want[2].isfinite().all()
    assert want[[0, 3]].isfinite().all()
    case.check(launch, target, 2, 0, 4)


def test_bytes_moved_count_every_row_once() -> None:
    def moved(features: SumFeatures, num_shared: int = 1) -> int:
        kernel = weighted_sum_kernel(torch.bfloat16, 64, 2, num_shared, features=features)
        assert kernel.bytes_moved is not None
        return int(kernel.bytes_moved(num_tokens=3, first_token=0))

    entries = 2 * (4 + 4)
    assert moved(SumFeatures()) == 3 * (3 * 128 + 128 + entries)
    assert moved(SumFeatures(shared_x=True), 0) == 3 * (2 * 128 + 128 + 128 + entries)
    assert moved(SumFeatures(fp32_out=True)) == 3 * (3 * 128 + 256 + entries)
    assert moved(SumFeatures(quantized=True)) == 3 * (3 * (64 + 16) + 128 + entries)
    assert moved(SumFeatures(by_expert=True)) == 3 * (3 * 128 + 128 + entries + 2 * 4)
    assert moved(SumFeatures(by_offset=True)) == 3 * (3 * 128 + 128 + entries + 3 * 8)
    for features in (SumFeatures(masked=True), SumFeatures(special=True)):  # the data decide
        assert weighted_sum_kernel(torch.bfloat16, 64, 2, features=features).bytes_moved is None


def test_by_expert_there_is_one_shared_expert_at_most() -> None:
    with pytest.raises(ArgumentError, match="num_shared"):
        weighted_sum_kernel(torch.bfloat16, 32, 2, 2, features=SumFeatures(by_expert=True))


@pytest.mark.parametrize("other", ["by_expert", "quantized"])
def test_by_offset_there_are_plain_rows_only(other: str) -> None:
    features = dataclasses.replace(SumFeatures(by_offset=True), **{other: True})
    with pytest.raises(ArgumentError, match=f"by_offset is True.*Leave out features.{other}"):
        weighted_sum_kernel(torch.bfloat16, 32, 2, features=features)
