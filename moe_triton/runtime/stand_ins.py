"""Ranks that stand in for lost relays: each passes on what one lost rank of its server did.

Senders go on writing to the window of the lost rank, which its server still has, and another rank of that
server runs the relay's launches on it. So no plan changes, and no place in a window has another owner. It
begins with a dispatch that all have agreed on (`moe_triton.rendezvous.starts`), once it is certain that the
lost rank has ended: nothing of its own comes late. Before that flags are cleared that it has left, or that
others have left it, and all ranks meet once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from moe_triton.backends.base import Bindings, Window
from moe_triton.backends.waits import Waits
from moe_triton.core.logs import log_of
from moe_triton.core.threads import Deadline
from moe_triton.core.topology import Topology
from moe_triton.operators.variants import Variant
from moe_triton.rendezvous.masked_sets import MaskedSets
from moe_triton.rendezvous.notes import noted_after_s
from moe_triton.rendezvous.starts import Start
from moe_triton.rendezvous.stores import Store, below
from moe_triton.runtime.executables import Phase
from moe_triton.runtime.lost_relay import LostRelay
from moe_triton.runtime.masks import Masks, StandIn
from moe_triton.runtime.on_lost import FOLLOWED_S
from moe_triton.runtime.turns import operator_of
from moe_triton.schemes.scheme import Scheme

NEW = -1
RELAYING: frozenset[Phase] = frozenset({"whole", "count", "ask", "ring", "round"})
"""Phases in which ranks pass on what comes by their rail: all of a dispatch that send, and a combine."""
LOOKED_AT_S = 0.002
"""How often a call looks whether it is settled what it waits for."""
FEWEST_AHEAD = 3
"""Dispatches ahead that a rank promises, beside as many as it has ended between two looks: time for others to
hear of it. If it comes there before they have, it waits for them, once."""


def assigned(
    topology: Topology, before: Mapping[int, StandIn], masked: Collection[int], since: int
) -> dict[int, StandIn]:
    """Who stands in for whom: for each lost rank the next one of its server that does so for no other.

    Args:
        topology: of the group.
        before: what held before, and goes on where neither is lost anew.
        masked: all ranks that are lost.
        since: the dispatch from which it is to hold.

    Returns:
        By the lost rank. Some have nobody, where too few are left.
    """
    made = {rank: each for rank, each in before.items() if rank in masked and each.rank not in masked}
    taken = {each.rank for each in made.values()}
    for rank in sorted(set(masked) - set(made)):
        server = topology.neighbours(rank)
        place = server.index(rank)
        for other in (*server[place + 1 :], *server[:place]):
            if other not in masked and other not in taken:
                made[rank] = StandIn(other, since)
                taken.add(other)
                break
    return made


@dataclass(frozen=True)
class Owner:
    """What stand-ins need of the communicator.

    Attributes:
        num_dispatches: how many have ended.
        meet: waits for all ranks that take part.
        learn: has calls go by masks as they are.
        note: tells others what this rank waits for and for whom, as long as it does.
        give_up: has nothing be agreed on, if the others have not.
        make_relay: makes what runs the launches of a lost rank, from a dispatch on.
    """

    num_dispatches: Callable[[], int]
    meet: Callable[[], None]
    learn: Callable[[], None]
    note: Callable[[str, Sequence[int], Callable[[], bool]], None]
    give_up: Callable[[Start], None]
    make_relay: Callable[[int, int], LostRelay]


class StandIns:
    """The stand-ins of one communicator, as one rank has them.

    Args:
        scheme: of it, which relays.
        window: of this rank.
        masks: of its ranks.
        sets: that the ranks agree on.
        open_store: returns the store of these ranks and this buffer.
        is_quiet: whether a rank of this server writes nothing any more.
        waits: of the communicator.
        timeout_s: seconds until it is given up that others promise something.
        owner: the communicator.
        group: its short name in lines.
    """

    def __init__(
        self,
        scheme: Scheme,
        window: Window,
        masks: Masks,
        sets: MaskedSets,
        open_store: Callable[[], Store],
        is_quiet: Callable[[int], bool],
        waits: Waits,
        timeout_s: float,
        owner: Owner,
        group: str = "",
    ) -> None:
        self._scheme, self._context, self._window = scheme, scheme.context, window
        self._masks, self._sets, self._open_store = masks, sets, open_store
        self._is_quiet, self._waits, self._timeout_s, self._owner = is_quiet, waits, timeout_s, owner
        self._log = log_of(
            "masks", rank=self._context.rank, num_ranks=self._context.config.num_ranks, group=group
        )
        self._lock = threading.Lock()
        self._settled = 0
        self._masked = frozenset[int]()
        self._start: Start | None = None
        # Of which agreement, and which dispatch: one, as the thread that calls reads it without the lock.
        self._promise: tuple[Start, int] | None = None
        self._seen, self._ahead = 0, FEWEST_AHEAD
        self._relay: LostRelay | None = None

    # What goes on beside calls.

    def look(self) -> None:
        """Goes on with what is to be agreed on. Called again and again, on the thread that follows others."""
        count = self._owner.num_dispatches()
        self._ahead = FEWEST_AHEAD + count - self._seen
        self._seen = count
        with self._lock:
            self._look()
        # Others wait for this one now, or this one for them.
        soon = Deadline(FOLLOWED_S / 2)
        while (start := self._start) and start.promised and not start.is_settled and soon.left() > 0:
            time.sleep(LOOKED_AT_S)
            with self._lock:
                self._look()

    def _look(self) -> None:
        number, masked = self._sets.number, self._sets.masked
        start = self._start
        if start is None:
            if number <= self._settled or not self._may_change(masked):
                return
            members = sorted(set(range(self._context.config.num_ranks)) - masked)
            store = partial(self._store_of, number)
            start = self._start = Start(store, members, self._context.rank)
            self._settled, self._masked = number, masked
        start.look(self._is_ready, partial(self._choose, start), number > self._settled)
        if (start.is_settled and start.at is None) or (number > self._settled and start.promised is None):
            self._forget(start)

    def _forget(self, start: Start) -> None:
        """Nothing of it holds any more; another one may have begun."""
        if self._start is start:
            self._start = None
        if self._promise is not None and self._promise[0] is start:
            self._promise = None

    def _store_of(self, number: int) -> Store:
        return below(self._open_store(), f"stand_ins/{number}")

    def _may_change(self, masked: frozenset[int]) -> bool:
        before = self._masks.stand_ins
        made = assigned(self._context.config.topology, before, masked, NEW)
        return any(each.since == NEW for each in made.values())

    def _is_ready(self) -> bool:
        """This rank masks them, and those of its server write nothing any more."""
        own = self._context.config.topology.neighbours(self._context.rank)
        are_masked = self._masked <= self._masks.masked
        return are_masked and all(self._is_quiet(rank) for rank in self._masked if rank in own)

    def _choose(self, start: Start) -> int:
        while True:
            promised = self._owner.num_dispatches() + self._ahead
            self._promise = start, promised
            if self._owner.num_dispatches() < promised:  # which the thread that calls sees from now on
                return promised

    # What calls do.

    def before_dispatch(self) -> None:
        """A dispatch begins. Waits, if that was promised, until it is known from when others stand in.

        Raises:
            CommunicationTimeoutError: a rank does not come to where all meet, or the store does not answer.
            BufferStateError: closed meanwhile.
        """
        count, promise = self._owner.num_dispatches(), self._promise
        if promise is None or count < promise[1]:
            return
        start = promise[0]
        self._wait_for(start)
        if start.at is not None:
            if count < start.at:
                return
            self._begin(start.at)
        with self._lock:
            self._forget(start)

    def _wait_for(self, start: Start) -> None:
        """Until the thread that follows others has heard what was agreed on."""
        deadline, noted = Deadline(self._timeout_s), Deadline(noted_after_s(self._timeout_s))
        is_pending, is_noted = [True], False
        try:
            while not start.is_settled:
                if self._waits.is_stopped:
                    self._waits.raise_stopped("dispatch")
                if not is_noted and noted.left() <= 0:  # whoever waits for this rank is not to miss it
                    is_noted = True
                    self._owner.note("what precedes a dispatch", start.awaited(), lambda: is_pending[0])
                if deadline.left() <= 0:
                    self._owner.give_up(start)
                time.sleep(LOOKED_AT_S)
        finally:
            is_pending[0] = False

    def _begin(self, since: int) -> None:
        """From the dispatch on that begins, whose number is this one or higher."""
        topology, own = self._context.config.topology, self._context.rank
        made = assigned(topology, self._masks.stand_ins, self._masked, since)
        new = {rank: each for rank, each in made.items() if self._masks.stand_ins.get(rank) != each}
        self._clear_entries(new)
        mine = [rank for rank, each in new.items() if each.rank == own]
        relay = self._owner.make_relay(mine[0], since) if mine else None
        if relay is not None:
            flags = self._scheme.layout.region("return_status")
            relay.window.tensor()[flags.base : flags.end] = 0
        try:
            self._owner.meet()
        except BaseException:
            if relay is not None:
                relay.close()
            raise
        self._masks.stand_in(made)
        self._context.stand_ins.clear()
        self._context.stand_ins.update({rank: each.rank for rank, each in made.items()})
        self._owner.learn()
        if relay is not None:
            self.close()
            self._relay = relay
        for rank, each in sorted(new.items()):
            self._log.of_call("dispatch", since).warning(
                "dispatch number %d: rank %d passes on from now on what rank %d did, which is lost",
                since,
                each.rank,
                rank,
            )

    def _clear_entries(self, new: Collection[int]) -> None:
        """Takes out what relays have left here of dispatches in which they were lost."""
        topology, own = self._context.config.topology, self._context.rank
        size, server = topology.sizes[0], topology.neighbours(own)
        numbers = {rank % size for rank in new if rank in server}
        counts, window = self._scheme.layout.region("token_counts"), self._window.tensor()
        for zone in range(self._scheme.layout.num_zones):
            for source in range(self._context.config.num_ranks):
                if source % size in numbers:
                    first = counts.offset(zone=zone, source=source)
                    window[first : first + counts.extent("expert") * counts.stride("expert")] = 0

    @contextmanager
    def passing_on(
        self, variant: Variant, zone: int, phase: Phase, number: int, bindings: Bindings
    ) -> Iterator[None]:
        """While this rank runs its own part of a call, runs that of the rank that it stands in for.

        Raises:
            CommunicationTimeoutError, ConfigMismatchError: as of a call of its own.
        """
        if self._relay is None or phase not in RELAYING:
            yield
            return
        relay = self._relay
        running = relay.begin(variant, zone, number, bindings)
        try:
            yield
            while not running.done():
                if self._waits.is_stopped:
                    self._waits.raise_stopped(operator_of(variant))
                futures.wait([running], LOOKED_AT_S)
            running.result()
        except BaseException:
            relay.stop()
            futures.wait([running])
            raise

    def close(self) -> None:
        """Nothing is passed on any more. Called by the only thread inside."""
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close()
