"""Arithmetic whose order decides bits: quantisation, weighted sums, norms, softmax of two.

NumPy in fp32, one rounding per operation. Rows are (..., H).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from moe_triton.core.row_formats import INT8, INT8_128, RowFormat

Floats: TypeAlias = NDArray[np.float32]
Quantizer: TypeAlias = Callable[[Floats], tuple[NDArray[np.int8], Floats]]
Mask: TypeAlias = NDArray[np.bool_]

LANES = 32
BLOCK_ELEMENTS = 8
PARTIAL_BLOCK_ELEMENTS = {torch.bfloat16: BLOCK_ELEMENTS, torch.float16: 2 * BLOCK_ELEMENTS}
"""Elements that share a scale where the sums of a server travel as int8, by the dtype of results."""


def as_floats(tensor: torch.Tensor) -> Floats:
    """A tensor's values in fp32, which holds every bf16 and fp16 number."""
    array: Floats = tensor.float().numpy()
    return array


def rounded(values: Floats, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values to the nearest of a dtype, ties to even."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def quantize_row(row: torch.Tensor, row_format: RowFormat | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """One row to int8 and its dynamic scales (docs/operators.md, "Quantisation").

    ``s = 127 / max|x|; q = rint(x * s); scale = 1 / s``, each step rounded to fp32. A row whose maximum
    is 0 or so small that s overflows gives q = 0, scale = 0. A row with a NaN gives scale NaN, one with
    an infinity scale inf; q is then 0.

    Args:
        row: (H,) fp32.
        row_format: how it travels; None for int8 with one scale.

    Returns:
        (H,) int8 and fp32 scales, () or, of several, (n,).

    Examples:
        >>> q, scale = reference.quantize_row(x[0].float())
        >>> q.dtype, q.shape
        (torch.int8, torch.Size([7168]))
    """
    q, scales = QUANTIZERS[row_format or INT8](row.numpy()[None])
    return torch.from_numpy(q[0]), torch.tensor(scales[0])


def dequantize(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 values of quantised rows.

    Args:
        q: (..., H) int8.
        scales: fp32, one for each row or several: of the same leading sizes.

    Examples:
        >>> q, scale = reference.quantize_row(x[0].float())
        >>> rows = reference.dequantize(q[None], scale[None])
    """
    if scales.dim() < q.dim():
        return q.float() * scales[..., None]
    assert INT8_128.elements_per_scale is not None
    of_elements = scales.repeat_interleave(INT8_128.elements_per_scale, -1)
    return q.float() * of_elements[..., : q.shape[-1]]


def quantize_rows(rows: Floats) -> tuple[NDArray[np.int8], Floats]:
    """`quantize_row` for (n, H) at once: (n, H) and (n,)."""
    largest = np.abs(rows).max(axis=1, initial=0)  # NaN if there is one
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        s = np.float32(127) / largest
        has_codes = np.isfinite(largest) & np.isfinite(s)
        codes = np.rint(rows * s[:, None])
        scales = np.where(has_codes, np.float32(1) / s, np.where(np.isfinite(largest), 0, largest))
    return np.where(has_codes[:, None], codes, 0).astype(np.int8), scales.astype(np.float32)


def quantize_in_blocks(rows: Floats, elements: int) -> tuple[NDArray[np.int8], Floats]:
    """`quantize_rows` with a scale for every few elements of a row: (n, H) and (n, ceil(H / elements)).

    The last block of a row may be short: it is what it would be with zeros behind it.
    """
    num_rows, hidden = rows.shape
    padded = with_zeros(rows, elements)
    q, scales = quantize_rows(padded.reshape(-1, elements))
    return q.reshape(padded.shape)[:, :hidden], scales.reshape(num_rows, padded.shape[1] // elements)


def with_zeros(rows: Floats, unit: int) -> Floats:
    """(..., H) rows with zeros behind them, up to a multiple of a unit."""
    return np.pad(rows, [*[(0, 0)] * (rows.ndim - 1), (0, -rows.shape[-1] % unit)])


def _in_blocks(row_format: RowFormat) -> Quantizer:
    assert row_format.elements_per_scale is not None
    return partial(quantize_in_blocks, elements=row_format.elements_per_scale)


QUANTIZERS: dict[RowFormat, Quantizer] = {INT8: quantize_rows, INT8_128: _in_blocks(INT8_128)}


def quantize_blocks(rows: torch.Tensor, elements: int = BLOCK_ELEMENTS) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to int8 in blocks (docs/operators.md, "Results as int8 in blocks").

    Per block ``s = max|x| * f32(1/127); q = rint(half(x / s))``. A block of zeros has q = 0 and s = 0, one
    with a NaN scale NaN, otherwise one with an infinity scale inf; q is then 0.

    Args:
        rows: (n, H) bf16 or fp16.
        elements: of a block (B).

    Returns:
        (n, H) int8, and s (n, ceil(H/B)) rounded to the rows' dtype: a short last block counts as one.
    """
    num_rows, hidden = rows.shape
    padded = with_zeros(as_floats(rows), elements)
    blocks = padded.reshape(num_rows, padded.shape[1] // elements, elements)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    has_codes = np.isfinite(largest) & (largest > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        s = largest * np.float32(1 / 127)
        quotients = np.where(has_codes, blocks / s, np.float32(0)).astype(np.float16)
    codes = np.rint(quotients).astype(np.int8).reshape(padded.shape)[:, :hidden]
    return torch.from_numpy(codes), rounded(s[..., 0], rows.dtype)


def dequantize_blocks(q: torch.Tensor, scales: torch.Tensor, elements: int = BLOCK_ELEMENTS) -> torch.Tensor:
    """What the receiver makes of rows in blocks: ``f32(q) * f32(scale)``, rounded to the scales' dtype.

    Args:
        q: (..., H) int8.
        scales: (..., ceil(H/B)) bf16 or fp16, one for every B elements.
        elements: of a block (B).

    Returns:
        (..., H) in the dtype of ``scales``.
    """
    of_elements = scales.float().repeat_interleave(elements, -1)[..., : q.shape[-1]]
    return (q.float() * of_elements).to(scales.dtype)


def through_blocks(rows: torch.Tensor, elements: int = 8) -> torch.Tensor:
    """What is left of (n, H) rows that travelled as int8 in blocks: an infinity or a NaN spoils its block.

    Examples:
        >>> arrived = reference.through_blocks(x)
    """
    return dequantize_blocks(*quantize_blocks(rows, elements), elements)


def sum_of_row(values: Floats) -> Floats:
    """The sum over the last dimension, in the order that the library defines on a CPU.

    32 lanes: lane l sums the elements l, l + 32, ... ascending from 0; then the lanes are summed, ascending
    from 0. Where 32 does not divide their number, zeros follow.
    """
    values = with_zeros(values, LANES)
    lanes = np.zeros((*values.shape[:-1], LANES), dtype=np.float32)
    for start in range(0, values.shape[-1], LANES):
        lanes = lanes + values[..., start : start + LANES]
    total = np.zeros(values.shape[:-1], dtype=np.float32)
    for lane in range(LANES):
        total = total + lanes[..., lane]
    return total


def exp_of_nonpositive(x: Floats) -> Floats:
    """The library's exp for numbers up to 0: 2^n times a polynomial of the rest, in fp32 throughout.

    n is x / ln(2) to the nearest integer, and ln(2) is taken off in two parts. Numbers below -104 count as
    -104, which gives 0.
    """
    with np.errstate(invalid="ignore", under="ignore"):
        x = np.where(x < -104, np.float32(-104), x)
        n = np.rint(x * np.float32(1.44269504088896341))
        r = x - n * np.float32(0.693359375)
        r = r - n * np.float32(-2.12194440e-4)
        p = np.full_like(r, 1.9875691500e-4)
        for coefficient in (
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ):
            p = p * r + np.float32(coefficient)
        p = p * (r * r) + r + np.float32(1)
        power = np.where(np.isfinite(n), n, 0).astype(np.int32)
        return np.asarray(np.ldexp(p, power), dtype=np.float32)


def softmax_of_two(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """softmax((a, b)) in fp32."""
    with np.errstate(invalid="ignore"):
        largest = np.where(a > b, a, b)
        exp_a, exp_b = exp_of_nonpositive(a - largest), exp_of_nonpositive(b - largest)
        return exp_a / (exp_a + exp_b), exp_b / (exp_a + exp_b)


def weighted_sum(
    shape: tuple[int, int], entries: Iterable[tuple[Mask | None, Floats, Floats | None]]
) -> Floats:
    """Sums in fp32, entry after entry: each value times its weight, rounded, and then added.

    Args:
        shape: (n, H) of the sums.
        entries: in order; of each, (n,) bool for the sums that it is added to, None for all of them; (n, H)
            fp32 values; and (n,) fp32 weights or None.
    """
    sums = np.zeros(shape, dtype=np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for applies, values, weights in entries:
            weighted = values if weights is None else values * weights[:, None]
            if applies is not None:  # adding +0 changes no sum that started from +0
                weighted = np.where(applies[:, None], weighted, np.float32(0))
            sums = sums + weighted
    return sums


def add_rms_norm(
    sums: Floats, residual: torch.Tensor, gamma: torch.Tensor, norm_eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sum and its residual, normalised.

    ``xf = sum + residual; rstd = 1 / sqrt(sum(xf * xf * f32(1/H)) + eps); y = bf16(f32(bf16(xf * rstd)) *
    gamma)``, and ``x = bf16(xf)``.

    Args:
        sums: (n, H) fp32.
        residual: (n, H) bf16.
        gamma: (H,) bf16.
        norm_eps: rounded to fp32 before it is added.

    Returns:
        y (n, H) bf16, rstd (n,) fp32, x (n, H) bf16.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        xf = sums + as_floats(residual)
        mean_square = sum_of_row(xf * xf * np.float32(1 / xf.shape[1]))
        rstd = np.float32(1) / np.sqrt(mean_square + np.float32(norm_eps))
        normed = as_floats(rounded(xf * rstd[:, None], torch.bfloat16))
    y = rounded(normed * as_floats(gamma), torch.bfloat16)
    return y, torch.from_numpy(rstd), rounded(xf, torch.bfloat16)
