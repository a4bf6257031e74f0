"""Outputs whose memory is used again once nobody holds them.

A fresh output of some megabytes costs more in page faults, and again in giving its pages back, than the
copy into it; and a fresh tensor of any size costs more than another view of one that is there. On an NPU
torch's caching allocator does what this does here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from moe_triton.backends.base import TensorSpec

KEPT_PER_SPEC = 4
# Specs that are kept at a time; the oldest goes. Batches of every size would otherwise add up.
MAX_SPECS = 64
# A memory's own holders: the tensor that the pool keeps, and that tensor's storage object.
OWN_HOLDERS = 2
# Tests that look at what was never written switch it off.
ENABLED = True


class OutputPool:
    """Tensors from recycled memory. What a user holds, through whatever view, is never handed out again."""

    def __init__(self) -> None:
        self._kept: dict[
            tuple[tuple[int, ...], torch.dtype], list[tuple[torch.Tensor, torch.UntypedStorage]]
        ] = {}
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Like ``torch.empty``: contiguous, contents undefined."""
        return self.empty_all([(tuple(shape), dtype)])[0]

    def empty_all(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Several tensors, from shape and dtype of each."""
        if not ENABLED:
            return [torch.empty(shape, dtype=dtype) for shape, dtype in specs]
        with self._lock:
            return [self._unused(spec) for spec in specs]

    def _unused(self, spec: TensorSpec) -> torch.Tensor:
        kept = self._kept.get(spec)
        if kept is None:
            kept = self._kept[spec] = []
            if len(self._kept) > MAX_SPECS:
                del self._kept[next(iter(self._kept))]
        for owner, storage in kept:
            if torch._C._storage_Use_Count(storage._cdata) == OWN_HOLDERS:
                return owner.data
        owner = torch.empty(spec[0], dtype=spec[1])
        if len(kept) < KEPT_PER_SPEC:
            kept.append((owner, owner.untyped_storage()))
        return owner.data
