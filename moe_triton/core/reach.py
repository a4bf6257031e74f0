"""How a rank reaches its peers: their memory is mapped here, or a queue leads there, or it is masked.

The table of peers has a word for each rank: an address, and in its upper bits what kind of address it is.
Behind them stands a word that says how many ranks are masked, and how often that has changed: kernels that
wait look at it alone, as long as nothing changes (docs/protocol.md, "Masked ranks"). Behind that are what the
running call knows of it, and the number of the set of masked ranks that it goes by.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sized
from typing import NamedTuple

from moe_triton.core.group_sizes import MAX_RANKS

QUEUED_BIT, INSIDE_BIT, MASKED_BIT, SILENT_BIT, KNOWN_BIT, GONE_BIT = 63, 62, 61, 60, 59, 58
"""Bits of a peer's word: only a queue leads there; it is of this rank's server; nothing is sent to it;
nothing that is relayed is awaited from it; the running call has known that from its beginning; and it takes
no part, though what is sent to it may be passed on by a rank that stands in for it."""
CHANGES_SHIFT = 32
"""In the word behind those of the ranks: the number of changes, above that of masked ranks."""
TOKEN_SHIFT = 48
"""Addresses in memory have fewer bits. A queued peer's is a token above them, where nothing is mapped. That
of the last rank of the largest group would need one more bit than there are, and is 0."""

PEER_BYTES = 8
"""Of a word."""

NUM_CHANGES_WORDS = 3
"""Words behind those of the ranks: changes to masks, as kernels see them; those that the running call knows;
and what stands for the set that it goes by (`number_of`)."""
KNOWN_WORD, SET_WORD = 1, 2
"""The last two, counted from the first of them."""

_ADDRESS_MASK = (1 << GONE_BIT) - 1
_MOST_NUMBERS = 1 << 30


class Queues(NamedTuple):
    """The queues of a rank.

    Attributes:
        peers: ranks that they lead to.
        servers: the server of each rank of the group.
        in_bytes: of every window, the part that peers write; what is posted lies behind it.
        is_loose: messages may overtake each other, but for those with flags, which come behind all without
            flags that were posted before; and none where both write the same bytes.
    """

    peers: frozenset[int]
    servers: tuple[int, ...]
    in_bytes: int
    is_loose: bool = False

    def is_inside(self, rank: int, peer: int) -> bool:
        """Whether both are of one server."""
        return self.servers[rank] == self.servers[peer]

    def word(self, rank: int, peer: int, address: int) -> int:
        """A peer's word in the table of a rank, as a signed integer of 64 bits."""
        word = address | (peer in self.peers) << QUEUED_BIT | self.is_inside(rank, peer) << INSIDE_BIT
        return word - (1 << 64) if word >> 63 else word


def token_of(rank: int) -> int:
    """The address of a queued peer's window where posts name memory by rank and offset."""
    return (rank + 1) % MAX_RANKS << TOKEN_SHIFT


def address_of(word: int) -> int:
    """The address in a peer's word."""
    return word & _ADDRESS_MASK


def num_ranks_in(table: Sized) -> int:
    """Ranks of a table of peers."""
    return len(table) - NUM_CHANGES_WORDS


def is_queued(word: int) -> bool:
    """Whether only a queue leads to the rank of this word."""
    return bool(word >> QUEUED_BIT & 1)


def is_masked(word: int) -> bool:
    """Whether nothing is sent to the rank of this word."""
    return bool(word >> MASKED_BIT & 1)


def masked_word(word: int, gone: bool, masked: bool, silent: bool) -> int:
    """A peer's word, as a signed integer of 64 bits, with what masks say of the rank."""
    bits = word & ~(1 << MASKED_BIT | 1 << SILENT_BIT | 1 << GONE_BIT)
    return bits | gone << GONE_BIT | masked << MASKED_BIT | silent << SILENT_BIT


def known_word(word: int, silent: bool) -> int:
    """A peer's word, with what the call that begins knows of the rank."""
    return word & ~(1 << KNOWN_BIT) | silent << KNOWN_BIT


def number_of(masked: Collection[int]) -> int:
    """What stands for a set of masked ranks where peers compare theirs: never 0."""
    return 1 + zlib.crc32(repr(sorted(masked)).encode()) % _MOST_NUMBERS
