"""`Stage`: bytes from rank to rank through memory that both have mapped, a ring for each pair.

Who sends copies into a ring in its own memory, who receives copies out of it: no rank writes into memory of
another one. Each says in its own memory how much it has put in or taken out so far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moe_triton.core.errors import ConfigMismatchError
from moe_triton.core.side_copies import SideCopies

Bytes = torch.Tensor
"""Flat, uint8."""

LINE = 64  # bytes, of a cache: each number has its own
WORDS_PER_LINE = LINE // 8


def digest_of(data: bytes) -> int:
    """What stands for some bytes in a word of a rank: 56 bits, since words have a sign."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


class Memory(Protocol):
    """Memory of each rank that all ranks reach: `moe_triton.EPBuffer.peer_memory`."""

    @property
    def num_dispatches(self) -> Callable[[], int]:
        """How many dispatches this rank has begun."""

    @property
    def copies(self) -> SideCopies:
        """What copies there."""

    def of(self, rank: int) -> torch.Tensor:
        """A rank's, (bytes,) uint8."""

    def close(self) -> None:
        """Gives it back."""


class Stage:
    """This rank's rings to all others, and theirs to it.

    Args:
        memory: of all ranks, zeros where the stage is.
        offset: in each rank's memory, a multiple of 64.
        rank: this one.
        num_ranks: W.
        ring_bytes: of each pair, a multiple of 64.
    """

    def __init__(self, memory: Memory, offset: int, rank: int, num_ranks: int, ring_bytes: int) -> None:
        self._memory, self._offset = memory, offset
        self._rank, self._num_ranks, self._ring_bytes = rank, num_ranks, ring_bytes

    @staticmethod
    def num_bytes(num_ranks: int, ring_bytes: int) -> int:
        """Bytes of a rank's memory that it takes."""
        return num_ranks * (2 * LINE + ring_bytes)

    def put(self, rank: int, data: Bytes) -> int:
        """Copies bytes on their way to a rank, as many as there is room for.

        Returns:
            How many: the first ones.

        Raises:
            BufferStateError: the memory was given back.
            ConfigMismatchError: the rank has taken out what was never put in.
        """
        put = self._counts(self._rank, taken=False)
        there = self._between(int(put[rank]), int(self._counts(rank, taken=True)[self._rank]), rank)
        size = min(self._ring_bytes - there, len(data))
        if size:
            self._copy(self._rank, rank, int(put[rank]), data[:size], into=True)
            put[rank] += size  # behind the bytes: who receives looks at this first
        return size

    def get(self, rank: int, data: Bytes) -> int:
        """Copies bytes out that a rank has put in, as many as are there and wanted.

        Returns:
            How many: the first ones of ``data`` are set.

        Raises:
            BufferStateError: the memory was given back.
            ConfigMismatchError: the rank says that it has put in what its ring cannot hold.
        """
        taken = self._counts(self._rank, taken=True)
        there = self._between(int(self._counts(rank, taken=False)[self._rank]), int(taken[rank]), rank)
        size = min(there, len(data))
        if size:
            self._copy(rank, self._rank, int(taken[rank]), data[:size], into=False)
            taken[rank] += size
        return size

    def _between(self, put: int, taken: int, rank: int) -> int:
        """Bytes in a ring. What a rank says of them is checked: it decides what is read."""
        there = put - taken
        if 0 <= there <= self._ring_bytes:
            return there
        raise ConfigMismatchError(
            f"between this rank and rank {rank} {put} bytes were put in and {taken} taken out, and there is "
            f"room for {self._ring_bytes}. Close what uses them on every rank, and make it anew."
        )

    def _copy(self, holder: int, other: int, count: int, data: Bytes, *, into: bool) -> None:
        """Copies to or from the ring that one rank holds for another, from a count of bytes on."""
        start = self._offset + 2 * LINE * self._num_ranks + other * self._ring_bytes
        ring = self._memory.of(holder)[start : start + self._ring_bytes]
        at = count % self._ring_bytes
        first = min(len(data), self._ring_bytes - at)
        for piece, part in ((ring[at : at + first], data[:first]), (ring[: len(data) - first], data[first:])):
            self._memory.copies.copy(*((piece, part) if into else (part, piece)))

    def _counts(self, rank: int, *, taken: bool) -> npt.NDArray[np.int64]:
        """What a rank has put in for each other one, or taken out of what that has put in."""
        lines = LINE * self._num_ranks
        start = self._offset + taken * lines
        words = self._memory.of(rank)[start : start + lines].view(torch.int64).numpy()
        return words[::WORDS_PER_LINE]
