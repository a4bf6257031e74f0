"""memcpy of the bytes that a scheme moves: how fast this machine is at the moment of the measurement.

Each rank copies its own share, a row at a time and in any order as the schemes do, between buffers of its own
that together are as large as what the scheme reads and writes. Nothing else touches them, so that between two
runs all other routes have passed through the caches: what is small enough to stay there does so for the
schemes too. Their pages are mapped beforehand, as those of the windows are.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

import numpy as np

from benchmarks.compare.routes.base import Inputs, Route
from benchmarks.compare.traffic import Scheme, Traffic, combine_traffic, dispatch_traffic

# What all ranks copy together and no cache holds: from here on it does not matter whether another copy has
# just used the same memory.
SHARED_FROM_BYTES = 128 << 20


class Arena:
    """Memory to copy from and to, for all copies of a rank: memory of their own, unless it is large."""

    def __init__(self) -> None:
        self._shared = np.empty(0, np.uint8)

    def take(self, num_bytes: int, num_ranks: int) -> Any:
        """So much, mapped; every rank takes about as much."""
        if num_bytes * num_ranks < SHARED_FROM_BYTES:
            return _mapped(num_bytes)
        if self._shared.size < num_bytes:
            self._shared = _mapped(num_bytes)
        return self._shared[:num_bytes]


def _mapped(num_bytes: int) -> Any:
    """Memory on pages like those of the windows: whether malloc's lies on huge ones is luck."""
    memory = mmap.mmap(-1, num_bytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages has nothing to refuse
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    mapped = np.frombuffer(memory, np.uint8)
    mapped.fill(1)
    return mapped


class _Copy:
    """Copies some memory's first half to its second one, in rows or at once."""

    def __init__(self, traffic: Traffic, arena: Arena, num_ranks: int, whole: bool) -> None:
        rows = max(1, round(traffic.copied / traffic.row))
        memory = arena.take(2 * rows * traffic.row, num_ranks)
        self._source, self._target = memory.reshape(2, rows, traffic.row)
        # As the schemes find them: in order, a good deal of the next row is there before it is asked for.
        self._order = None if whole else np.random.default_rng(rows).permutation(rows)
        self._addresses = self._target.ctypes.data, self._source.ctypes.data, self._source.nbytes

    def run(self) -> None:
        if self._order is None:
            ctypes.memmove(*self._addresses)
        else:
            # One memmove per row. "clip" because "raise" would copy through a buffer.
            np.take(self._source, self._order, axis=0, out=self._target, mode="clip")


class Memcpy(Route):
    """Copies what a scheme's dispatch and combine move.

    Args:
        whole: in one piece, for which libc may choose stores that bypass the caches.
    """

    def __init__(
        self, inputs: Inputs, scheme: Scheme, quantize: str, arena: Arena, whole: bool = False
    ) -> None:
        sizes = {
            "tokens": inputs.num_tokens,
            "sent": inputs.num_sent,
            "received": inputs.num_received,
            "kept": inputs.num_kept,
            "hidden": inputs.hidden,
        }
        how = arena, inputs.num_ranks, whole
        self._dispatch = _Copy(dispatch_traffic(scheme, quantize=quantize, **sizes), *how)
        self._combine = _Copy(combine_traffic(scheme, **sizes), *how)

    def dispatch(self) -> None:
        """Copies as many bytes as the scheme's dispatch moves."""
        self._dispatch.run()

    def combine(self) -> None:
        """Copies as many bytes as the scheme's combine moves."""
        self._combine.run()
