"""Outputs whose memory is used again once nobody holds them.

A fresh output of some megabytes costs more in page faults, and again in giving its pages back, than the
copy into it. On an NPU torch's caching allocator does what this does here.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

from moe_triton.backends.base import TensorSpec

KEPT_PER_SIZE = 4
# Below this the allocator of the process recycles by itself.
POOLED_BYTES = 1 << 16


class OutputPool:
    """Tensors from recycled memory. What a user holds, through whatever view, is never handed out again."""

    def __init__(self) -> None:
        self._storages: dict[int, list[torch.UntypedStorage]] = {}
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Like ``torch.empty``: contiguous, contents undefined."""
        return self.empty_all([(tuple(shape), dtype, dtype.itemsize * math.prod(shape))])[0]

    def empty_all(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Several tensors, from shape, dtype and bytes of each."""
        made, smallest, empty = [], POOLED_BYTES, torch.empty
        with self._lock:
            for shape, dtype, num_bytes in specs:
                if num_bytes < smallest:
                    made.append(empty(shape, dtype=dtype))
                else:
                    out = empty(0, dtype=dtype)
                    made.append(out.set_(self._unused(num_bytes), 0, shape))  # type: ignore[call-overload]
        return made

    def _unused(self, num_bytes: int) -> torch.UntypedStorage:
        kept = self._storages.setdefault(num_bytes, [])
        for storage in kept:
            if _holders(storage) == 1:
                return storage
        fresh: torch.UntypedStorage = torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]
        if len(kept) < KEPT_PER_SIZE:
            kept.append(fresh)
        return fresh


def _holders(storage: torch.UntypedStorage) -> int:
    """Tensors and storages that share this memory, the pool's own included."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count
