"""Copies of the CPU back end: the calling thread makes them, at once."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

import numpy as np
import torch

from moe_triton.backends.cpu import native

LEAST_STREAMED_BYTES = 1 << 16  # tables of a few KB are read in the next dispatch


class Span:
    """Bytes in memory, and parts of them by ``span[begin:end]``: less work than a tensor's or an array's.

    Args:
        address: of the first one.
        length: how many.
        kept: what has the memory.
    """

    __slots__ = "address", "kept", "length"

    def __init__(self, address: int, length: int, kept: torch.Tensor) -> None:
        self.address, self.length, self.kept = address, length, kept

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> Span:
        begin, end = part.start or 0, self.length if part.stop is None else min(part.stop, self.length)
        assert begin >= 0, "parts are counted from the front"
        assert end >= 0, "parts are counted from the front"
        assert part.step is None, "parts have no gaps"
        return Span(self.address + begin, max(end - begin, 0), self.kept)


class CpuSideCopies:
    """See `moe_triton.core.side_copies.SideCopies`."""

    is_asynchronous = False
    fence: Callable[[], None] | None

    def __init__(self) -> None:
        self._stream = native.library().moe_stream
        # On x86-64 only a load passes an earlier store, which nothing relies on here.
        is_ordered = platform.machine() in ("x86_64", "AMD64")
        self.fence = None if is_ordered else native.library().moe_fence

    def view(self, data: torch.Tensor) -> Span:
        """Its address."""
        return Span(data.data_ptr(), data.numel(), data)

    def copy(self, to: Span, source: Span) -> None:
        """Copies past the caches: they are the steps', and the next step does not read what moves."""
        assert to.length == source.length
        self._stream(to.address, source.address, to.length)

    def copy_in_turn(self, to: Span, source: Span) -> None:
        """Copies past the caches what they would hardly hold."""
        if to.length < LEAST_STREAMED_BYTES:
            ctypes.memmove(to.address, source.address, to.length)
        else:
            self._stream(to.address, source.address, to.length)

    def copy_elements(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies by NumPy: torch brings in its threads, and waits for them on busy cores."""
        np.copyto(to.numpy(), source.numpy())

    def follow(self, stream: object = None) -> None:
        """Nothing: what was asked for is done."""

    def wait(self) -> None:
        """Nothing: they are done."""

    def mark(self) -> Callable[[], bool]:
        """Always done."""
        return _is_done

    def mark_in_turn(self) -> Callable[[], bool]:
        """Always done."""
        return _is_done

    def is_capturing(self) -> bool:
        """Never."""
        return False


def _is_done() -> bool:
    return True
