"""Who of a group has gone: the one place that learns of it, and that is asked.

A *sign* is what tells of an end. There are two kinds: what the kernel says of a process of this machine
(`moe_triton.rendezvous.process_ends`) or of a connection to one of another host
(`moe_triton.rendezvous.gates`), and what ranks of other servers have left in the group's store
(`moe_triton.rendezvous.server_ends`), where no connection leads there. Any other calls `Watch.notice`.

A process that has closed its buffers of the group has *left*, and is not dead, whenever it ends. One that
ends in Python's way with a buffer open, as after an error, has left as well, but nothing comes from it any
more: who waits for it is told. Any other end is a death.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from moe_triton.core.errors import WindowError
from moe_triton.core.health import RankHealth
from moe_triton.core.shared_memory import STALE_AFTER_S
from moe_triton.core.shared_memory import folder as shared_folder
from moe_triton.rendezvous.gates import CONNECTING_S, Gate, Place, reach
from moe_triton.rendezvous.meeting import Meeting, shared_store_of
from moe_triton.rendezvous.process_ends import (
    BY_SOCKET,
    CLOSED,
    ENDED,
    LEFT,
    TOKEN,
    Board,
    Entrance,
    OtherProcess,
    Watcher,
    connect,
    remove_names,
    remove_stale_entrances,
)
from moe_triton.rendezvous.server_ends import End, ServerEnds
from moe_triton.rendezvous.stores import below

NOT_WATCHED = "nothing: it cannot be watched from here"
IN_STORE = "heartbeats of its server, in the group's store"
ITSELF = "this process"
ENDED_OPEN = "its process ended with a buffer open"
BY_ENTRANCE = "the end of its process, which has left its socket behind"
# Python runs what delivers posts to others first.
_LAST = -1
_PREFIX_CHARACTERS = 16
JOINS_SERVERS = True
"""Whether servers of one machine have connections; without them they are as hosts that nothing joins."""

_watcher = Watcher()


class Gone(NamedTuple):
    """The end of a rank.

    Attributes:
        rank: its number among those that meet.
        state: "dead", or "left" by its own will.
        has_ended: its process has ended, so that nothing comes from it any more.
        since_s: when this process noticed, as ``time.time()`` has it.
        sign: by which, in words.
        is_certain: a kernel says so, or the rank itself; otherwise it may only have been stopped.
    """

    rank: int
    state: Literal["dead", "left"]
    has_ended: bool
    since_s: float
    sign: str
    is_certain: bool = True

    @property
    def is_lost(self) -> bool:
        """Whether it has certainly ended while others counted on it."""
        return self.is_certain and self.has_ended and (self.state == "dead" or self.sign == ENDED_OPEN)

    @property
    def in_words(self) -> str:
        """What has become of it, for an error."""
        return f"is dead ({self.sign})" if self.state == "dead" else f"has left ({self.sign})"


class Peer:
    """Another process of the group, for all buffers of this one.

    Args:
        deaths: of the group.
        token: that ranks know it by; a process that takes a rank's place later has another one.
    """

    def __init__(self, deaths: Deaths, token: str) -> None:
        self._deaths, self.token = weakref.ref(deaths), token
        self.process: OtherProcess | None = None
        self.gone: Gone | None = None
        self.since_s = time.time()
        self.uses = 0

    def make_process(self, is_far: bool) -> OtherProcess:
        """Begins to watch it, as a process of this machine.

        Args:
            is_far: of another server, which is played: the connection to it is all that there is.
        """
        me = weakref.ref(self)

        def gone(word: bytes, has_ended: bool) -> None:
            if (peer := me()) is not None:
                peer._read(word, has_ended)

        if self.process is None:
            self.process = OtherProcess(self.token, gone, is_far)
        return self.process

    def _read(self, word: bytes, has_ended: bool) -> None:
        by = self.process.sign if self.process else ""
        if word == LEFT:
            self.end("left", has_ended, "it has closed its buffers")
        elif word == ENDED:
            self.end("left", has_ended, ENDED_OPEN)
        else:
            self.end("dead", has_ended, f"the end of {by or 'its process'}")

    def look(self) -> None:
        """Reads whether it has left, of which nothing tells at once."""
        if self.gone is None and self.process is not None and self.process.word() == LEFT:
            self._read(LEFT, False)

    def end(self, state: str, has_ended: bool, sign: str, is_certain: bool = True) -> None:
        """Takes in that it has gone. Of several signs the first one counts. From any thread."""
        if (deaths := self._deaths()) is None:
            return
        with deaths.lock:
            if self.gone is not None and (self.gone.has_ended or not has_ended):
                return
            before = self.gone
            if before is not None:
                self.gone = before._replace(has_ended=True)
            else:
                kind = cast(Literal["dead", "left"], state)
                self.gone = Gone(-1, kind, has_ended, time.time(), sign, is_certain)
        deaths.tell(self)


class Deaths:
    """What this process knows of a group's ranks, and what it lets them know of itself."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.board: Board | None = None
        self._ending: Finalize | None = None
        self._peers: dict[str, Peer] = {}
        self._watches: WeakSet[Watch] = WeakSet()
        self._uses = 0
        self._servers: dict[object, tuple[ServerEnds, list[int]]] = {}

    def begin_use(self, watch: Watch) -> Board | None:
        """One buffer more. Returns this process's board; None where it can have none."""
        with self.lock:
            self._watches.add(watch)
            self._uses += 1
            if self.board is None:
                try:
                    self.board = Board()
                except OSError:
                    return None
                board, servers, peers = self.board, self._servers, self._peers

                def end() -> None:
                    for ends, _ in list(servers.values()):
                        ends.stop("left", has_ended=True)
                    board.say(ENDED)
                    for peer in list(peers.values()):
                        if peer.process is not None:
                            peer.process.say(ENDED)

                self._ending = Finalize(self, end, exitpriority=_LAST)
            return self.board

    def peer(self, token: str) -> Peer:
        """One of the group's processes, which is used once more."""
        with self.lock:
            made = self._peers.setdefault(token, Peer(self, token))
            made.uses += 1
            return made

    @property
    def watched(self) -> list[str]:
        """Tokens of those whose end would be seen here."""
        return [token for token, peer in list(self._peers.items()) if peer.process is not None]

    def is_watched(self, token: str) -> bool:
        """Whether the end of a process would be seen here, whatever the store says."""
        peer = self._peers.get(token)
        return peer is not None and peer.process is not None and peer.process.sign != ""

    def known(self, token: str, number: int) -> End | None:
        """What is known of a process that has gone, as other ranks are told of it by its number."""
        peer = self._peers.get(token)
        if peer is None or peer.gone is None:
            return None
        return End(number, *peer.gone[1:3], *peer.gone[4:])

    def report(self, token: str, end: End) -> None:
        """Takes in that a process has gone, if a buffer of this one knows it."""
        if (peer := self._peers.get(token)) is not None:
            peer.end(end.state, end.has_ended, end.sign, end.is_certain)

    def servers(self, key: object, make: Callable[[], ServerEnds]) -> ServerEnds:
        """What the same ranks on the same servers tell each other, for one buffer more."""
        with self.lock:
            if key not in self._servers:
                self._servers[key] = make(), [0]
                self._servers[key][0].start()
            ends, uses = self._servers[key]
            uses[0] += 1
            return ends

    def tell(self, peer: Peer) -> None:
        """Tells all buffers that a process has gone, and the ranks of other servers."""
        for watch in list(self._watches):
            watch._hear(peer)
        for ends, _ in list(self._servers.values()):
            ends.wake()

    def _drop_servers(self, key: object) -> ServerEnds | None:
        """What these ranks tell each other, if this was the last buffer that needed it."""
        ends, uses = self._servers.get(key, (None, [0]))
        uses[0] -= 1
        if uses[0] > 0:
            return None
        self._servers.pop(key, None)
        return ends

    def end_use(self, peers: Sequence[Peer | None], key: object, entrances: Sequence[Entrance]) -> None:
        """One buffer less."""
        with self.lock:
            self._uses -= 1
            is_last, ends = not self._uses, self._drop_servers(key)
        if ends is not None:  # which tells of those that have gone, first
            ends.stop("left" if is_last else "closed", has_ended=False)
        with self.lock:
            unused = []
            for peer in filter(None, peers):
                peer.uses -= 1
                if not peer.uses:
                    unused += [peer.process] if peer.process else []
                    self._peers.pop(peer.token, None)
            board, is_last = self.board, not self._uses
            if is_last and board is not None:
                board.say(LEFT)
                self.board = None
                if self._ending:
                    self._ending.cancel()

        def give_back() -> None:
            for entrance in entrances:
                _watcher.shut(entrance, board)
            _watcher.forget(unused, LEFT if is_last else CLOSED)
            if is_last and board is not None:
                board.close()

        if not _watcher.do(give_back):
            give_back()

    def leave_to_parent(self) -> None:
        """In a forked child: all of it is the parent's."""
        self.lock = threading.RLock()
        if self.board is not None:
            self.board.close()
        self.board = None
        self._watches.clear()


