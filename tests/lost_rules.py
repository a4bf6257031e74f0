"""The library's rules on ranks that are lost, as models of them ask: for one rank, and the length of a step.

Whom a rank masks is said by `OnLostRanks` and `MaskedSets`, where windows have other memory by `Renewals`.
Sets of ranks are integers here, a bit for each.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast
from unittest import mock

from moe_triton.layout import Wandering
from moe_triton.rendezvous.masked_sets import MaskedSets
from moe_triton.rendezvous.stores import Store
from moe_triton.runtime import on_lost
from moe_triton.runtime.renewals import Renewals

NUM_ZONES = 2
MOST_RANKS = 4
_MEMBERS = [[rank for rank in range(MOST_RANKS) if mask >> rank & 1] for mask in range(1 << MOST_RANKS)]


def members(mask: int) -> list[int]:
    """The ranks of a set."""
    return list(_MEMBERS[mask])


def mask_of(ranks: Iterable[int]) -> int:
    """A set of ranks, a bit for each."""
    return sum(1 << rank for rank in set(ranks))


class MemoryStore:
    """The group's store: of each number the set that was named.

    Args:
        sets: in the order of their numbers.
        last_wins: who writes a value later replaces it.
    """

    meanwhile: Callable[[], object] | None = None
    """What another rank does before the first write."""

    def __init__(self, sets: Sequence[int], last_wins: bool = False) -> None:
        self.sets, self._last_wins = list(sets), last_wins

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As torch's stores."""
        at = int(key.rpartition("/")[2]) - 1
        if not expected and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        if not expected and (at == len(self.sets) or self._last_wins):
            self.sets[at:] = [mask_of(json.loads(desired)), *self.sets[at + 1 :]]
        return json.dumps(members(self.sets[at])).encode() if at < len(self.sets) else expected.encode()


class KnownMasks:
    """A rank's masks, as far as `OnLostRanks` needs them."""

    def __init__(self, masked: Iterable[int]) -> None:
        self.masked = frozenset(masked)

    def update(self, rank: int, masked: bool, why: str) -> None:
        assert masked, why
        self.masked |= {rank}


Sets = TypeVar("Sets", bound=MaskedSets)


class Wished(MaskedSets):
    """Sets that keep who is to be named next, for a later step."""

    ranks: frozenset[int] = frozenset()

    def add(self, ranks: Collection[int]) -> frozenset[int]:
        self.ranks |= frozenset(ranks)
        return self.masked


class Said(NamedTuple):
    """What a rank goes by once it has asked the store, and what is there.

    Attributes:
        known: whom it masks.
        number: of the sets that it has read.
        told: whether it has found itself in one.
        wish: whom it is going to name.
        sets: in the store.
    """

    known: int
    number: int
    told: bool
    wish: int
    sets: tuple[int, ...]


class Asking:
    """One rank that asks the store, by the library's rules.

    Args:
        rank: this one.
        known: whom it masks.
        number: of the sets that it has read.
        store: of the ranks.
        stuck: ranks that wait for others, by their notes.
        knows_itself: whether it sees that it is in a set before it names others.
        num_ranks: of the group.
    """

    def __init__(
        self,
        rank: int,
        known: int,
        number: int,
        store: MemoryStore,
        stuck: int = 0,
        knows_itself: bool = True,
        num_ranks: int = 3,
    ) -> None:
        self._num_ranks = num_ranks
        self._store, self._is_told, self._rank = store, False, rank if knows_itself else -1
        read = functools.reduce(int.__or__, store.sets[:number], 0)
        self._masks = KnownMasks(members(known))
        self._sets = self._made(MaskedSets, number, read)
        self._wished = self._made(Wished, number, read)
        context, notes, waits = mock.Mock(rank=rank), mock.Mock(), mock.Mock(stop=self._stop)
        notes.holding_up = lambda ranks, *_: [each for each in ranks if not stuck >> each & 1]
        with mock.patch.object(on_lost, "in_thread"):  # nothing runs by itself here
            rest = notes, waits, 1.0, {"dispatch": 0}
            self._deciding = on_lost.OnLostRanks(context, cast(Any, self._masks), self._wished, *rest)
            self._naming = on_lost.OnLostRanks(context, cast(Any, self._masks), self._sets, *rest)

    def _made(self, kind: type[Sets], number: int, masked: int) -> Sets:
        made = kind(lambda: cast(Store, self._store), self._num_ranks, self._rank)
        made.number, made.masked = number, frozenset(members(masked))
        return made

    def _stop(self, why: object) -> None:
        self._is_told = True

    def _said(self, sets: MaskedSets) -> Said:
        wish, known = mask_of(self._wished.ranks), mask_of(self._masks.masked)
        return Said(known, sets.number, self._is_told, wish, tuple(self._store.sets))

    def hear(self) -> Said:
        """Reads what others have named."""
        self._naming._apply(self._sets.follow())
        return self._said(self._sets)

    def decide(self, missing: int) -> Said:
        """A deadline has passed; says whom the rank is going to name."""
        self._deciding._decide(members(missing))
        return self._said(self._wished)

    def notice(self, dead: int) -> Said:
        """A rank has died; says that the rank is going to name it."""
        with mock.patch.object(on_lost, "in_thread", lambda run, _: run()):
            self._deciding.lost(dead, "")
        return self._said(self._wished)

    def name(self, ranks: int) -> Said:
        """Names who is to be named."""
        self._naming._agree(members(ranks))
        return self._said(self._sets)


class Kept(NamedTuple):
    """What a rank's `Renewals` has in it between two steps, as sets in their order."""

    suspects: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()
    due: tuple[tuple[int, int], ...] = ()


class SeenWindow:
    """A window that says what is asked of it."""

    page_bytes = 1

    def __init__(self, masks: Sequence[int]) -> None:
        self._masks = masks
        self.renewed: list[int] = []
        self.followed: list[tuple[int, int]] = []

    why_not_let_go = ""

    def is_mapped(self, rank: int) -> bool:
        return True

    def let_go(self, rank: int) -> None:
        raise AssertionError("all ranks are of one host")

    def renew(self, number: int, at: int, num_bytes: int, keeps: bool) -> None:
        self.renewed.append(number)

    def follow(self, rank: int, number: int, at: int, num_bytes: int) -> None:
        self.followed.append((rank, number))

    def say_masked(self, ranks: Collection[int]) -> None:
        raise AssertionError("the model knows")

    def masked_by(self, rank: int) -> frozenset[int]:
        return frozenset(members(self._masks[rank]))


class Renewing:
    """One rank's `Renewals` for the length of a step.

    Args:
        wandering: parts of its window that have no writer of their own.
        rank: this one.
        kept: what there was in it.
        masks: of each rank, as its window says.
        quiet: ranks that certainly write nothing any more.
    """

    def __init__(
        self, wandering: Sequence[Wandering], rank: int, kept: Kept, masks: Sequence[int], quiet: int = 0
    ) -> None:
        self.window = SeenWindow(masks)
        of_ranks = rank, len(masks), lambda each: bool(quiet >> each & 1)
        self.renewals = Renewals(self.window, wandering, NUM_ZONES, *of_ranks)
        self.renewals._suspects, self.renewals._due = set(kept.suspects), set(kept.due)
        self.renewals._masked = frozenset(kept.masked)

    def kept(self) -> Kept:
        """What there is in it now."""
        made = self.renewals
        return Kept(*(tuple(sorted(each)) for each in (made._suspects, made._masked, made._due)))
