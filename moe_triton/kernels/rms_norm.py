"""RMS norm: a weighted sum added to its residual and normalised.

Shape symbols:
    T   tokens of this rank
    H   hidden size, a multiple of 32

All in fp32 where no other format is named::

    xf   = acc + residual
    x    = bf16(xf)
    rstd = 1 / sqrt(sum(xf * xf * f32(1/H)) + eps)
    y    = bf16(f32(bf16(xf * rstd)) * gamma)

`1/H` is rounded to fp32 first: dividing by H gives other bits in one row of five. Square root and
divisions are correctly rounded.

The order of the sum decides the last bit, and is ours to define. On a CPU, 32 lanes: lane l sums elements
l, l + 32, ... ascending from 0, then the lanes are summed ascending from 0. An AI core sums in the order of
its reduction instruction.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.kernel import Arg, TritonKernel, alike, chosen_args, numbers
from moe_triton.core.space import double_buffers, named_features
from moe_triton.kernels.cases import F32, I32, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.checks import check_hidden
from moe_triton.kernels.clear import clear_row, clear_tile
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.programs import part_of
from moe_triton.kernels.zones import TURNED, ZONE, turn_cell, turn_zone
from moe_triton.reference.arithmetic import LANES, add_rms_norm


@triton.jit
def sum_row(row):
    """The sum of a row of shape (H,), or (H/LANES, LANES): the latter is summed lane by lane first."""
    return tl.sum(tl.sum(row, 0), 0) if len(row.shape) == 2 else tl.sum(row, 0)


@triton.jit
def row_columns(HIDDEN: tl.constexpr, LANES: tl.constexpr):
    """Column numbers in the shape that `sum_row` takes: (HIDDEN,) where there are no lanes."""
    if LANES:
        cols = tl.arange(0, HIDDEN // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    else:
        cols = tl.arange(0, HIDDEN)
    return cols


@triton.jit
def _rms_norm_kernel(
    acc, residual, gamma, active_index, eps, y, rstd, x_out, zone, turned,
    first_token, num_tokens,
    HIDDEN: tl.constexpr, RECIPROCAL: tl.constexpr, LANES: tl.constexpr, CLEAR_TILE: tl.constexpr,
):  # fmt: skip
    begin, end = part_of(num_tokens)
    cols = row_columns(HIDDEN, LANES)
    for i in range(begin, end):
        token = (first_token + i).to(tl.int64)
        number = 0
        if active_index is not None:
            number = tl.load(active_index + token)
        if number >= 0:
            at = token * HIDDEN + cols
            xf = tl.load(acc + at) + tl.load(residual + at).to(tl.float32)
            inverse = 1.0 / tl.sqrt(sum_row(xf * xf * RECIPROCAL) + tl.load(eps))
            tl.store(rstd + token, inverse)
            tl.store(x_out + at, xf.to(x_out.dtype.element_ty))
            normed = (xf * inverse).to(y.dtype.element_ty).to(tl.float32)
            normed = normed * tl.load(gamma + cols).to(tl.float32)
            tl.store(y + at, normed.to(y.dtype.element_ty))
        elif active_index is not None:
            tl.store(rstd + token, 0.0)
            clear_row(x_out + token * HIDDEN, number, HIDDEN, CLEAR_TILE)
            clear_row(y + token * HIDDEN, number, HIDDEN, CLEAR_TILE)
    turn_zone(zone, turned)


@fallback
def _rms_norm_fallback(a: Arguments) -> None:
    turn_cell(a.zone, a.turned)
    tokens = torch.arange(a.first_token, a.first_token + a.num_tokens)
    end = (a.first_token + a.num_tokens) * a.HIDDEN

    def rows(flat: torch.Tensor) -> torch.Tensor:
        return flat[:end].view(-1, a.HIDDEN)

    if a.active_index is not None:
        left_out = a.active_index[a.first_token : a.first_token + a.num_tokens] < 0
        for written in (rows(a.y), a.rstd, rows(a.x_out)):
            written[tokens[left_out]] = 0
        tokens = tokens[~left_out]
    if not len(tokens):
        return
    sums, weights = rows(a.acc)[tokens].numpy(), a.gamma[: a.HIDDEN]
    rows(a.y)[tokens], a.rstd[tokens], rows(a.x_out)[tokens] = add_rms_norm(
        sums, rows(a.residual)[tokens], weights, float(a.eps[0])
    )


@functools.cache
def rms_norm_kernel(
    hidden: int, target: str = "cpu", *, masked: bool = False, turns: bool = False
) -> TritonKernel:
    """Normalise tokens [first_token, first_token + num_tokens).

    ``acc`` (T, H) is fp32; ``residual`` (T, H), ``gamma`` (H,), ``y`` and ``x_out`` (T, H) are bf16;
    ``eps`` (1,) and ``rstd`` (T,) are fp32. With ``masked``, tokens whose entry of ``active_index`` (T,) is
    negative get zeros. With ``turns``, the operator ends here: ``turned`` (1,) becomes the zone that
    ``zone`` (1,) does not name.
    """
    check_hidden(hidden)

    def bytes_moved(*, num_tokens: int, **_: int) -> int:
        return num_tokens * (10 * hidden + 4 + 4 * masked)

    args, absent = chosen_args(
        (True, (Arg("acc", "*fp32", "in"), *alike("*bf16", "residual gamma", "in"))),
        (masked, Arg("active_index", "*i32", "in")),
        (True, (Arg("eps", "*fp32", "in"), Arg("y", "*bf16", "out"))),
        (True, (Arg("rstd", "*fp32", "out"), Arg("x_out", "*bf16", "out"))),
        (turns, (ZONE, TURNED)),
        (True, numbers("i32", "first_token num_tokens")),
    )
    return TritonKernel(
        name="rms_norm",
        fn=_rms_norm_kernel,
        args=args,
        constants={
            **absent,
            "HIDDEN": hidden,
            "RECIPROCAL": 1.0 / hidden,
            "LANES": LANES if target == "cpu" else 0,
            "CLEAR_TILE": clear_tile(hidden, target),
        },
        fallback=_rms_norm_fallback,
        bytes_moved=bytes_moved,
        space=double_buffers(target, named_features(masked=masked, turns=turns), sizes={"hidden": hidden}),
    )


BF16 = torch.bfloat16


def _inputs(s: Shape, r: Draw) -> Inputs:
    return {
        "acc": r.normal(r.tokens, s.hidden),
        "residual": r.normal(r.tokens, s.hidden, dtype=BF16),
        "gamma": r.normal(s.hidden, dtype=BF16),
        "active_index": r.active_index(),
        "eps": torch.tensor([1e-6]),
        "y": blank(r.tokens, s.hidden, dtype=BF16),
        "rstd": blank(r.tokens, dtype=F32),
        "x_out": blank(r.tokens, s.hidden, dtype=BF16),
        "zone": torch.ones(1, dtype=I32),
        "turned": blank(1),
        **r.range,
    }


FAMILIES = (Family("rms_norm", rms_norm_kernel, _inputs, streams=True),)
