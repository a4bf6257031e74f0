"""The counting build of the Ascend C kernels: runs launches, says what each block did, and clocks cores."""

from __future__ import annotations

import ctypes
import enum
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from autotune.model.cost import UnknownWorkError
from moe_triton.backends.cpu.native import REBUILD
from moe_triton.core import native_files
from moe_triton.core.abi import Abi
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import AscendCKernel
from moe_triton.core.reach import TOKEN_SHIFT

PIPES = ("S", "V", "MTE2", "MTE3")
"""By their numbers (``pipe_t``)."""

RECORD = np.dtype(
    [("did", "u1"), ("pipe", "u1"), ("other", "u1"), ("flags", "u1"), ("amount", "<u4"), ("address", "<u8")]
)
"""``Record`` in counting_core.h."""
FIRST_SEGMENT = 4096
"""The number of the first segment that an argument points to; those before it are windows."""
MISSED = REDUCES = 1
WRITES, LOOKS, ROWS = 2, 4, 8
"""Bits of a record's flags, in the same file."""


class Did(enum.IntEnum):
    """``Did`` in counting_core.h: what a record is of."""

    LOAD, STORE, VECTOR, LOCAL, GLOBAL, DROP, SET, WAIT, BARRIER, POST, MARK, SYNC = range(12)


class Mode(enum.IntEnum):
    """``Mode`` in counting_core.h: how a launch is run."""

    LOGGED, SILENT, BLIND = range(3)


class Contents(enum.IntEnum):
    """``Contents`` in counting_memory.h: what memory holds before kernels store anything."""

    ZEROS, VALUES, UNKNOWN = range(3)


@dataclass(frozen=True)
class Writers:
    """Who stored things: ``Writer`` in counting_memory.h, (N,) arrays.

    Attributes:
        launch: of the plan.
        rank: that stored.
        posted: whether by a queue.
        step: the kind of step that its block was in.
        block: which.
        record: of the block's log; 0 where there is no log.
    """

    launch: np.ndarray
    rank: np.ndarray
    posted: np.ndarray
    step: np.ndarray
    block: np.ndarray
    record: np.ndarray

    def at(self, places: np.ndarray) -> Writers:
        """Some of them."""
        return Writers(*(getattr(self, field.name)[places] for field in fields(self)))

    @staticmethod
    def of(words: np.ndarray) -> Writers:
        """From (N,) uint64, of which each counts once."""
        words = np.unique(words).astype(np.uint64)
        words = words[words != 0]

        def bits(first: int, number: int) -> np.ndarray:
            return np.asarray(words >> np.uint64(first) & np.uint64((1 << number) - 1)).astype(np.int64)

        return Writers(bits(52, 11) - 1, bits(42, 10), bits(63, 1) > 0, bits(38, 4), bits(32, 6), bits(0, 32))


class CountedError(UnknownWorkError):
    """A kernel waits for what nobody sends, or does what depends on memory that nobody knows."""


class CountingLibrary:
    """One build.

    Args:
        path: of its file.

    Raises:
        ToolchainError: it is another moe_triton's.
    """

    open: Callable[..., Any]
    close: Callable[..., Any]
    take: Callable[..., Any]
    give: Callable[..., Any]
    read: Callable[..., Any]
    arrived: Callable[..., Any]
    waits: Callable[..., Any]
    awaited: Callable[..., Any]
    begin: Callable[..., Any]
    log: Callable[..., Any]
    clock: Callable[..., Any]

    def __init__(self, path: Path) -> None:
        self._library = library = ctypes.CDLL(str(path))
        self._abi = Abi(library, path, REBUILD)
        self._launchers: dict[str, Callable[..., int]] = {}
        number, size, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
        signatures = {
            "open": (pointer, number),
            "close": (None, pointer),
            "take": (None, pointer, number),
            "give": (None, pointer, number, size, number, pointer, size),
            "read": (size, pointer, number, size, size, pointer),
            "arrived": (None, pointer, number, pointer, pointer, pointer),
            "begin": (None, pointer, number, number, size),
            "waits": (number, pointer),
            "awaited": (size, pointer, ctypes.POINTER(pointer)),
            "log": (size, pointer, number, ctypes.POINTER(pointer)),
        }
        for name, (result, *arguments) in signatures.items():
            function = getattr(library, f"moe_counting_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.clock = library.moe_clock_cores
        self.clock.restype, self.clock.argtypes = size, (pointer, pointer, size, *[pointer] * 3)  # type: ignore[attr-defined]
        library.moe_last_error.restype = ctypes.c_char_p

    def launcher(self, kernel: AscendCKernel) -> Callable[..., int]:
        """The library's function that launches a kernel.

        Raises:
            ToolchainError: the build has no such kernel, or with other arguments.
        """
        launcher = self._launchers.get(kernel.name)
        if launcher is None:
            self._abi.check(kernel)
            launcher = self._launchers[kernel.name] = getattr(self._library, kernel.symbol)
            launcher.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p)
        return launcher

    @property
    def last_error(self) -> str:
        """Why this thread's last failed launch failed."""
        return (self._library.moe_last_error() or b"").decode()


@functools.cache
def counting_library() -> CountingLibrary:
    """That of this installation.

    Raises:
        ToolchainError: it is missing, or another moe_triton's.
    """
    path = native_files.find(native_files.COUNTING_LIBRARY)
    if path is None:
        raise ToolchainError(
            f"{native_files.COUNTING_LIBRARY} is missing, which counts what kernels do. {REBUILD}"
        )
    return CountingLibrary(path)


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

    def arrived(self, rank: int) -> tuple[int, int, int]:
        """Bytes that others have written to a rank's window, bytes that they have posted to it, and in how
        many messages, since the last call.
        """
        written, posted, messages = (ctypes.c_uint64() for _ in range(3))
        self._library.arrived(self._group, rank, *map(ctypes.byref, (written, posted, messages)))
        return written.value, posted.value, messages.value

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
        logs = []
        for block in range(blocks):
            count = self._library.log(self._group, block, ctypes.byref(records))
            logs.append(ctypes.string_at(records, count * RECORD.itemsize) if count else b"")
        ends = np.cumsum([len(each) for each in logs]) // RECORD.itemsize
        return np.frombuffer(b"".join(logs), RECORD), ends


def segment_at(segment: int, offset: int = 0) -> int:
    """An address in a segment."""
    return (segment << TOKEN_SHIFT) + offset