class _Offer(NamedTuple):
    """What a rank says of itself while ranks construct."""

    token: str
    entrance: str
    watched: frozenset[str]
    split: str

    @staticmethod
    def read(said: object) -> _Offer | None:
        """The offer, or None: nothing from a peer is trusted."""
        if not isinstance(said, dict):
            return None
        token, entrance, watched, split = (said.get(name) for name in _Offer._fields)
        if not (isinstance(token, str) and TOKEN.fullmatch(token) and isinstance(entrance, str)):
            return None
        all_watched = frozenset(map(str, watched if isinstance(watched, list) else []))
        return _Offer(token, entrance, all_watched, str(split))


def _digest(value: object) -> str:
    """By which ranks see whether they have the same."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:_PREFIX_CHARACTERS]


@dataclass(eq=False)
class _Held:
    """What a watch holds, and gives back whoever drops it."""

    deaths: Deaths
    peers: list[Peer | None]
    key: object = None
    entrances: list[Entrance] = field(default_factory=list)
    is_closed: bool = False

    def give_back(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.deaths.end_use(self.peers, self.key, self.entrances)


_cleared: set[Path] = set()


def _remove_stale(folder: Path) -> None:
    """Removes what processes have left that were killed while they constructed; once."""
    if folder not in _cleared:
        _cleared.add(folder)
        remove_stale_entrances(folder, STALE_AFTER_S)


_deaths: WeakKeyDictionary[dist.ProcessGroup, Deaths] = WeakKeyDictionary()
_all: WeakSet[Deaths] = WeakSet()


class Watch:
    """One buffer's view of the ranks that it was constructed with, by their numbers in its meeting.

    Ranks construct it together: `offer` goes to all of them, `take` and `take_here` take what all have said,
    and from then on each end is noticed, with `open_gate` and `take_places` that of ranks on other hosts,
    too; once all have taken, `begin`. Ranks of one server are watched as processes. Those
    of others are watched by the end of a connection, as hosts have between them, or heard of in the store.

    Args:
        meeting: the group, or a part of it.

    Attributes:
        reaches_all: this rank has a connection to each rank of another server, or will have one.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._number = meeting, meeting.rank
        self._servers: tuple[int, ...] = ()
        self._ends: ServerEnds | None = None
        self._began_s = time.time()
        self._listeners: list[Callable[[Gone], None]] = []
        self._incoming: list[tuple[OtherProcess, Any]] = []
        self._board: Board | None = None
        self._folder, self._own = Path(), ""  # the name of its entrance there
        self._split = ""
        self._offers: list[_Offer | None] = []
        self._unmet: set[int] = set()
        self._watched: list[str] = []
        self._names: list[str] = []
        self.reaches_all, self._is_watching = True, False
        group = meeting.group
        deaths = Deaths() if group is None else _deaths.setdefault(group, Deaths())
        self._held = _Held(deaths, [None] * meeting.num_ranks)
        if meeting.num_ranks > 1:
            _all.add(deaths)
            self._board = deaths.begin_use(self)
            held = self._held
            self._dropped = weakref.finalize(self, lambda: _watcher.do_if_there(held.give_back))
            self._dropped.atexit = False
        else:
            self._held.is_closed = True

    def offer(self, servers: Sequence[int]) -> dict[str, object]:
        """What the other ranks are to know. Whoever takes all offers may be connected to by others.

        Args:
            servers: the server of each rank, as far as that is known yet.
        """
        self._servers, self._split = tuple(servers), _digest(tuple(servers))
        if self._board is None:
            return {}
        offered: dict[str, object] = {
            "token": self._board.token,
            "entrance": "",
            "watched": [],
            "split": self._split,
        }
        try:
            self._folder = shared_folder()
        except WindowError:  # which the window says
            return offered
        entrance = Entrance(self._folder)
        self._held.entrances.append(entrance)
        self._own, self._watched = entrance.name, self._held.deaths.watched
        return {**offered, "entrance": entrance.name, "watched": self._watched}

    def take(self, offers: Sequence[object]) -> set[int]:
        """Takes what each rank offers, and returns those that are certainly of this host.

        Others of it follow in `take_here`, and those of other hosts once they have said where they are
        (`take_places`).

        Args:
            offers: by rank.
        """
        here: set[int] = set()
        self._offers = [_Offer.read(offer) for offer in offers]
        self._names = [offer.entrance for offer in self._offers if offer is not None]
        for number, offer in enumerate(self._offers):
            if number == self._number:
                continue
            if offer is None or self._board is None:
                self.reaches_all &= not self._is_far(number)
                continue
            peer = self._held.peers[number] = self._held.deaths.peer(offer.token)
            if not self._knows(offer) and self._may_connect(number, offer):
                here |= {number} if self._approach(number, offer, peer) else set()
        self._watch_all(admits=False)  # who comes now may be one of `take_here`
        self._say(self.gone())  # those that another buffer has learnt of before this one took
        return here

    def take_here(self, here: Collection[int]) -> None:
        """Takes which ranks are of this host: of those that have no entrance some can come to this one."""
        for number in self._unmet.intersection(here):
            offer, peer, is_far = self._offers[number], self._held.peers[number], self._is_far(number)
            if offer and peer and self._own and (number > self._number or not offer.entrance):
                self._incoming.append((peer.make_process(is_far), None))
            else:
                self.reaches_all &= not is_far
        self._watch_all()

    def open_gate(self) -> Place | None:
        """Where ranks of other hosts connect to, which they are to know; None where nobody does.

        Raises:
            WindowError: this host has no address, or no port, that they reach.
        """
        if self._board is None or not JOINS_SERVERS:
            return None
        gate = Gate(self._meeting.network)
        self._held.entrances.append(gate)
        return gate.place

    def take_places(self, places: Sequence[object], here: Collection[int]) -> str:
        """Takes where each rank lets those of other hosts in. Returns why one is out of reach; "" if none is.

        Args:
            places: by rank, as JSON has them.
            here: ranks of this host.
        """
        others = {
            number: peer
            for number, (peer, offer) in enumerate(zip(self._held.peers, self._offers, strict=True))
            if number not in here and peer and offer and not self._knows(offer)
        }
        there = {number: place for number in others if (place := Place.read(places[number]))}
        self.reaches_all &= len(there) == len(others) and JOINS_SERVERS
        try:
            lines = reach(there, CONNECTING_S)
        except WindowError as error:
            return str(error)
        for number, line in lines.items():
            self._join(number, others[number], line, is_far=True, has_own=True)
        self._watch_all()
        return ""

    def take_servers(self, servers: Sequence[int]) -> None:
        """Takes the server of each rank, as all agree on them."""
        self._servers = tuple(servers)

    def _watch_all(self, admits: bool = True) -> None:
        self._is_watching = self._board is not None and self._watch(self._board, admits)

    def _watch(self, board: Board, admits: bool = True) -> bool:
        """Watches from now on, and lets others in. False if this process can start no thread."""
        # A copy: none is to be admitted before those are known that come to it.
        entrances, incoming = list(self._held.entrances) if admits else [], self._incoming

        def watch() -> None:
            for process, line in incoming:
                _watcher.watch(process, line)
            for entrance in entrances:
                _watcher.admit(entrance, board)

        if not _watcher.do(watch):
            return False
        self._incoming = []
        return True

    def _knows(self, offer: _Offer) -> bool:
        """Whether each of the two watches the other already, for another buffer."""
        return offer.token in self._watched and self._board is not None and self._board.token in offer.watched

    def _is_far(self, number: int) -> bool:
        """Whether a rank of this host is of another server, which is played."""
        return self._servers[number] != self._servers[self._number]

    def _may_connect(self, number: int, offer: _Offer) -> bool:
        if offer.split != self._split:
            return False  # settings that differ, as is said when they are compared
        if self._is_far(number) and not JOINS_SERVERS:
            self.reaches_all = False
            return False
        return True

    def _approach(self, number: int, offer: _Offer, peer: Peer) -> bool:
        """Connects to a rank where one of the two does not watch the other. Whether it is of this host."""
        try:  # whoever connects here is looked for as well, for it may have ended before
            line = connect(self._folder, offer.entrance) if offer.entrance else None
        except ConnectionRefusedError:
            peer.end("dead", True, BY_ENTRANCE)
            return True
        is_far = self._is_far(number)
        if line is not None:
            self._join(number, peer, line, is_far, bool(self._own))
            return True
        self._unmet.add(number)
        return False

    def _join(self, number: int, peer: Peer, line: socket.socket, is_far: bool, has_own: bool) -> None:
        """Of the two connections between this rank and another one that of the later rank is kept.

        Args:
            number: of the other rank.
            peer: it.
            line: this rank's connection to it.
            is_far: it is of another server.
            has_own: it can connect to this rank.
        """
        if number > self._number and has_own:
            # Until the other one comes this says whether its process ends before.
            self._incoming.append((peer.make_process(is_far), line))
            return
        assert self._board is not None
        try:
            self._board.greet(line) if is_far else self._board.hand_to(line)
        except OSError:
            line.close()
            self.reaches_all &= not is_far
        else:
            self._incoming.append((peer.make_process(is_far), line))

    def begin(self, reach_all: bool = True) -> None:
        """All ranks have taken: nobody connects any more.

        Args:
            reach_all: what `reaches_all` is on all ranks; if not, servers tell each other in the store.
        """
        board, folder = self._board, self._folder
        if board is None:
            return
        remove_names(self._folder, self._names)  # of all, for one may be killed before it removes its own
        self._names = []

        def expire(entrance: Entrance) -> None:
            _watcher.expire(entrance)
            _remove_stale(folder)

        is_watching = self._is_watching or self._watch(board)
        for entrance in self._held.entrances:
            if not (is_watching and _watcher.do(partial(expire, entrance))):
                entrance.hand_out(board)  # others can watch this process all the same
                entrance.close()
        if not reach_all:
            self._begin_servers()

    def _begin_servers(self) -> None:
        group, me, board = self._meeting.group, weakref.ref(self._held.deaths), self._board
        assert group is not None
        assert board is not None
        tokens = [peer.token if peer else "" for peer in self._held.peers]
        tokens[self._number] = board.token
        self._held.key = tuple(tokens), self._servers
        store = below(shared_store_of(group), f"deaths/{_digest(self._held.key)}")

        def known(number: int) -> End | None:
            deaths = me()
            return deaths.known(tokens[number], number) if deaths else None

        def report(end: End) -> None:
            if (deaths := me()) is not None:
                deaths.report(tokens[end.number], end)

        def is_watched(number: int) -> bool:
            deaths = me()
            return deaths is not None and deaths.is_watched(tokens[number])

        make = partial(ServerEnds, store, self._number, self._servers, known, is_watched, report)
        self._ends = self._held.deaths.servers(self._held.key, make)

    def listen(self, call: Callable[[Gone], None]) -> None:
        """Has each end told from now on, on the thread that notices it.

        Args:
            call: with a rank that is dead, or has left and its process has ended; of one that has left only,
                where that is known. It returns soon and raises nothing.
        """
        self._listeners.append(call)
        for gone in self.gone().values():
            call(gone)

    def notice(self, rank: int, sign: str, is_certain: bool = True) -> None:
        """Takes in a death that something else has noticed. From any thread.

        Args:
            rank: its number.
            sign: what has, in words.
            is_certain: it cannot only have been stopped.
        """
        if (peer := self._held.peers[rank]) is not None:
            peer.end("dead", True, sign, is_certain)

    def is_on_other_host(self, rank: int) -> bool:
        """Whether what a rank has sent may come behind the word of its end."""
        hosts = self._meeting.hosts
        return hosts[rank] != hosts[self._number]

    def known_before(self) -> Mapping[int, Gone]:
        """Those of its ranks that are lost, as other buffers of the group know before ranks meet."""
        members, known = self._meeting.members, {}
        for watch in [each for each in list(self._held.deaths._watches) if not each._held.is_closed]:
            for number, gone in watch.gone().items():
                if gone.is_lost and (member := watch._meeting.members[number]) in members:
                    rank = members.index(member)
                    known[rank] = gone._replace(rank=rank)
        return known

    def gone(self) -> Mapping[int, Gone]:
        """Who has gone, by rank."""
        peers = enumerate(self._held.peers)
        return {n: peer.gone._replace(rank=n) for n, peer in peers if peer and peer.gone}

    def dead(self) -> Mapping[int, Gone]:
        """Who of them is dead."""
        return {rank: gone for rank, gone in self.gone().items() if gone.state == "dead"}

    def is_quiet(self, rank: int) -> bool:
        """Whether a rank certainly writes nothing any more: it has ended, or has closed its buffers."""
        if (peer := self._held.peers[rank]) is None:
            return False
        peer.look()
        gone = peer.gone
        return gone is not None and gone.is_certain and (gone.has_ended or gone.state == "left")

    def health(self) -> list[RankHealth]:
        """What is known of each rank."""
        return [self._health_of(number) for number in range(len(self._held.peers))]

    def _health_of(self, number: int) -> RankHealth:
        peer = self._held.peers[number]
        if number == self._number:
            return RankHealth(number, "alive", self._began_s, ITSELF)
        if peer is None:
            return RankHealth(number, "alive", self._began_s, NOT_WATCHED)
        peer.look()
        if peer.gone is not None:
            return RankHealth(number, peer.gone.state, peer.gone.since_s, peer.gone.sign)
        sign = (peer.process.sign or BY_SOCKET) if peer.process else ""
        if not sign and self._ends is not None:
            sign = f"nothing: {self._ends.why_lost}" if self._ends.why_lost else IN_STORE
        return RankHealth(number, "alive", peer.since_s, sign or NOT_WATCHED)

    def _hear(self, peer: Peer) -> None:
        if not self._offers:  # what other buffers of the group learn while this one's ranks meet first
            self._say(self.known_before())
        self._say({rank: gone for rank, gone in self.gone().items() if self._held.peers[rank] is peer})

    def _say(self, gone: Mapping[int, Gone]) -> None:
        """Tells all who listen."""
        for each in gone.values():
            for call in self._listeners:
                call(each)

    def close(self) -> None:
        """Watches no longer; with the last buffer of the group this rank has left."""
        self._listeners.clear()
        # What there is of a construction that has failed.
        remove_names(self._folder, self._names)
        for _, line in self._incoming:
            if line is not None:
                line.close()
        self._names, self._incoming = [], []
        self._held.give_back()


def _leave_all_to_parent() -> None:
    global _deaths
    _deaths = WeakKeyDictionary()
    for deaths in list(_all):
        for watch in list(deaths._watches):
            watch._held.is_closed = True
            for entrance in watch._held.entrances:
                entrance.listener.close()
        deaths.leave_to_parent()
    _all.clear()
    _watcher.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
