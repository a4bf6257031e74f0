"""Block quantise: rows to int8 with a scale for every 8 elements, for results that travel as int8.

Shape symbols:
    A   rows there is room for
    H   hidden size, a multiple of 32
    B   elements of a block: 8, or 16 where a server's sums are fp16

For a block x of B elements, all in fp32 unless said otherwise::

    s = max|x| * f32(1/127);  q = rint(half(x / s));  scale = s rounded to the rows' dtype

`half` rounds to fp16, and shows in one q of seventy. q is of the unrounded s. A block of zeros has q = 0 and
scale = 0. A block with a NaN has scale NaN, otherwise one with an inf has scale inf; either has q = 0
throughout.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.dtypes import NAMES
from moe_triton.core.kernel import Arg, TritonKernel, chosen_args, numbers
from moe_triton.core.plan import Placeholder
from moe_triton.core.records import ORIGIN
from moe_triton.core.space import double_buffers
from moe_triton.kernels.cases import I8, I32, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.checks import check_float_dtype, check_hidden
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.pack import peak_of
from moe_triton.kernels.programs import part_of
from moe_triton.reference.arithmetic import BLOCK_ELEMENTS, PARTIAL_BLOCK_ELEMENTS, quantize_blocks


@triton.jit
def _quotients(row, peaks, s):
    """x / s, near enough for the same codes, with one division a block.

    x * (127 / max) leads to the codes of the quotient for all pairs of numbers of either format, and where s
    is no normal number and so coarse, 127x * (1 / 127s) does, in units that do not overflow. No bound says
    so: tests/kernels/test_block_quantize.py tries every pair.
    """
    inverse = 127.0 / peaks
    x = row.to(tl.float32)
    if row.dtype == tl.bfloat16:  # the blocks of fp16 have no such s
        is_coarse = s < 1.1754943508222875e-38  # 2^-126
        unit = 2342736497769005252608.0  # 127 * 2^64
        inverse = tl.where(is_coarse, 1.0 / (s * unit), inverse)
        x = x * tl.where(is_coarse, unit, 1.0)[:, None]
    return x * inverse[:, None]


@triton.jit
def _is_ordinary(peaks):
    """Whether no s of a row is so small that it is coarse, but for those of zeros."""
    least = tl.min((peaks.to(tl.int32, bitcast=True) - 1) & 0x7FFFFFFF, 0)  # 0 becomes the largest
    return least >= 0x04000000  # of 2^-119, whose s is a normal number


@triton.jit
def _near_half(q):
    """q to the 11 bits of fp16, in three operations, where a CPU takes four to convert there and back.

    A tie may go the wrong way. No code shows it, as the same tests find out.
    """
    many = q * 8193.0  # 2^13 + 1
    return many - (many - q)


@triton.jit
def _block_quantize_kernel(
    rows, origins, active_index, recv_offsets, packed, packed_scales,
    num_entries, capacity, row_stride, scale_stride, first_token, end_token,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, FLOAT_MAX: tl.constexpr, ORIGIN_WORDS: tl.constexpr,
    TOKEN_WORD: tl.constexpr,
):  # fmt: skip
    num_rows = capacity
    if recv_offsets is not None:
        # a count that came from another rank must not lead past the end
        num_rows = tl.minimum(tl.maximum(tl.load(recv_offsets + num_entries - 1), 0), capacity)
    begin, end = part_of(num_rows)
    for i in range(begin, end):
        is_wanted = True
        if origins is not None:
            token = tl.load(origins + i * ORIGIN_WORDS + TOKEN_WORD)
            is_wanted = (token >= first_token) & (token < end_token)
        elif active_index is not None:
            is_wanted = tl.load(active_index + i) >= 0
        if is_wanted:
            blocks = tl.arange(0, HIDDEN // BLOCK)
            cols = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            at = tl.cast(i, tl.int64)
            row = tl.load(rows + at * HIDDEN + cols)
            peaks = peak_of(row, FLOAT_MAX)
            s = peaks * 0.007874015748031496
            if not FLOAT_MAX:  # before all that could take the memory of the maxima
                tl.store(packed_scales + at * scale_stride + blocks, s.to(packed_scales.dtype.element_ty))
            if False if FLOAT_MAX else _is_ordinary(peaks) if row.dtype == tl.bfloat16 else True:
                q = _near_half(row.to(tl.float32) * (127.0 / peaks)[:, None])
                # the sum's low byte is the integer; that of a NaN is 0, as either format's end in zeros
                q = (q + 12582912.0) - 12582912.0
                tl.store(packed + at * row_stride + cols, tl.cast(q, tl.int8, overflow_mode="saturate"))
            else:
                q = _quotients(row, peaks, s)
                # where s is 0, inf or NaN, a quotient is 0 or NaN
                q = tl.where(q == q, q, 0.0).to(tl.float16).to(tl.float32)
                # a CPU's other branch must not have the same number, which would be no constant in either
                MAGIC: tl.constexpr = 12582912.0 if FLOAT_MAX else 12583168.0
                q = (q + MAGIC) - MAGIC
                tl.store(packed + at * row_stride + cols, tl.cast(q, tl.int8, overflow_mode="saturate"))
            if FLOAT_MAX:
                tl.store(packed_scales + at * scale_stride + blocks, s.to(packed_scales.dtype.element_ty))


@fallback
def _block_quantize_fallback(a: Arguments) -> None:
    num_rows = a.capacity
    if a.recv_offsets is not None:
        num_rows = min(max(int(a.recv_offsets[a.num_entries - 1]), 0), a.capacity)
    if not num_rows:
        return
    q, scales = quantize_blocks(a.rows[: num_rows * a.HIDDEN].view(num_rows, a.HIDDEN), a.BLOCK)
    wanted = torch.ones(num_rows, dtype=torch.bool)
    if a.origins is not None:
        tokens = a.origins[: num_rows * a.ORIGIN_WORDS].view(num_rows, a.ORIGIN_WORDS)[:, a.TOKEN_WORD]
        wanted = (tokens >= a.first_token) & (tokens < a.end_token)
    elif a.active_index is not None:
        wanted = a.active_index[:num_rows] >= 0
    a.packed.as_strided(q.shape, (a.row_stride, 1))[wanted] = q[wanted]
    a.packed_scales.as_strided(scales.shape, (a.scale_stride, 1))[wanted] = scales[wanted]


@functools.cache
def block_quantize_kernel(
    dtype: torch.dtype,
    hidden: int,
    target: str = "cpu",
    parted: bool = False,
    masked: bool = False,
    block: int = BLOCK_ELEMENTS,
) -> TritonKernel:
    """Quantise rows [0, n), n being ``recv_offsets[num_entries - 1]``, at least 0 and at most ``capacity``.

    ``rows`` is contiguous. ``packed`` and ``packed_scales`` are where row 0 and its scales go; the strides,
    in elements of each pointer's type, lead from one packed row to the next. Where ``parted``, only rows
    whose token, by ``origins`` (A, 3), is at least ``first_token`` and less than ``end_token``. Where
    ``masked``, n is ``capacity``, and rows are left out for which ``active_index`` (A,) is negative.
    ``block`` elements share a scale.
    """
    check_float_dtype(dtype)
    check_hidden(hidden)
    element = NAMES[dtype]
    packed_scales = Arg("packed_scales", f"*{element}", "out", interleaved_with="packed")
    args, absent = chosen_args(
        (True, Arg("rows", f"*{element}", "in")),
        (parted, Arg("origins", "*i32", "in")),
        (masked, Arg("active_index", "*i32", "in")),
        (not masked, Arg("recv_offsets", "*i32", "in")),
        (True, (Arg("packed", "*i8", "out"), packed_scales)),
        (not masked, Arg("num_entries", "i32", "value")),
        (True, (Arg("capacity", "i32", "value"), *numbers("i64", "row_stride scale_stride"))),
        (parted, numbers("i32", "first_token end_token")),
    )
    return TritonKernel(
        name=f"block_quantize{'_part' * parted}{'_active' * masked}",
        fn=_block_quantize_kernel,
        args=args,
        constants={
            **absent,
            "HIDDEN": hidden,
            "BLOCK": block,
            "FLOAT_MAX": target != "cpu",
            "ORIGIN_WORDS": ORIGIN.num_words,
            "TOKEN_WORD": ORIGIN.word("token"),
        },
        fallback=_block_quantize_fallback,
        space=double_buffers(target, dtype=element, sizes={"hidden": hidden}),
    )


def _inputs(s: Shape, r: Draw) -> Inputs:
    stride = s.blocks_bytes
    return {
        "rows": r.rows(s.hidden, s.torch_dtype),
        "origins": torch.stack([torch.arange(r.tokens, dtype=I32)] * ORIGIN.num_words, 1),
        "first_token": r.range["first_token"],
        "end_token": r.tokens,
        "active_index": r.active_index(),
        "recv_offsets": torch.tensor([1, r.tokens - 1], dtype=I32),
        "packed": blank(r.tokens, stride, dtype=I8),
        "packed_scales": Placeholder("packed", s.hidden),
        "num_entries": 2,
        "capacity": r.tokens,
        "row_stride": stride,
        "scale_stride": stride // 2,
        "bytes_moved": (r.tokens - 1) * (3 * s.hidden + s.hidden // 4),
    }


def _build_part(s: Shape) -> TritonKernel:
    return block_quantize_kernel(s.torch_dtype, s.hidden, s.target, parted=True)


def _build_active(s: Shape) -> TritonKernel:
    block = PARTIAL_BLOCK_ELEMENTS[s.torch_dtype]
    return block_quantize_kernel(s.torch_dtype, s.hidden, s.target, masked=True, block=block)


FAMILIES = (
    Family(
        "block_quantize",
        block_quantize_kernel,
        _inputs,
        lambda s: block_quantize_kernel(s.torch_dtype, s.hidden, s.target),
        axes=("dtype", "hidden"),
    ),
    Family("block_quantize_part", block_quantize_kernel, _inputs, _build_part, axes=("dtype", "hidden")),
    Family("block_quantize_active", block_quantize_kernel, _inputs, _build_active, axes=("dtype", "hidden")),
)
