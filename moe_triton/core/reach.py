"""How a rank reaches its peers: their memory is mapped here, or a queue leads there.

The table of peers has a word for each rank: an address, and in its upper bits what kind of address it is.
"""

from __future__ import annotations

from typing import NamedTuple

QUEUED_BIT, INSIDE_BIT = 63, 62
"""Bits of a peer's word: only a queue leads there; it is of this rank's server."""
TOKEN_SHIFT = 48
"""Addresses in memory have fewer bits. A queued peer's is a token above them, where nothing is mapped."""

_ADDRESS_MASK = (1 << INSIDE_BIT) - 1


class Queues(NamedTuple):
    """The queues of a rank.

    Attributes:
        peers: ranks that they lead to.
        servers: the server of each rank of the group.
        in_bytes: of every window, the part that peers write; what is posted lies behind it.
    """

    peers: frozenset[int]
    servers: tuple[int, ...]
    in_bytes: int

    def is_inside(self, rank: int, peer: int) -> bool:
        """Whether both are of one server."""
        return self.servers[rank] == self.servers[peer]

    def word(self, rank: int, peer: int, address: int) -> int:
        """A peer's word in the table of a rank, as a signed integer of 64 bits."""
        word = address | (peer in self.peers) << QUEUED_BIT | self.is_inside(rank, peer) << INSIDE_BIT
        return word - (1 << 64) if word >> 63 else word


def token_of(rank: int) -> int:
    """The address of a queued peer's window where posts name memory by rank and offset."""
    return (rank + 1) << TOKEN_SHIFT


def address_of(word: int) -> int:
    """The address in a peer's word."""
    return word & _ADDRESS_MASK
