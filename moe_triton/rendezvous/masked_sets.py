"""Sets of masked ranks, numbered, on which all ranks of a buffer agree.

Each set holds the one before it, and more. The store's compare_set decides who has named the next one: where
two ranks miss each other, one of them is in it and the other is not, whichever came first.

    masked/<number>    a set as JSON
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from moe_triton.rendezvous.stores import Store, read_key


class MaskedSets:
    """One rank's view of the sets.

    Args:
        open_store: returns the store of these ranks and this buffer.
        num_ranks: of the group.
        rank: this one. Once it is in a set it names nobody: the others go on without it.

    Attributes:
        number: of the latest set that is known, 0 for none.
        masked: that set.
    """

    def __init__(self, open_store: Callable[[], Store], num_ranks: int, rank: int) -> None:
        self._open_store, self._num_ranks, self._rank = open_store, num_ranks, rank
        self.number, self.masked = 0, frozenset[int]()

    def follow(self) -> frozenset[int]:
        """Reads what others have named, and returns the latest set."""
        store = self._open_store()
        while text := read_key(store, self._key(self.number + 1)):
            self._take(text)
        return self.masked

    def add(self, ranks: Collection[int]) -> frozenset[int]:
        """Names ranks that are missing, and returns the set agreed on: with others, or without these."""
        store = self._open_store()
        wanted = self.follow() | frozenset(ranks)
        while not wanted <= self.masked and self._rank not in self.masked:
            said = json.dumps(sorted(wanted))
            agreed = store.compare_set(self._key(self.number + 1), "", said).decode(errors="replace")
            self._take(agreed)
            if agreed != said:  # who was first may have named one that names others
                break
        return self.masked

    def _key(self, number: int) -> str:
        return f"masked/{number}"

    def _take(self, text: str) -> None:
        """The next set. What is no set of ranks counts as none: nothing from a peer is trusted."""
        self.number += 1
        try:
            ranks = [int(rank) for rank in json.loads(text)]
        except (ValueError, TypeError, RecursionError):
            return
        self.masked |= {rank for rank in ranks if 0 <= rank < self._num_ranks}
