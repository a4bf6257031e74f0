"""Constant experts: the two factors of each entry that chose one.

Shape symbols:
    T   tokens of this rank
    H   hidden size, a multiple of 32
    K   experts per token
    C   constant experts

A constant expert c gives ``a1 * x + a2 * v[c]``. Its alphas are numbers, ``a1 = alpha1[c]`` and
``a2 = alpha2[c]``, or rows that are held against the token, all in fp32::

    l1 = alpha1[c] . x;  l2 = alpha2[c] . x;  m = max(l1, l2)
    e1 = exp(l1 - m);  e2 = exp(l2 - m)
    a1 = e1 / (e1 + e2);  a2 = e2 / (e1 + e2)

A product is rounded before it is summed; the order of the sum is that of `rms_norm`. `exp` is made of fp32
sums and products here (`_exp_of_negative`), so that the bits depend on no library. It is within 1 ulp.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.dtypes import NAMES
from moe_triton.core.kernel import Arg, TritonKernel, alike, numbers
from moe_triton.core.space import Space, double_buffers, named_features
from moe_triton.kernels.cases import F32, NUM_SPECIAL, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.checks import check_float_dtype, check_hidden
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.programs import part_of
from moe_triton.kernels.rms_norm import row_columns, sum_row
from moe_triton.reference.arithmetic import LANES, softmax_of_two, sum_of_row

BLOCK = 128
BLOCKS = 32, 64, 128, 256


@triton.jit
def _exp_of_negative(x):
    # exp(x) = 2^n * exp(r), |r| <= ln(2)/2; ln(2) in two parts: n times the first one is exact
    x = tl.where(x < -104.0, -104.0, x)
    shifted = x * 1.44269504088896341 + 12582912.0
    n = shifted - 12582912.0
    r = x - n * 0.693359375
    r = r - n * -2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * (r * r) + r + 1.0
    # 2^n in two factors, of which only the second may lead below the normal numbers
    power = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    half = power >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((power - half + 127) << 23).to(tl.float32, bitcast=True)
    return p * first * second


@triton.jit
def _bits_of_chosen(ids, alpha, first_const, num_const):
    bits = ids * 0
    for c in range(0, num_const):
        number = tl.load(alpha + c).to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where(ids == first_const + c, number, bits)
    return bits


@triton.jit
def _const_alphas_kernel(
    x, topk_idx, alpha1, alpha2, alphas,
    first_token, num_tokens, first_const, num_const,
    HIDDEN: tl.constexpr, TOPK: tl.constexpr, PER_ELEMENT: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if PER_ELEMENT or LANES:
        begin, end = part_of(num_tokens)
        cols = row_columns(HIDDEN, LANES)
        for i in range(begin, end):
            token = (first_token + i).to(tl.int64)
            if not LANES:
                # an AI core waits for stores of words: zeros at once, and over them the entries that have any
                words = tl.arange(0, 2 * TOPK)
                tl.store(alphas + token * (2 * TOPK) + words, words.to(tl.float32) * 0.0)
            for k in range(0, TOPK):
                entry = token * TOPK + k
                chosen = tl.load(topk_idx + entry) - first_const
                a1 = 0.0
                a2 = 0.0
                if (chosen >= 0) & (chosen < num_const):
                    c = chosen.to(tl.int64)
                    if PER_ELEMENT:
                        row = tl.load(x + token * HIDDEN + cols)
                        row1 = tl.load(alpha1 + c * HIDDEN + cols)
                        row2 = tl.load(alpha2 + c * HIDDEN + cols)
                        l1 = sum_row(row1.to(tl.float32) * row.to(tl.float32))
                        l2 = sum_row(row2.to(tl.float32) * row.to(tl.float32))
                        largest = tl.where(l1 > l2, l1, l2)
                        e1 = _exp_of_negative(l1 - largest)
                        e2 = _exp_of_negative(l2 - largest)
                        a1 = e1 / (e1 + e2)
                        a2 = e2 / (e1 + e2)
                    else:
                        a1 = tl.load(alpha1 + c).to(tl.float32)
                        a2 = tl.load(alpha2 + c).to(tl.float32)
                    if not LANES:
                        tl.store(alphas + entry * 2, a1)
                        tl.store(alphas + entry * 2 + 1, a2)
                if LANES:
                    tl.store(alphas + entry * 2, a1)
                    tl.store(alphas + entry * 2 + 1, a2)
    else:
        # tiles of entries; ``alphas`` holds the bits of its numbers, so that products leave all as they are
        begin, end = part_of(num_tokens * TOPK)
        lanes, pair = tl.arange(0, BLOCK), tl.arange(0, 2)
        for b in range(0, tl.cdiv(end - begin, BLOCK)):
            entries = begin + b * BLOCK + lanes
            ids = tl.load(topk_idx + first_token * TOPK + entries, mask=entries < end, other=-1)
            a1 = _bits_of_chosen(ids, alpha1, first_const, num_const)
            a2 = _bits_of_chosen(ids, alpha2, first_const, num_const)
            # pairs by products: of rows of two words a choice would take them one by one
            both = a1[:, None] * (1 - pair)[None, :] + a2[:, None] * pair[None, :]
            at = (first_token * TOPK + entries).to(tl.int64)[:, None] * 2 + pair[None, :]
            tl.store(alphas + at, both, mask=entries[:, None] < end)


@fallback
def _const_alphas_fallback(a: Arguments) -> None:
    if not a.num_tokens:
        return
    entries = slice(a.first_token * a.TOPK, (a.first_token + a.num_tokens) * a.TOPK)
    chosen = a.topk_idx[entries].long() - a.first_const
    is_const = (chosen >= 0) & (chosen < a.num_const)
    c = chosen[is_const]
    result = torch.zeros((a.num_tokens * a.TOPK, 2))
    if a.PER_ELEMENT:
        tokens = torch.arange(a.first_token, a.first_token + a.num_tokens).repeat_interleave(a.TOPK)[is_const]
        rows = a.x[: (a.first_token + a.num_tokens) * a.HIDDEN].view(-1, a.HIDDEN)[tokens].float()
        logits = [
            sum_of_row((alpha[: a.num_const * a.HIDDEN].view(-1, a.HIDDEN)[c].float() * rows).numpy())
            for alpha in (a.alpha1, a.alpha2)
        ]
        result[is_const] = torch.stack([torch.from_numpy(each) for each in softmax_of_two(*logits)], 1)
    else:
        result[is_const] = torch.stack([a.alpha1[c].float(), a.alpha2[c].float()], 1)
    a.alphas.view(torch.float32)[2 * entries.start : 2 * entries.stop] = result.view(-1)


@functools.cache
def const_alphas_kernel(
    dtype: torch.dtype, hidden: int, topk: int, per_element: bool, target: str = "cpu"
) -> TritonKernel:
    """Alphas of the entries of tokens [first_token, first_token + num_tokens).

    Ids [first_const, first_const + num_const) name constant experts. ``alphas`` (T, K, 2) is fp32; entries
    of other ids get 0, 0. ``alpha1`` and ``alpha2`` are (C, H) with ``per_element``, (C,) without;
    ``x`` (T, H) is read with ``per_element`` only.

    An NPU gets alphas that are numbers as words with the numbers' bits: `_alphas_of_blocks`.
    """
    check_float_dtype(dtype)
    check_hidden(hidden)
    check_positive("topk", topk)
    element = NAMES[dtype]
    in_blocks = not per_element and target != "cpu"
    known_by = named_features(per_element=per_element), element, {"hidden": hidden, "topk": topk}
    return TritonKernel(
        name="const_alphas",
        fn=_const_alphas_kernel,
        args=(
            Arg("x", f"*{element}", "in"),
            Arg("topk_idx", "*i32", "in"),
            *alike(f"*{element}", "alpha1 alpha2", "in"),
            Arg("alphas", "*i32" if in_blocks else "*fp32", "out"),
            *numbers("i32", "first_token num_tokens first_const num_const"),
        ),
        constants={
            "HIDDEN": hidden,
            "TOPK": topk,
            "PER_ELEMENT": per_element,
            "LANES": LANES if target == "cpu" else 0,
            "BLOCK": BLOCK,
        },
        fallback=_const_alphas_fallback,
        space=Space({"BLOCK": BLOCKS}, *known_by) if in_blocks else double_buffers(target, *known_by),
    )


def _inputs(s: Shape, r: Draw) -> Inputs:
    shape = (NUM_SPECIAL, s.hidden) if s.has("per_element") else (NUM_SPECIAL,)
    moved = r.tokens * (12 * s.topk + (6 * s.hidden if s.has("per_element") else 4))
    return {
        "x": r.normal(r.tokens, s.hidden, dtype=s.torch_dtype),
        "topk_idx": r.special_ids(),
        "alpha1": (r.normal(*shape) / s.hidden**0.5).to(s.torch_dtype),
        "alpha2": (r.normal(*shape) / s.hidden**0.5).to(s.torch_dtype),
        "alphas": blank(r.tokens, s.topk, 2, dtype=F32),
        "first_token": 0,
        "first_const": r.num_experts + 2 * NUM_SPECIAL,
        "num_const": NUM_SPECIAL,
        "bytes_moved": moved,
    }


FAMILIES = (Family("const_alphas", const_alphas_kernel, _inputs, main=("per_element",)),)
