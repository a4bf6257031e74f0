"""Zeros for rows that a kernel leaves out of what it computes."""

from __future__ import annotations

from moe_triton.kernels.language import tl, triton

MOST_COLUMNS = 1024
"""The most columns that one store on an AI core clears: a kernel's own rows leave its buffer little room."""


@triton.jit
def clear_row(row, number, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Columns [0, COLUMNS) of a row become zeros, TILE at a time.

    ``number`` is any integer that the kernel has loaded: no constant of bf16 may be left in a CPU's code.
    """
    zero = number.to(tl.float32) * 0.0
    zeros = (tl.zeros((TILE,), tl.float32) + zero * zero).to(row.dtype.element_ty)
    for start in range(0, COLUMNS, TILE):
        tl.store(row + start + tl.arange(0, TILE), zeros)


def clear_tile(columns: int, target: str) -> int:
    """How many columns to clear at a time: all on a CPU, elsewhere an even part of 1024 at most."""
    units = columns // 32
    fewest = 1 if target == "cpu" else -(-columns // MOST_COLUMNS)
    return columns // next(n for n in range(fewest, units + 1) if units % n == 0)
