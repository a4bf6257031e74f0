"""Kernels that turn a token's results into its output."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.kernels.case import NUM_EXPERTS, TOPK, Arguments, Case, Tensors, make_case
from benchmarks.kernels.rows import spelled
from moe_triton.backends.cpu.triton import launch
from moe_triton.kernels import (
    SumFeatures,
    block_quantize,
    const_alphas_kernel,
    dequantize_blocks,
    rms_norm_kernel,
    weighted_sum_kernel,
)

_NUM_SPECIAL = 4  # of each kind


def _packed_slots(dtype: torch.dtype, hidden: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantised slots (T*K, slot bytes), and the rows that they stand for."""
    stride = -(-hidden * 5 // 4 // 512) * 512
    rows = torch.randn(tokens * TOPK, hidden).to(dtype)
    packed = block_quantize(rows, launch, row_stride=stride)
    return packed, rows


def weighted_sum_case(
    dtype: torch.dtype, hidden: int, tokens: int, features: SumFeatures | None = None
) -> Case:
    """K rows a token. Of special experts every eighth entry; half of the tokens are masked."""
    features = features or SumFeatures()
    ids = torch.rand(tokens, NUM_EXPERTS).topk(TOPK, dim=1).indices.int()
    if features.special:
        first = torch.arange(tokens, dtype=torch.int32) % (3 * _NUM_SPECIAL)
        ids[:, 0] = NUM_EXPERTS + first
    weights = torch.rand(tokens, TOPK)
    x = torch.randn(tokens, hidden).to(dtype)
    const_v = torch.randn(_NUM_SPECIAL, hidden).to(dtype)
    alphas = torch.rand(tokens, TOPK, 2)
    shared = torch.randn(tokens, hidden).to(dtype)
    active = torch.arange(tokens, dtype=torch.int32)
    active[tokens // 2 :] = -1
    out = torch.zeros(tokens, hidden, dtype=torch.float32 if features.fp32_out else dtype)
    other = torch.zeros_like(out)
    rows_of_expert = max(tokens // 8, 1)
    expand_idx = torch.randint(0, rows_of_expert, (tokens, TOPK), dtype=torch.int32)

    if features.quantized:
        slots, _ = _packed_slots(dtype, hidden, tokens)
        slot_stride = slots.shape[1]
        slot_scales = slots.view(-1)[hidden:].view(dtype)
    else:
        rows = NUM_EXPERTS * rows_of_expert if features.by_expert else tokens * TOPK
        slots = torch.randn(hidden).to(dtype).repeat(rows, 1)
        slot_stride = hidden
        slot_scales = slots
    packed = slots.view(tokens, TOPK, -1) if not features.by_expert else slots
    at = ids.long() * rows_of_expert + expand_idx.long()
    constant = NUM_EXPERTS + 2 * _NUM_SPECIAL
    # which entries are of a constant expert is known before, as torch would learn it from dispatch
    is_copy = ((ids >= NUM_EXPERTS + _NUM_SPECIAL) & (ids < constant)).nonzero(as_tuple=True)
    is_const = (ids >= constant).nonzero(as_tuple=True)
    chosen_v = ids[is_const].long() - constant

    def values() -> torch.Tensor:
        if features.quantized:
            q, scales = packed[..., :hidden], packed[..., hidden : hidden * 5 // 4].view(dtype)
            return dequantize_blocks(q, scales)
        return packed[at] if features.by_expert else packed

    def eager() -> Tensors:
        terms = values().float()
        if features.masked:
            terms, w = terms[: tokens // 2], weights[: tokens // 2]
        else:
            w = weights
        if features.special:
            terms = torch.where(ids[..., None] < NUM_EXPERTS, terms, 0.0)
            terms[is_copy] = x[is_copy[0]].float()
            a = alphas[is_const]
            terms[is_const] = a[:, :1] * x[is_const[0]].float() + a[:, 1:] * const_v[chosen_v].float()
        total = (terms * w[:, :, None]).sum(1)
        if features.shared_x:
            total = total + shared.float()
        if features.masked:
            other[: tokens // 2] = total.to(out.dtype)
            return (other,)
        return (total.to(out.dtype),)

    arguments: dict[str, torch.Tensor | int] = {
        "slots": slots,
        "slot_scales": slot_scales,
        "topk_idx": ids,
        "topk_weights": weights,
        "expand_idx": expand_idx,
        "active": active,
        "shared_x": shared,
        "ori_x": x,
        "alphas": alphas,
        "const_v": const_v,
        "out": out,
        "token_stride": TOPK * slot_stride,
        "slot_stride": slot_stride,
        "expert_stride": rows_of_expert * slot_stride,
        "index_stride": slot_stride,
        "first_token": 0,
        "num_tokens": tokens,
        "num_experts": NUM_EXPERTS,
        "max_index": rows_of_expert,
        "num_zero": _NUM_SPECIAL,
        "num_copy": _NUM_SPECIAL,
        "num_const": _NUM_SPECIAL,
    }
    kernel = weighted_sum_kernel(dtype, hidden, TOPK, features=features)
    element, summed = 2, tokens // 2 if features.masked else tokens
    slot_bytes = hidden * 5 // 4 if features.quantized else hidden * element
    row_bytes = hidden * (element * features.shared_x + out.element_size())
    routed = int((ids[:summed] < NUM_EXPERTS).sum())
    from_x = hidden * element * (len(is_copy[0]) + 2 * len(is_const[0])) if features.special else 0
    named = [name for name, is_on in dataclasses.asdict(features).items() if is_on]
    return make_case(
        kernel,
        [arguments[arg.name] for arg in kernel.args],
        [out],
        eager,
        variant=" ".join([spelled(dtype), *named]),
        tokens=tokens,
        moved=routed * slot_bytes + summed * row_bytes + from_x + 8 * TOPK * tokens,
    )


def rms_norm_case(hidden: int, tokens: int) -> Case:
    acc = torch.randn(tokens, hidden)
    residual, gamma = torch.randn(tokens, hidden).bfloat16(), torch.randn(hidden).bfloat16()
    eps = torch.tensor([1e-6])
    y, x = torch.empty_like(residual), torch.empty_like(residual)
    rstd = torch.empty(tokens)

    def eager() -> Tensors:
        xf = acc + residual.float()
        inverse = torch.rsqrt(xf.pow(2).mean(1, keepdim=True) + eps)
        return (xf * inverse).bfloat16() * gamma, inverse[:, 0], xf.bfloat16()

    arguments: Arguments = [acc, residual, gamma, eps, y, rstd, x, 0, tokens]
    kernel = rms_norm_kernel(hidden)
    return make_case(kernel, arguments, [y, rstd, x], eager, variant="bfloat16", tokens=tokens)


def const_alphas_case(dtype: torch.dtype, hidden: int, tokens: int, *, per_element: bool) -> Case:
    """One entry of each token is of a constant expert."""
    ids = torch.rand(tokens, NUM_EXPERTS).topk(TOPK, dim=1).indices.int()
    ids[:, 3] = NUM_EXPERTS + torch.arange(tokens, dtype=torch.int32) % _NUM_SPECIAL
    x = torch.randn(tokens, hidden).to(dtype)
    shape = (_NUM_SPECIAL, hidden) if per_element else (_NUM_SPECIAL,)
    alpha1, alpha2 = ((torch.randn(shape) / hidden**0.5).to(dtype) for _ in range(2))
    alphas = torch.empty(tokens, TOPK, 2)

    def eager() -> Tensors:
        result = torch.zeros(tokens, TOPK, 2)
        at = (ids >= NUM_EXPERTS).nonzero(as_tuple=True)
        c = ids[at].long() - NUM_EXPERTS
        if per_element:
            rows = x[at[0]].float()
            logits = [(alpha[c].float() * rows).sum(1) for alpha in (alpha1, alpha2)]
            result[at] = torch.stack(logits, 1).softmax(1)
        else:
            result[at] = torch.stack([alpha1[c].float(), alpha2[c].float()], 1)
        return (result,)

    return make_case(
        const_alphas_kernel(dtype, hidden, TOPK, per_element),
        [x, ids, alpha1, alpha2, alphas, 0, tokens, NUM_EXPERTS, _NUM_SPECIAL],
        [alphas],
        eager,
        variant=f"{spelled(dtype)} {'rows' if per_element else 'numbers'}",
        tokens=tokens,
        moved=tokens * (12 * TOPK + (6 * hidden if per_element else 4)),
    )
