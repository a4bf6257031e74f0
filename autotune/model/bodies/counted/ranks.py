"""`Ranks`: the memory of a group's ranks, and launches on it."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import numpy as np

from autotune.model.bodies.counted.library import (
    RECORD,
    Contents,
    CountedError,
    Mode,
    Writers,
    counting_library,
)
from moe_triton.core.kernel import AscendCKernel
from moe_triton.core.reach import TOKEN_SHIFT

FIRST_SEGMENT = 4096
"""The number of the first segment that an argument points to; those before it are windows."""


@dataclass(frozen=True)
class Launching:
    """A launch that is run.

    Attributes:
        kernel: which.
        blocks: of it.
        number: among the launches of its plan.
    """

    kernel: AscendCKernel
    blocks: int
    number: int


class Ranks:
    """Ranks of a group, with nothing in their memory.

    Args:
        num_ranks: how many.
    """

    def __init__(self, num_ranks: int) -> None:
        self._library = counting_library()
        self._group = self._library.open(num_ranks)
        self._given: list[np.ndarray] = []
        weakref.finalize(self, self._library.close, self._group)

    def take(self, rank: int) -> None:
        """From now on a rank's window takes what others write to it; until then that is dropped."""
        self._library.take(self._group, rank)

    def give(self, rank: int, segment: int, contents: Contents, values: np.ndarray | None = None) -> None:
        """Says what stands in a segment of a rank's memory; zeros otherwise."""
        if values is None:
            self._library.give(self._group, rank, segment, contents, None, 0)
            return
        values = np.ascontiguousarray(values)
        self._given.append(values)
        self._library.give(self._group, rank, segment, contents, values.ctypes.data, values.nbytes)

    def read(self, rank: int, address: int, count: int) -> np.ndarray:
        """int32 in a rank's memory: so many, or up to the first one that nobody knows."""
        values = np.zeros(count, np.int32)
        return values[: self._library.read(self._group, rank, address, count, values.ctypes.data)]

    def arrived(self, rank: int) -> tuple[int, int]:
        """Bytes that others have written to a rank's window, and posted to it, since the last call."""
        counts = np.zeros(2, np.uint64)
        self._library.arrived(self._group, rank, counts.ctypes.data, counts.ctypes.data + counts.itemsize)
        return int(counts[0]), int(counts[1])

    def run(self, rank: int, launch: Launching, words: np.ndarray, mode: Mode) -> None:
        """Runs a launch.

        Raises:
            CountedError: it waits for what nobody sends, or does what depends on memory that nobody knows.
            ToolchainError: the build does not have the kernel, or with other arguments.
        """
        launcher = self._library.launcher(launch.kernel)
        self._library.begin(self._group, rank, mode, launch.number)
        if launcher(launch.blocks, None, words.ctypes.data):
            raise CountedError(f"{launch.kernel.name} on rank {rank}: {self._library.last_error}")

    def waits(self) -> bool:
        """Whether the last launch, a blind one, has looked in vain and would look again."""
        return bool(self._library.waits(self._group))

    def awaited(self) -> Writers:
        """Who stored what the last launch looked at in its window."""
        words = ctypes.c_void_p()
        count = self._library.awaited(self._group, ctypes.byref(words))
        return Writers.of(np.frombuffer(ctypes.string_at(words, 8 * count) if count else b"", np.uint64))

    def log(self, blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """What the blocks of the last launch did: (N,) `RECORD`, and where each block's end."""
        records = ctypes.c_void_p()
        found = []
        for block in range(blocks):
            count = self._library.log(self._group, block, ctypes.byref(records))
            num_bytes = count * RECORD.itemsize
            found.append(ctypes.string_at(records, num_bytes) if count else b"")
        ends = np.cumsum([len(each) for each in found]) // RECORD.itemsize
        return np.frombuffer(b"".join(found), RECORD), ends


def segment_at(segment: int, offset: int = 0) -> int:
    """An address in a segment."""
    return (segment << TOKEN_SHIFT) + offset
