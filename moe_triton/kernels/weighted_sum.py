"""Weighted sum: the K routed and S shared results of each token, reduced in fp32 in a fixed order.

Shape symbols:
    T   tokens of this rank
    H   hidden size, a multiple of 32
    K   experts per token
    S   shared experts

::

    acc = 0
    for k ascending:  acc += f32(slot[k]) * weight[k]     # two roundings: no fused multiply-add
    for s ascending:  acc += f32(slot[K + s])
    out = acc, rounded to nearest even

An entry whose id is negative adds nothing, whatever its slot or its weight holds.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.checks import check_positive, check_tensor
from moe_triton.errors import ArgumentError
from moe_triton.kernel import NAMES, Arg, TritonKernel
from moe_triton.kernels.checks import Launch, check_float_dtype, check_hidden
from moe_triton.kernels.language import tl, triton


@triton.jit
def _add_routed(acc, slot, topk_idx, topk_weights, at, cols, HAS_WEIGHTS: tl.constexpr):
    # adding +0 changes no sum that started from +0, so it stands for adding nothing
    is_routed = tl.load(topk_idx + at) >= 0
    value = tl.where(is_routed, tl.load(slot + cols).to(tl.float32), 0.0)
    if HAS_WEIGHTS:
        value = value * tl.where(is_routed, tl.load(topk_weights + at), 0.0)
    return acc + value


@triton.jit
def _weighted_sum_kernel(
    slots,
    topk_idx,
    topk_weights,
    out,
    token_stride,
    slot_stride,
    first_token,
    num_tokens,
    HIDDEN: tl.constexpr,
    TOPK: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    per_program = tl.cdiv(num_tokens, tl.num_programs(0))
    begin = tl.program_id(0) * per_program
    cols = tl.arange(0, HIDDEN)
    for i in range(begin, tl.minimum(begin + per_program, num_tokens)):
        token = (first_token + i).to(tl.int64)
        slot = slots + token * token_stride
        acc = tl.zeros((HIDDEN,), tl.float32)
        # unrolled, a CPU keeps the sum in registers; rolled, an AI core double-buffers the slots
        if UNROLL:
            for k in tl.static_range(TOPK):
                at = token * TOPK + k
                acc = _add_routed(acc, slot + k * slot_stride, topk_idx, topk_weights, at, cols, HAS_WEIGHTS)
        else:
            for k in range(0, TOPK):
                at = token * TOPK + k
                acc = _add_routed(acc, slot + k * slot_stride, topk_idx, topk_weights, at, cols, HAS_WEIGHTS)
        for s in tl.static_range(NUM_SHARED):
            acc += tl.load(slot + (TOPK + s) * slot_stride + cols).to(tl.float32)
        tl.store(out + token * HIDDEN + cols, acc.to(out.dtype.element_ty))


def _weighted_sum_fallback(
    programs: int,
    *,
    slots: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    token_stride: int,
    slot_stride: int,
    first_token: int,
    num_tokens: int,
    HIDDEN: int,
    TOPK: int,
    NUM_SHARED: int,
    HAS_WEIGHTS: bool,
    UNROLL: bool = True,
) -> None:
    if not num_tokens:
        return
    shape = (num_tokens, TOPK + NUM_SHARED, HIDDEN)
    at = slots.storage_offset() + first_token * token_stride
    values = slots.as_strided(shape, (token_stride, slot_stride, 1), at)
    entries = slice(first_token * TOPK, (first_token + num_tokens) * TOPK)
    is_routed = topk_idx[entries].view(num_tokens, TOPK, 1) >= 0
    acc = torch.zeros((num_tokens, HIDDEN), dtype=torch.float32)
    for k in range(TOPK):
        value = values[:, k].float()
        if HAS_WEIGHTS:
            value = value * topk_weights[entries].view(num_tokens, TOPK, 1)[:, k]
        acc = acc + torch.where(is_routed[:, k], value, 0.0)
    for s in range(NUM_SHARED):
        acc = acc + values[:, TOPK + s].float()
    out[first_token * HIDDEN : (first_token + num_tokens) * HIDDEN] = acc.to(out.dtype).view(-1)


@functools.cache
def weighted_sum_kernel(
    dtype: torch.dtype,
    hidden: int,
    topk: int,
    num_shared: int = 0,
    has_weights: bool = True,
    target: str = "cpu",
) -> TritonKernel:
    """Reduce tokens [first_token, first_token + num_tokens) from their combine slots.

    Slot j of token t starts ``t * token_stride + j * slot_stride`` elements after ``slots``: routed
    results first, then shared ones. Without ``has_weights``, ``topk_weights`` is not read. NaN results
    are quiet NaNs with an unspecified payload.
    """
    check_float_dtype(dtype)
    check_hidden(hidden)
    check_positive("topk", topk)
    element = NAMES[dtype]

    def bytes_moved(*, num_tokens: int, **_: int) -> int:
        return num_tokens * (2 * hidden * (topk + num_shared + 1) + topk * (8 if has_weights else 4))

    return TritonKernel(
        name="weighted_sum",
        fn=_weighted_sum_kernel,
        args=(
            Arg("slots", f"*{element}", "in"),
            Arg("topk_idx", "*i32", "in"),
            Arg("topk_weights", "*fp32", "in"),
            Arg("out", f"*{element}", "out"),
            Arg("token_stride", "i64", "value"),
            Arg("slot_stride", "i64", "value"),
            Arg("first_token", "i32", "value"),
            Arg("num_tokens", "i32", "value"),
        ),
        constants={
            "HIDDEN": hidden,
            "TOPK": topk,
            "NUM_SHARED": num_shared,
            "HAS_WEIGHTS": has_weights,
            "UNROLL": target == "cpu",
        },
        fallback=_weighted_sum_fallback,
        bytes_moved=bytes_moved,
    )


def weighted_sum(
    slots: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    launch: Launch,
    *,
    programs: int = 1,
) -> torch.Tensor:
    """Reduce each token's results.

    Args:
        slots: (T, K+S, H) bf16 or fp16: K routed results, then S shared ones. The last dimension is
            contiguous; the others may be strided.
        topk_idx: (T, K) int32; negative: nothing was sent.
        topk_weights: (T, K) fp32, or None for a plain sum.

    Returns:
        (T, H) in the dtype of ``slots``.
    """
    if slots.dim() != 3 or slots.stride(2) != 1:
        rule = "must be (T, K+S, H) with a contiguous last dimension"
        raise ArgumentError("slots.shape", tuple(slots.shape), rule, "Reshape slots first.")
    check_float_dtype(slots.dtype)
    num_tokens, num_slots, hidden = slots.shape
    check_tensor("topk_idx", topk_idx, shape=[num_tokens, "any"], dtypes=[torch.int32])
    topk = topk_idx.shape[1]
    if num_slots < topk:
        rule = f"must be at least topk ({topk})"
        raise ArgumentError("slots.shape[1]", num_slots, rule, "Pass one slot per routed expert.")
    if topk_weights is not None:
        check_tensor("topk_weights", topk_weights, shape=[num_tokens, topk], dtypes=[torch.float32])
    kernel = weighted_sum_kernel(slots.dtype, hidden, topk, num_slots - topk, topk_weights is not None)
    out = torch.empty((num_tokens, hidden), dtype=slots.dtype)
    if num_tokens:
        weights = topk_weights if topk_weights is not None else torch.empty(0)
        strides = [slots.stride(0), slots.stride(1)]
        launch(kernel, [slots, topk_idx, weights, out, *strides, 0, num_tokens], programs)
    return out
