"""Recycled memory for outputs.

A fresh output of some megabytes costs more in page faults, and again when its pages are returned, than the
copy into it; and a fresh tensor of any size costs more than one from existing memory. On an NPU torch's
caching allocator does the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_triton.backends.base import TensorSpec
from moe_triton.backends.cpu.extension import extension, new_pool

# Switched off by tests that look at memory that was never written.
ENABLED = True


class OutputPool:
    """Tensors from recycled memory. Memory that a user still holds, through any view, is not reused.

    Without the extension (`moe_triton.backends.cpu.extension`) they are torch's own.

    Attributes:
        native: the extension's pool, or None.
    """

    def __init__(self) -> None:
        module = extension()
        self.native = new_pool(module) if module else None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Like ``torch.empty``: contiguous, contents undefined."""
        return self.empty_all([(tuple(shape), dtype)])[0]

    def empty_all(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Several tensors, from shape and dtype of each."""
        if self.native is None or not ENABLED:
            return [torch.empty(shape, dtype=dtype) for shape, dtype in specs]
        made: list[torch.Tensor] = self.native.empty_all(specs)
        return made
