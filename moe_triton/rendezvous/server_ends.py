"""How ranks of other servers hear of an end, in the group's store: neighbours tell, or a server is silent.

Keys in the store, below a prefix of the processes that take part::

    beat/<server>   whose heartbeat it was, and a number: one that changes while any rank of the server runs
    end/<i>         the i-th end that somebody has told of, as `End` in JSON

One rank of a server does this for all of it: the first one of those that have not gone. Others look whether
it is done, and do it in its place, for it may be stopped. Whoever does looks at the heartbeats of other
servers, too: a server that has been silent is taken for dead. Silence is counted in looks of one's own, so
that nobody is missed who was stopped together with this process.

A store that does not answer ends nothing but this: neither a look nor a heartbeat comes from it any more.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moe_triton.core.logs import log_of
from moe_triton.rendezvous.notes import MOST_WATCHED
from moe_triton.rendezvous.stores import Store, read_key

TICK_S = 0.125
"""Between looks. A death is known SILENT_TICKS + 2 looks later at most."""
SILENT_TICKS, FIRST_TICKS = 24, 48
"""Looks without a heartbeat after which a server is taken for dead, and of its first one. Fewer are too few:
where a machine is busy and Python's lock is held, a heartbeat comes a second late."""
# Who does a server's work if those before it do not: after so many looks more for each of them, but for
# these.
_MOST_TURNS, _AT_ONCE = 2, -1
# A look that has taken longer counts none: this process has not run itself, or the store was late.
_LATE_S = 3 * TICK_S
# For the last word, when buffers are closed.
LAST_WORD_S = 0.2
DEAD, LEFT, CLOSED = "dead", "left", "closed"
_MOST_CHARACTERS = 200  # of a sign


class End(NamedTuple):
    """What ranks tell each other of one that has gone.

    Attributes:
        number: of the rank.
        state: "dead" or "left"; or "closed", which is said of nothing but these buffers.
        has_ended: its process has.
        sign: by which, in words.
        is_certain: it has not only been silent.
    """

    number: int
    state: str
    has_ended: bool
    sign: str
    is_certain: bool = True

    def to_json(self) -> str:
        """As it is kept."""
        return json.dumps(self)

    @staticmethod
    def read(text: str, num_ranks: int) -> End | None:
        """The end, or None: nothing from a peer is trusted."""
        try:
            number, state, has_ended, sign, is_certain = json.loads(text)
            flags = has_ended is True, str(sign)[:_MOST_CHARACTERS], is_certain is True
            end = End(int(number), str(state), *flags)
        except (ValueError, TypeError, RecursionError):
            return None
        return end if 0 <= end.number < num_ranks and end.state in (DEAD, LEFT, CLOSED) else None


