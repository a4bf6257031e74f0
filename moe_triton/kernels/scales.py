"""Words of a received row, beside it in the output: what the kernels that move rows share."""

from __future__ import annotations

from moe_triton.kernels.language import tl, triton


@triton.jit
def copy_words(source, target, row, NUM_WORDS: tl.constexpr):
    """``NUM_WORDS`` words of row ``row``, such as its scales; nothing where rows have none."""
    # a tile also of one word: an AI core copies it beside the others, and waits for a load of a single word
    if NUM_WORDS > 0:
        words = tl.arange(0, NUM_WORDS)
        tl.store(target + row * NUM_WORDS + words, tl.load(source + words))
