"""From which dispatch on something holds, agreed on in the store by ranks that cannot meet about it.

Ranks go on with their calls meanwhile, and none is more than a dispatch ahead of another. Once all of them
are ready, each promises a dispatch that it does not begin without knowing what came of it. It is to be the
highest of these: so everybody knows of it in time.

    ready/<rank>    that a rank is ready
    from/<rank>     the dispatch that it has promised
    start           the dispatch that was agreed on; or "none", where one of them is lost that was to promise
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from moe_triton.rendezvous.stores import Store, read_key

READY, NONE = "ready", "none"
_MOST_DIGITS = 18


class Start:
    """One rank's part of an agreement.

    Args:
        open_store: returns the store, below a name of this agreement's own.
        members: ranks that take part.
        rank: this one.

    Attributes:
        promised: the dispatch that this rank does not begin before it is settled; None where it has promised
            nothing yet.
        is_settled: whether it is known what was agreed on.
        at: the dispatch that was; None for none.
    """

    def __init__(self, open_store: Callable[[], Store], members: Collection[int], rank: int) -> None:
        self._open_store, self._rank = open_store, rank
        self._members = sorted(members)
        self._is_ready = False
        self._unready = list(self._members)
        self._promises: dict[int, int] = {}
        self.promised: int | None = None
        self.is_settled = False
        self.at: int | None = None

    def look(self, is_ready: Callable[[], bool], choose: Callable[[], int], is_over: bool) -> None:
        """Goes on as far as it can, without waiting for anybody.

        Args:
            is_ready: whether this rank is.
            choose: chooses the dispatch that this rank promises, and has it kept from then on.
            is_over: whether a member is lost, so that it may never promise.
        """
        if self.is_settled:
            return
        store = self._open_store()
        if not self._is_ready:
            if is_over or not is_ready():
                return
            store.set(f"ready/{self._rank}", READY)
            self._is_ready = True
        if self.promised is None:
            # Whoever has promised already waits for this rank, or hears that it is over.
            if is_over or not self._are_all_ready(store):
                return
            self.promised = choose()
            store.set(f"from/{self._rank}", str(self.promised))
        self._settle(store, is_over)

    def awaited(self) -> list[int]:
        """Members whose promise this rank does not know yet."""
        return [rank for rank in self._members if rank not in self._promises]

    def give_up(self) -> None:
        """Agrees on nothing, unless the others have on something."""
        if not self.is_settled:
            self._take(self._named(self._open_store(), NONE))

    def _are_all_ready(self, store: Store) -> bool:
        while self._unready and read_key(store, f"ready/{self._unready[0]}"):
            del self._unready[0]
        return not self._unready

    def _settle(self, store: Store, is_over: bool) -> None:
        for rank in self._members:
            if rank in self._promises:
                continue
            if (promise := _number(read_key(store, f"from/{rank}"))) is not None:
                self._promises[rank] = promise
        if len(self._promises) == len(self._members):
            self._take(self._named(store, str(max(self._promises.values()))))
        elif is_over:
            self._take(self._named(store, NONE))
        elif said := read_key(store, "start"):
            self._take(said)

    @staticmethod
    def _named(store: Store, wanted: str) -> str:
        return store.compare_set("start", "", wanted).decode(errors="replace")

    def _take(self, said: str) -> None:
        self.at = _number(said)
        self.is_settled = True


def _number(said: str) -> int | None:
    """What is no number of a dispatch counts as none: nothing from a peer is trusted."""
    return int(said) if said.isdecimal() and len(said) <= _MOST_DIGITS else None
