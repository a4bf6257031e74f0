"""`Stage`: bytes from rank to rank through memory of both, a ring for each pair.

Who sends copies into a ring in its own memory, and who receives copies out of one. What lies between is
a `Carrier`'s (`moe_triton.balance.carriers`): whose ring the receiver reads, and how each hears how much the
other has put in or taken out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from moe_triton.core.errors import ConfigMismatchError
from moe_triton.core.side_copies import SideCopies, View

Bytes = torch.Tensor
"""Flat, uint8."""

LINE = 64  # bytes, of a cache: each number has its own


def digest_of(data: bytes) -> int:
    """What stands for some bytes in a word of a rank: 56 bits, since words have a sign."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


class Memory(Protocol):
    """Memory of each rank that other ranks reach: `moe_triton.EPBuffer.peer_memory`."""

    @property
    def num_dispatches(self) -> Callable[[], int]:
        """How many dispatches this rank has begun."""

    @property
    def copies(self) -> SideCopies:
        """What copies there."""

    @property
    def queued(self) -> frozenset[int]:
        """Ranks that are posted to, and not read."""

    @property
    def num_bytes(self) -> int:
        """Of a rank's memory, without what it posts from, which lies behind it."""

    @property
    def number(self) -> int:
        """The same on every rank, and no other memory's of these ranks."""

    @property
    def timeout_s(self) -> float:
        """That ranks wait for each other."""

    def of(self, rank: int) -> torch.Tensor:
        """A rank's, (bytes,) uint8."""

    def post(self, rank: int, local: int, remote: int, num_bytes: int) -> bool:
        """Posts to a rank; see `moe_triton.backends.base.HostPosts`."""

    def delivered(self, rank: int) -> int:
        """How many posts to a rank have come."""

    def close(self) -> None:
        """Gives it back."""


class Carrier(Protocol):
    """What lies between the rings of ranks."""

    def refresh(self) -> None:
        """Tells and hears what can be told and heard now.

        Raises:
            BufferStateError: the memory was given back.
        """

    def ring(self, rank: int, *, into: bool) -> View:
        """The ring into which this rank puts what is for a rank, or from which it takes what came."""

    def put_by(self, rank: int) -> int:
        """Bytes that a rank has put in for this one so far, all of which are there."""

    def taken_by(self, rank: int) -> int:
        """Bytes for a rank that it has taken out so far."""

    def has_put(self, rank: int, pieces: Sequence[tuple[int, int]], count: int) -> None:
        """Tells a rank of bytes in its ring.

        Args:
            rank: whom they are for.
            pieces: where they lie in the ring: first byte and number.
            count: of all bytes so far.
        """

    def has_taken(self, rank: int, count: int) -> None:
        """Tells a rank how many of its bytes were taken out so far."""

    def say(self, state: int) -> None:
        """Tells all ranks how this one is; 0 until then. What is not told by then need not be any more."""

    def state(self, rank: int) -> int:
        """How a rank is, as far as it has said."""

    def is_told(self) -> bool:
        """Whether all that this rank has said is on its way. If not, `refresh` goes on."""


class Stage:
    """This rank's rings to all others, and theirs to it.

    Args:
        carriers: to each rank, by rank.
        ring_bytes: of each pair.
        copies: what copies.
    """

    def __init__(self, carriers: Sequence[Carrier], ring_bytes: int, copies: SideCopies) -> None:
        self._carriers, self._ring_bytes, self._copies = carriers, ring_bytes, copies
        self._put, self._taken = [0] * len(carriers), [0] * len(carriers)
        self._each = list(dict.fromkeys(carriers))

    def refresh(self) -> None:
        """Tells the others what can be told by now, and hears what they say.

        Raises:
            BufferStateError: the memory was given back.
        """
        for carrier in self._each:
            carrier.refresh()

    def put(self, rank: int, data: View) -> int:
        """Copies bytes on their way to a rank, as many as there is room for.

        Args:
            rank: whom to.
            data: a view of them.

        Returns:
            How many: the first ones.

        Raises:
            ConfigMismatchError: the rank has taken out what was never put in.
        """
        carrier, count = self._carriers[rank], self._put[rank]
        there = self._between(count, carrier.taken_by(rank), rank)
        size = min(self._ring_bytes - there, len(data))
        if size:
            pieces = self._copy(carrier.ring(rank, into=True), count, data[:size], into=True)
            self._put[rank] += size
            carrier.has_put(rank, pieces, count + size)
        return size

    def get(self, rank: int, data: View) -> int:
        """Copies bytes out that a rank has put in, as many as are there and wanted.

        Args:
            rank: from whom.
            data: a view of where they go.

        Returns:
            How many: the first ones of ``data`` are set.

        Raises:
            ConfigMismatchError: the rank says that it has put in what its ring cannot hold.
        """
        carrier, count = self._carriers[rank], self._taken[rank]
        size = min(self._between(carrier.put_by(rank), count, rank), len(data))
        if size:
            self._copy(carrier.ring(rank, into=False), count, data[:size], into=False)
            self._taken[rank] += size
            carrier.has_taken(rank, count + size)
        return size

    def say(self, state: int) -> None:
        """Tells all ranks how this one is: a number, 0 until then."""
        for carrier in self._each:
            carrier.say(state)

    def state(self, rank: int) -> int:
        """How a rank is, as far as it has said."""
        return self._carriers[rank].state(rank)

    def is_told(self) -> bool:
        """Whether all that was put in, taken out and said is on its way. If not, `refresh` goes on."""
        return all(carrier.is_told() for carrier in self._each)

    def _between(self, put: int, taken: int, rank: int) -> int:
        """Bytes in a ring. What a rank says of them is checked: it decides what is read."""
        there = put - taken
        if 0 <= there <= self._ring_bytes:
            return there
        raise ConfigMismatchError(
            f"between this rank and rank {rank} {put} bytes were put in and {taken} taken out, and there is "
            f"room for {self._ring_bytes}. Close what uses them on every rank, and make it anew."
        )

    def _copy(self, ring: View, count: int, data: View, *, into: bool) -> list[tuple[int, int]]:
        """Copies to or from a ring, from a count of bytes on, and returns where they lie there."""
        at, done = count % self._ring_bytes, 0
        first = min(len(data), self._ring_bytes - at)
        pieces = [(at, first)] if first == len(data) else [(at, first), (0, len(data) - first)]
        for start, size in pieces:
            piece, part = ring[start : start + size], data[done : done + size]
            self._copies.copy(*((piece, part) if into else (part, piece)))
            done += size
        return pieces
