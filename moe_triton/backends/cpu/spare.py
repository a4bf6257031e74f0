"""Other memory for a part of a window, at the same addresses.

A rank that is masked may still write where other ranks' bytes come. Once that part of the window has other
memory, it writes where nobody reads, whenever that is.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Collection

from moe_triton.core.errors import WindowError

# Behind each window: the doorbell that its rank sleeps on until flags arrive (`doorbell.h`).
DOORBELL_BYTES = 4096
# Further behind it, on its page: where in the file the memory of each part is that has other memory.
_WORDS_AT, _WORD_BYTES = 2048, 8
# And behind these a bit for each rank: whether this one masks it.
_MASKS_AT = 3072
MAX_PARTS = (_MASKS_AT - _WORDS_AT) // _WORD_BYTES
MAX_RANKS = (DOORBELL_BYTES - _MASKS_AT) * 8


def mask_place(rank: int) -> tuple[int, int]:
    """Byte behind a window, and bit in it, that say whether its rank masks another one."""
    return _MASKS_AT + rank // 8, rank % 8


class Spare:
    """Room for other memory, behind each window and its doorbell, in the same file.

    Another mapping of it takes the place of a part of the window, at its addresses: who still writes to the
    memory that was there before writes where nobody reads. A rank that has done so with its own window
    says in a word where in the file that part is now, and its peers follow it before they write there again.

    Args:
        window_bytes: of a window.
        num_bytes: of the room.
    """

    def __init__(self, window_bytes: int, num_bytes: int) -> None:
        self.window_bytes, self.num_bytes = window_bytes, num_bytes
        self._begin = -(-(window_bytes + DOORBELL_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._used = 0
        self._followed: dict[tuple[int, int], int] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes of a file that are memory from its beginning on: window and doorbell."""
        return self.window_bytes + DOORBELL_BYTES

    @property
    def file_bytes(self) -> int:
        """Bytes of a file, of which most may be holes."""
        return self._begin + self.num_bytes if self.num_bytes else self.reserved_bytes

    def renew(self, file: int, base: int, number: int, at: int, num_bytes: int, keeps: bool) -> None:
        """Puts other memory in the place of a part of this rank's window."""
        to = self._begin + self._used
        if self._used + num_bytes > self.num_bytes:
            raise WindowError(
                "ranks that are masked may still write to this rank's window, which has had other memory for "
                "them as often as there is room for. End them, and construct a new buffer without them."
            )
        try:
            os.posix_fallocate(file, to, num_bytes)
            if keeps:
                ctypes.memmove(base + to, base + at, num_bytes)
            _map_again(base, to, at, num_bytes)
        except OSError as error:
            raise WindowError(
                f"ranks that are masked may still write to this rank's window, and there are no other "
                f"{num_bytes} bytes for a part of it: {error.strerror}. End them, and construct a new buffer "
                f"without them."
            ) from error
        self._used += num_bytes
        self._word(base, number).value = to

    def follow(self, rank: int, base: int, number: int, at: int, num_bytes: int) -> None:
        """Does the same with a peer's window, if that rank has."""
        to = self._word(base, number).value
        if to == self._followed.get((rank, number), 0):
            return
        last = self.file_bytes - num_bytes
        if not self._begin <= to <= last or (to - self._begin) % mmap.PAGESIZE:
            raise WindowError(
                f"rank {rank} says that a part of its window is {to} bytes into a file, where none can be"
            )
        try:
            _map_again(base, to, at, num_bytes)
        except OSError as error:
            raise WindowError(
                f"the new memory of rank {rank}'s window cannot be mapped: {error.strerror}"
            ) from error
        self._followed[rank, number] = to

    def say_masked(self, base: int, ranks: Collection[int]) -> None:
        """Writes behind this rank's window whom it masks."""
        assert all(0 <= rank < MAX_RANKS for rank in ranks)
        bits = sum(1 << rank for rank in set(ranks)).to_bytes(MAX_RANKS // 8, "little")
        ctypes.memmove(base + self.window_bytes + _MASKS_AT, bits, len(bits))

    def masked_by(self, base: int) -> frozenset[int]:
        """Whom the rank of a window masks."""
        bits = int.from_bytes(
            ctypes.string_at(base + self.window_bytes + _MASKS_AT, MAX_RANKS // 8), "little"
        )
        return frozenset(rank for rank in range(bits.bit_length()) if bits >> rank & 1)

    def _word(self, base: int, number: int) -> ctypes.c_int64:
        assert 0 <= number < MAX_PARTS
        return ctypes.c_int64.from_address(base + self.window_bytes + _WORDS_AT + _WORD_BYTES * number)


def _map_again(base: int, what: int, at: int, num_bytes: int) -> None:
    """Maps a part of a window's file that is mapped already a second time, in the place of another part.

    Raises:
        OSError: as mremap(2).
    """
    maymove, fixed = 1, 2
    found = _libc().mremap(base + what, 0, num_bytes, maymove | fixed, base + at)
    if found != base + at:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mremap.restype = ctypes.c_void_p
    sizes = ctypes.c_size_t, ctypes.c_size_t
    library.mremap.argtypes = ctypes.c_void_p, *sizes, ctypes.c_int, ctypes.c_void_p
    return library
