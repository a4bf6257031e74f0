"""Rules on sizes that the factories of kernels share, and what launches one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import TritonKernel

Launch = Callable[[TritonKernel, Sequence[torch.Tensor | int], int], None]
"""Runs a kernel: ``launch(kernel, arguments in the kernel's order, number of programs)``."""


def check_hidden(hidden: int) -> None:
    """Refuse hidden sizes that leave part of a 32-byte unit."""
    if hidden < 32 or hidden % 32:
        raise ArgumentError(
            "hidden", hidden, "must be a positive multiple of 32", "Pad the hidden size to the next multiple."
        )


def check_float_dtype(dtype: torch.dtype) -> None:
    """Refuse what tokens are not made of."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise ArgumentError(
            "dtype", dtype, "must be torch.bfloat16 or torch.float16", "Convert the tokens first."
        )
