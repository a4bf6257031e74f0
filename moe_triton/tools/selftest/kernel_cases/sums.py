"""Kernels that turn a token's results into its output."""

from __future__ import annotations

import dataclasses

import torch

from moe_triton.core.plan import Hole
from moe_triton.kernels import SumFeatures, const_alphas_kernel, rms_norm_kernel, weighted_sum_kernel
from moe_triton.layout import SLOT_ALIGN, align
from moe_triton.tools.selftest.kernel_cases.case import NUM_EXPERTS, TOPK, KernelCase, blank, make_case
from moe_triton.tools.selftest.kernel_cases.moves import DTYPES, spelled
from moe_triton.tools.selftest.kernel_cases.tables import Routing

F32, I8 = torch.float32, torch.int8
NUM_SPECIAL = 2  # of each kind
ROWS_OF_EXPERT = 4
FEATURES = (
    SumFeatures(masked=True, shared_x=True),
    SumFeatures(special=True),
    SumFeatures(quantized=True),
    SumFeatures(by_expert=True),
    SumFeatures(by_offset=True),
    SumFeatures(fp32_out=True),
    SumFeatures(zoned=True),
    SumFeatures(quantized=True, zoned=True),
)


def sum_cases(seed: int, tokens: int, hidden: int, target: str) -> list[KernelCase]:
    """Cases whose rows have H elements."""
    r = Routing(seed, tokens)
    cases = []
    for dtype in DTYPES:
        cases += [weighted_sum_case(r, dtype, hidden, target, SumFeatures(), num_shared=n) for n in (0, 1)]
        cases += [_const_alphas(r, dtype, hidden, target, rows) for rows in (False, True)]
    cases += [weighted_sum_case(r, torch.bfloat16, hidden, target, features) for features in FEATURES]
    cases.append(weighted_sum_case(r, torch.bfloat16, hidden, target, SumFeatures(), has_weights=False))
    cases += [rms_norm_case(r, hidden, target, masked) for masked in (False, True)]
    return cases


def _random(r: Routing, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=r.generator).to(dtype)


def _special_ids(r: Routing) -> torch.Tensor:
    """The routing, with one entry of each token a zero, copy or constant expert."""
    ids = r.ids.clone()
    ids[:, 2] = NUM_EXPERTS + r.integers(0, 3 * NUM_SPECIAL, r.tokens)
    return ids


def weighted_sum_case(
    r: Routing,
    dtype: torch.dtype,
    hidden: int,
    target: str,
    features: SumFeatures,
    *,
    num_shared: int = 0,
    has_weights: bool = True,
) -> KernelCase:
    """Weighted sums over K results, of the features that are asked for."""
    width = TOPK + num_shared
    kernel = weighted_sum_kernel(dtype, hidden, TOPK, num_shared, has_weights, target, features=features)
    slot_stride = hidden
    if features.quantized:
        slot_stride = align(hidden * 5 // 4, SLOT_ALIGN)
        slots = r.integers(-127, 128, r.tokens * width, slot_stride, dtype=I8)
        scales = (torch.rand(r.tokens * width, hidden // 8, generator=r.generator) / 64).to(dtype)
        slots[:, hidden : hidden * 5 // 4] = scales.view(I8)
    else:
        number = NUM_EXPERTS * ROWS_OF_EXPERT if features.by_expert else r.tokens * width
        slots = _random(r, number, hidden, dtype=dtype)
    places = torch.randperm(r.tokens * width, generator=r.generator) * hidden
    named = [name for name, on in dataclasses.asdict(features).items() if on and name != "zoned"]
    named += [f"{num_shared} shared"] * bool(num_shared) + ["unweighted"] * (not has_weights)
    return make_case(
        kernel,
        " ".join([spelled(dtype), *named]),
        slots=slots,
        slot_scales=Hole("slots", hidden),
        topk_idx=_special_ids(r) if features.special else r.ids,
        topk_weights=torch.rand(r.tokens, TOPK, generator=r.generator),
        expand_idx=r.integers(0, ROWS_OF_EXPERT, r.tokens, TOPK),
        offsets=places.view(r.tokens, width),
        active=r.active(),
        shared_x=_random(r, r.tokens, hidden, dtype=dtype),
        ori_x=_random(r, r.tokens, hidden, dtype=dtype),
        alphas=torch.rand(r.tokens, TOPK, 2, generator=r.generator),
        const_v=_random(r, NUM_SPECIAL, hidden, dtype=dtype),
        out=blank(r.tokens, hidden, dtype=F32 if features.fp32_out else dtype),
        token_stride=width * slot_stride,
        slot_stride=slot_stride,
        expert_stride=ROWS_OF_EXPERT * hidden,
        index_stride=hidden,
        first_token=1,
        num_tokens=r.tokens - 1,
        num_experts=NUM_EXPERTS,
        max_index=ROWS_OF_EXPERT,
        num_zero=NUM_SPECIAL,
        num_copy=NUM_SPECIAL,
        num_const=NUM_SPECIAL,
    )


def _const_alphas(r: Routing, dtype: torch.dtype, hidden: int, target: str, per_element: bool) -> KernelCase:
    shape = (NUM_SPECIAL, hidden) if per_element else (NUM_SPECIAL,)
    return make_case(
        const_alphas_kernel(dtype, hidden, TOPK, per_element, target),
        f"{spelled(dtype)} {'rows' if per_element else 'numbers'}",
        x=_random(r, r.tokens, hidden, dtype=dtype),
        topk_idx=_special_ids(r),
        alpha1=(_random(r, *shape) / hidden**0.5).to(dtype),
        alpha2=(_random(r, *shape) / hidden**0.5).to(dtype),
        alphas=blank(r.tokens, TOPK, 2, dtype=F32),
        first_token=0,
        num_tokens=r.tokens,
        first_const=NUM_EXPERTS + 2 * NUM_SPECIAL,
        num_const=NUM_SPECIAL,
    )


def rms_norm_case(r: Routing, hidden: int, target: str, masked: bool) -> KernelCase:
    """Residual and norm."""
    bf16 = torch.bfloat16
    return make_case(
        rms_norm_kernel(hidden, target, masked=masked),
        "masked" if masked else "bfloat16",
        acc=_random(r, r.tokens, hidden),
        residual=_random(r, r.tokens, hidden, dtype=bf16),
        gamma=_random(r, hidden, dtype=bf16),
        active=r.active(),
        eps=torch.tensor([1e-6]),
        y=blank(r.tokens, hidden, dtype=bf16),
        rstd=blank(r.tokens, dtype=F32),
        x_out=blank(r.tokens, hidden, dtype=bf16),
        first_token=1,
        num_tokens=r.tokens - 1,
    )
