"""Recycled memory for outputs.

A fresh output of some megabytes costs more in page faults, and again when its pages are returned, than the
copy into it; and a fresh tensor of any size costs more than one from existing memory. On an NPU torch's
caching allocator does the same.

What is kept is bounded (`moe_triton.core.kept_memory`), but never less than what the latest calls have had in
use at once: a limit that they exceed would cost each of them its page faults.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_triton.backends.base import TensorSpec
from moe_triton.backends.cpu.extension import extension, new_pool
from moe_triton.core.checks import CPU
from moe_triton.core.kept_memory import kept_bytes

# Switched off by tests that look at memory that was never written.
ENABLED = True


class OutputPool:
    """Tensors from recycled memory. Memory that a user still holds, through any view, is not reused.

    Without the extension (`moe_triton.backends.cpu.extension`) they are torch's own.

    Args:
        limit: bytes that wait to be used again, at most; None for what `kept_bytes` says.

    Attributes:
        native: the extension's pool, or None.
    """

    def __init__(self, limit: int | None = None) -> None:
        module, limit = extension(), kept_bytes() if limit is None else limit
        self.native = new_pool(module, limit) if module else None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Like ``torch.empty``: contiguous, contents undefined."""
        if dtype == torch.bool:  # which native calls neither take nor make
            return self.empty(shape, torch.int8).view(torch.bool)
        return self.empty_all([(tuple(shape), dtype)])[0]

    def empty_all(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Several tensors, from shape and dtype of each."""
        if self.native is None or not ENABLED:
            return [torch.empty(shape, dtype=dtype, device=CPU) for shape, dtype in specs]
        made: list[torch.Tensor] = self.native.empty_all(specs)
        return made

    def close(self) -> None:
        """Gives back what waits to be used again. Tensors that somebody holds go with their holder."""
        if self.native is not None:
            self.native.close()
