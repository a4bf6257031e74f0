"""Add rows: this rank's rows and those its tensor-parallel peer sent for them.

Shape symbols:
    A   rows there is room for
    H   hidden size, a multiple of 32

::

    out = f32(row) + f32(slot), rounded to nearest even
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.dtypes import NAMES
from moe_triton.core.kernel import Arg, TritonKernel, alike, chosen_args, numbers
from moe_triton.core.space import double_buffers, named_features
from moe_triton.kernels.cases import I32, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.checks import check_float_dtype, check_hidden
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.programs import part_of
from moe_triton.kernels.zones import ZONE, ZONE_STRIDE, in_zone, zone_offset


@triton.jit
def _add_rows_kernel(
    rows, slots, counts, out, zone, tp_rank, capacity, slot_stride, zone_stride, HIDDEN: tl.constexpr
):
    if zone is not None:
        slots += zone_offset(zone, zone_stride)
    # a count that came from another rank must not lead past the end
    num_rows = tl.minimum(tl.maximum(tl.load(counts + tp_rank), 0), capacity)
    begin, end = part_of(num_rows)
    cols = tl.arange(0, HIDDEN)
    for i in range(begin, end):
        row = tl.cast(i, tl.int64)
        own = tl.load(rows + row * HIDDEN + cols).to(tl.float32)
        theirs = tl.load(slots + row * slot_stride + cols).to(tl.float32)
        tl.store(out + row * HIDDEN + cols, (own + theirs).to(out.dtype.element_ty))


@fallback
def _add_rows_fallback(a: Arguments) -> None:
    slots = in_zone(a.slots, a.zone, a.zone_stride)
    num_rows = min(max(int(a.counts[a.tp_rank]), 0), a.capacity)
    if not num_rows:
        return
    own = a.rows[: num_rows * a.HIDDEN].view(num_rows, a.HIDDEN)
    theirs = slots.as_strided((num_rows, a.HIDDEN), (a.slot_stride, 1), slots.storage_offset())
    a.out[: num_rows * a.HIDDEN] = (own.float() + theirs.float()).to(a.out.dtype).view(-1)


@functools.cache
def add_rows_kernel(
    dtype: torch.dtype, hidden: int, target: str = "cpu", zoned: bool = False
) -> TritonKernel:
    """Add rows [0, n), n being ``counts[tp_rank]``, at least 0 and at most ``capacity``.

    ``rows`` and ``out`` are contiguous, a row of ``slots`` starts every ``slot_stride`` elements. The same
    source serves every target. With ``zoned``, ``slots`` is zone 0's; the rows are in the zone that ``zone``
    (1,) names, ``zone_stride`` elements from one to the next.
    """
    check_float_dtype(dtype)
    check_hidden(hidden)
    element = NAMES[dtype]
    args, absent = chosen_args(
        (True, alike(f"*{element}", "rows slots", "in")),
        (True, (Arg("counts", "*i32", "in"), Arg("out", f"*{element}", "out"))),
        (zoned, ZONE),
        (True, (*numbers("i32", "tp_rank capacity"), Arg("slot_stride", "i64", "value"))),
        (zoned, ZONE_STRIDE),
    )
    return TritonKernel(
        name="add_rows",
        fn=_add_rows_kernel,
        args=args,
        constants={**absent, "HIDDEN": hidden},
        fallback=_add_rows_fallback,
        space=double_buffers(target, named_features(zoned=zoned), element, {"hidden": hidden}),
    )


def _inputs(s: Shape, r: Draw) -> Inputs:
    return {
        "rows": r.rows(s.hidden, s.torch_dtype),
        "slots": r.rows(s.hidden + 256, s.torch_dtype),
        "counts": torch.tensor([r.tokens - 1, 3], dtype=I32),
        "out": blank(r.tokens, s.hidden, dtype=s.torch_dtype),
        "tp_rank": 0,
        "capacity": r.tokens,
        "slot_stride": s.hidden + 256,
        "bytes_moved": (r.tokens - 1) * 6 * s.hidden,
    }


FAMILIES = (Family("add_rows", add_rows_kernel, _inputs),)
