"""Scales of a received row, beside it in the output: what the kernels that move rows share."""

from __future__ import annotations

from moe_triton.kernels.language import tl, triton


@triton.jit
def copy_scales(source, out_scales, row, NUM_SCALES: tl.constexpr):
    """The scales of output row ``row``; nothing where rows have none."""
    if NUM_SCALES == 1:
        tl.store(out_scales + row, tl.load(source))
    elif NUM_SCALES > 1:
        words = tl.arange(0, NUM_SCALES)
        tl.store(out_scales + row * NUM_SCALES + words, tl.load(source + words))