class ServerEnds:
    """This rank's part in what servers tell each other, with a thread of its own.

    Args:
        store: of these processes.
        number: of this rank.
        servers: the server of each rank.
        known: returns what this rank knows of one by its number; None of one that has not gone.
        is_watched: whether this rank would see the end of one by itself, however silent its server is.
        report: called with an end that this rank has not known of.

    Attributes:
        why_lost: why nothing is heard of other servers any more; "" while it is.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        servers: Sequence[int],
        known: Callable[[int], End | None],
        is_watched: Callable[[int], bool],
        report: Callable[[End], None],
    ) -> None:
        self._store, self._number, self._servers = store, number, tuple(servers)
        self._known, self._is_watched, self._report = known, is_watched, report
        self._own = self._servers[number]
        self._log = log_of("deaths", rank=number, num_ranks=len(self._servers))
        self._of_server = [
            [rank for rank, server in enumerate(self._servers) if server == each]
            for each in range(max(self._servers) + 1)
        ]
        self._told: set[int] = set()  # ranks whose end is in the store, so that nobody misses them
        self._next_end = self._beats = 0
        self._silent: dict[
            int, tuple[str, int]
        ] = {}  # the last heartbeat of each server, and looks since then
        self._untold_ticks = 0
        self._woken, self._last_word = threading.Event(), ""
        self.why_lost = ""
        self._thread = threading.Thread(target=self._run, name="moe_triton servers", daemon=True)

    def start(self) -> None:
        """Begins. If this process can start no thread, nothing is heard."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self.why_lost = f"this process can start no thread: {error}"

    def wake(self) -> None:
        """Somebody of this server has gone: it is told at once. From any thread."""
        self._woken.set()

    def stop(self, state: str, has_ended: bool) -> None:
        """Says that this rank is not to be missed here any more, and ends.

        Args:
            state: "left"; or "closed", where it has other buffers of the group.
            has_ended: its process ends, with buffers open.
        """
        self._last_word = End(self._number, state, has_ended, "it said so").to_json()
        self._woken.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(LAST_WORD_S)

    def _run(self) -> None:
        try:
            before = time.monotonic()
            while not self._last_word:
                began = time.monotonic()
                self.look(began - before > _LATE_S)
                before = began
                self._woken.wait(TICK_S)
                if not self._last_word:
                    self._woken.clear()
            self._tell(_AT_ONCE)  # whoever leaves for want of the dead says who that is
            self._add(self._last_word)
        except Exception as error:  # torch's, where the store's host is gone
            self.why_lost = f"the group's store does not answer ({type(error).__name__})"
            self._log.debug("ends of ranks of other servers are not heard of any more: %s", error)

    def look(self, was_late: bool) -> None:
        """One look.

        Args:
            was_late: much later than it was due.
        """
        self._hear()
        if was_late:
            self._silent.clear()
        here = [rank for rank in self._of_server[self._own] if rank == self._number or self._is_there(rank)]
        turn = min(here.index(self._number), _MOST_TURNS)
        self._tell(turn)
        if turn == 0 or self._silent_ticks(self._own) >= turn:
            self._beats += 1
            self._store.set(f"beat/{self._own}", f"{self._number} {self._beats}")
            self._listen()

    def _tell(self, turn: int) -> None:
        """Tells of this server's ranks that have gone."""
        known = [self._known(rank) for rank in self._of_server[self._own] if rank not in self._told]
        ends = [end for end in known if end is not None]
        self._untold_ticks = self._untold_ticks + 1 if ends else 0
        if self._untold_ticks > turn:
            for end in ends:
                self._told.add(end.number)
                self._add(end.to_json())

    def _listen(self) -> None:
        """Looks at the heartbeats of the servers behind this one."""
        count = len(self._of_server)
        behind = [(self._own + step) % count for step in range(1, count)]
        there = [each for each in behind if any(map(self._is_missed, self._of_server[each]))]
        for server in there[:MOST_WATCHED]:
            ticks = self._silent_ticks(server)
            if ticks >= (SILENT_TICKS if self._silent[server][0] else FIRST_TICKS):
                sign = f"no heartbeat of its server for {ticks * TICK_S:.1f} s, in the group's store"
                ranks = filter(self._is_missed, self._of_server[server])
                ends = [End(rank, DEAD, True, sign, False) for rank in ranks]
                for end in ends:
                    self._told.add(end.number)
                    self._add(end.to_json())
                for end in ends:
                    self._report(end)

    def _is_there(self, rank: int) -> bool:
        return rank not in self._told and self._known(rank) is None

    def _is_missed(self, rank: int) -> bool:
        return self._is_there(rank) and not self._is_watched(rank)

    def _silent_ticks(self, server: int) -> int:
        beat = read_key(self._store, f"beat/{server}")
        before, ticks = self._silent.get(server, (beat, -1))
        ticks = ticks + 1 if beat == before else 0
        self._silent[server] = beat, ticks
        return ticks

    def _hear(self) -> None:
        """Takes what others have told since the last look."""
        while text := read_key(self._store, f"end/{self._next_end}"):
            self._next_end += 1
            end = End.read(text, len(self._servers))
            if end is not None:
                self._told.add(end.number)
                if end.number != self._number and end.state != CLOSED:
                    self._report(end)

    def _add(self, text: str) -> None:
        place = self._next_end
        while self._store.compare_set(f"end/{place}", "", text).decode(errors="replace") != text:
            place += 1
