"""Zones of A2's hierarchy: for 2 servers of 2 ranks, every programme of dispatches and combines, in every
order.

What ranks and queues do does not depend on when things come, so a programme is a partial order of steps:
those of a rank, and a step that waits after the one that writes what it waits for. Something is written over
in some order if and only if the step that writes is not behind the one that reads last what lies there. For
short programmes the orders themselves are gone through too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest

SERVERS, CARDS = 2, 2
RANKS = range(SERVERS * CARDS)
REGIONS = ("out", "rail_slots", "forward_slots", "result_slots", "partial_rows")
TWO = dict.fromkeys(REGIONS, 2)

Cell = tuple[str, str, int, int, int]  # region, operator, owner, slot, zone


@dataclass
class Step:
    """What happens at once.

    Attributes:
        name: for messages.
        after: bits of the steps that it follows at once.
        reads: what it is the last to read.
        writes: where.
        round: of the operator.
    """

    name: str
    after: int
    reads: tuple[Cell, ...] = ()
    writes: tuple[Cell, ...] = ()
    round: int = 0


@dataclass
class Programme:
    """The steps of all ranks and queues for some dispatches and combines.

    Args:
        calls: D is a dispatch, C a combine.
        zones: of each region.
        pieces: in which a combine returns results: those of other servers first, the own one's last.
        queue: how many messages a queue holds; None for any number.
    """

    calls: str
    zones: dict[str, int] = field(default_factory=lambda: dict(TWO))
    pieces: int = 1
    queue: int | None = None

    def __post_init__(self) -> None:
        self.steps: list[Step] = []
        self._written: dict[tuple[Cell, int], int] = {}  # the step that wrote a cell in a round
        self._ended = dict.fromkeys(RANKS, 0)  # what the next operator of a rank comes after
        self._queued: dict[tuple[int, int], list[int]] = {}  # the messages of each queue
        counts = {"D": 0, "C": 0}
        for call in self.calls:
            (self._dispatch if call == "D" else self._combine)(counts[call])
            counts[call] += 1

    def _add(
        self,
        name: str,
        round_: int,
        after: int,
        *,
        sees: Iterable[Cell] = (),
        reads: Iterable[Cell] = (),
        writes: Iterable[Cell] = (),
    ) -> int:
        """Adds a step that waits for what it sees. Returns its bit."""
        for cell in sees:
            after |= 1 << self._written[cell, round_]
        number = len(self.steps)
        self.steps.append(Step(name, after, tuple(reads), tuple(writes), round_))
        for cell in self.steps[-1].writes:
            self._written[cell, round_] = number
        return 1 << number

    def _cell(self, region: str, kind: str, owner: int, slot: int, round_: int) -> Cell:
        return region, kind, owner, slot, round_ % self.zones[region]

    def _make(self, region: str, kind: str, round_: int, rank: int, after: int, done: str) -> int:
        """What a rank has for other servers, in its out part, and for its own one; by all its cores."""
        server = rank // CARDS
        cells = [
            self._cell(region, kind, rank, server, round_)
            if other == server
            else self._cell("out", kind, rank, other, round_)
            for other in self._servers_of(rank)
        ]
        return self._add(f"rank {rank} makes {done}", round_, after, writes=cells)

    def _post(
        self, region: str, kind: str, round_: int, rank: int, after: int, done: str, others: Iterable[int]
    ) -> int:
        """What a rank posts to those of its number on other servers; the bits of its own steps."""
        server, card = divmod(rank, CARDS)
        bits = 0
        for other in others:
            peer = other * CARDS + card
            there = self._cell(region, kind, peer, server, round_)
            made = self._cell("out", kind, rank, other, round_)
            queued = self._queued.setdefault((rank, peer), [])
            # A full queue waits for its NIC alone.
            room = queued[-self.queue] if self.queue and len(queued) >= self.queue else 0
            posted = self._add(f"rank {rank} posts {done} to {peer}", round_, after | room, sees=[made])
            # A message leaves the out part some time after it was posted, behind the one before it.
            behind = posted | (queued[-1] if queued else 0)
            name = f"{done} come from {rank} to {peer}"
            queued.append(self._add(name, round_, behind, reads=[made], writes=[there]))
            bits |= posted
        return bits

    @staticmethod
    def _servers_of(rank: int) -> list[int]:
        """In the order in which a rank posts to them: the own one last."""
        own = rank // CARDS
        return [(own + place) % SERVERS for place in (*range(1, SERVERS), 0)]

    def _dispatch(self, i: int) -> None:
        began = {r: self._ended[r] for r in RANKS}
        done = f"tokens of dispatch {i}"
        made = {r: self._make("rail_slots", "D", i, r, began[r], done) for r in RANKS}
        sent = {
            r: made[r] | self._post("rail_slots", "D", i, r, made[r], done, self._servers_of(r)[:-1])
            for r in RANKS
        }
        for rank in RANKS:
            server, card = divmod(rank, CARDS)
            for source, other in itertools.product(range(SERVERS), range(CARDS)):
                came = self._cell("rail_slots", "D", rank, source, i)
                to = server * CARDS + other
                place = self._cell("forward_slots", "D", to, source * CARDS + card, i)
                name = f"rank {rank} passes rows of dispatch {i} on to {to}"
                sent[rank] |= self._add(name, i, made[rank], sees=[came], writes=[place])
        for rank in RANKS:
            rows = [self._cell("forward_slots", "D", rank, source, i) for source in RANKS]
            rails = [self._cell("rail_slots", "D", rank, source, i) for source in range(SERVERS)]
            # Tables are made of what has come by rail, and rows arranged, once all entries are there.
            self._ended[rank] = self._add(
                f"rank {rank} arranges dispatch {i}",
                i,
                sent[rank],
                sees=[*rows, *rails],
                reads=[*rows, *rails],
            )

    def _combine(self, i: int) -> None:
        bits = dict(self._ended)
        posts: dict[int, int] = dict.fromkeys(RANKS, 0)  # of the piece before: they go on beside the next one
        for piece in range(self.pieces):
            for rank in RANKS:
                server, card = divmod(rank, CARDS)
                before = bits[rank]
                for other in range(CARDS):
                    to = server * CARDS + other
                    place = self._result(to, card, piece, i)
                    name = f"rank {rank} returns piece {piece} of combine {i} to {to}"
                    bits[rank] |= self._add(name, i, before, writes=[place])
            for rank in RANKS:
                results = [self._result(rank, card, piece, i) for card in range(CARDS)]
                name = f"rank {rank} sums piece {piece} of combine {i} in its server"
                # The launch that returns has ended: what it posts of the piece before has been posted.
                after = bits[rank] | posts[rank]
                bits[rank] = self._sum(name, i, rank, piece, after, results)
            for rank in RANKS:
                others = [other for other in self._of_piece(rank, piece) if other != rank // CARDS]
                posts[rank] = self._post(
                    "partial_rows", "C", i, rank, bits[rank], f"sums of combine {i}", others
                )
        for rank in RANKS:
            sums = [self._cell("partial_rows", "C", rank, server, i) for server in range(SERVERS)]
            self._ended[rank] = self._add(
                f"rank {rank} adds the servers, combine {i}",
                i,
                bits[rank] | posts[rank],
                sees=sums,
                reads=sums,
            )

    def _of_piece(self, rank: int, piece: int) -> list[int]:
        """Servers whose results a piece has: of the last one the own one."""
        servers = self._servers_of(rank)
        return servers if self.pieces == 1 else servers[-1:] if piece else servers[:-1]

    def _result(self, owner: int, card: int, piece: int, i: int) -> Cell:
        """Results of a piece from a neighbour have places of their own."""
        return self._cell("result_slots", "C", owner, card + CARDS * piece, i)

    def _sum(self, name: str, i: int, rank: int, piece: int, after: int, results: list[Cell]) -> int:
        """Partial rows, in the out part, and in the window those for the own server."""
        server = rank // CARDS
        cells = [
            self._cell("partial_rows", "C", rank, server, i)
            if other == server
            else self._cell("out", "C", rank, other, i)
            for other in self._of_piece(rank, piece)
        ]
        return self._add(name, i, after, sees=results, reads=results, writes=cells)

    def behind(self) -> list[int]:
        """For each step the bits of all that are done whenever it is."""
        found: list[int] = []
        for step in self.steps:
            bits, direct = step.after, step.after
            while direct:
                low = direct & -direct
                bits |= found[low.bit_length() - 1]
                direct ^= low
            found.append(bits)
        return found

    def overwrites(self) -> Iterator[tuple[int, int]]:
        """Pairs of a step that reads, and one of a later round that writes where it does."""
        readers = [(cell, step.round, n) for n, step in enumerate(self.steps) for cell in step.reads]
        for n, step in enumerate(self.steps):
            for cell, round_, reader in readers:
                if cell in step.writes and round_ < step.round:
                    yield reader, n

    def trouble(self) -> str:
        """What is written over in some order; empty if nothing is in any."""
        behind = self.behind()
        for reader, writer in self.overwrites():
            if not behind[writer] >> reader & 1:
                return f"{self.steps[writer].name} before {self.steps[reader].name}"
        return ""


def programmes(length: int) -> list[str]:
    return ["".join(calls) for calls in itertools.product("DC", repeat=length)]


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("calls", programmes(6))
def test_two_zones_need_no_further_full_wait(calls: str, pieces: int) -> None:
    assert Programme(calls, pieces=pieces).trouble() == ""
    assert Programme(calls, pieces=pieces, queue=1).trouble() == ""


@pytest.mark.parametrize(
    ("region", "twice", "trouble"),
    [
        ("forward_slots", "DD", "rank 0 passes rows of dispatch 1 on to 1 before rank 1 arranges dispatch 0"),
        ("rail_slots", "DD", "tokens of dispatch 1 come from 0 to 2 before rank 2 arranges dispatch 0"),
        (
            "result_slots",
            "CC",
            "rank 0 returns piece 0 of combine 1 to 1 before rank 1 sums piece 0 of combine 0 in its server",
        ),
        (
            "partial_rows",
            "CC",
            "sums of combine 1 come from 0 to 2 before rank 2 adds the servers, combine 0",
        ),
        ("out", "DD", "rank 0 makes tokens of dispatch 1 before tokens of dispatch 0 come from 0 to 2"),
    ],
)
def test_what_one_zone_of_a_region_is_too_few_for(region: str, twice: str, trouble: str) -> None:
    """Two runs of an operator without the other one between. Where they alternate, one zone would do."""
    zones = TWO | {region: 1}
    assert Programme(twice, zones).trouble() == trouble
    for calls, pieces in itertools.product(programmes(5), (1, 2)):
        is_safe = Programme(calls, zones, pieces).trouble() == ""
        is_apart = twice not in calls and (region != "out" or "CC" not in calls)
        # A piece of the next combine is returned by who has flags of the piece before from its whole server.
        assert is_safe == (is_apart or (region == "result_slots" and pieces > 1)), (calls, pieces)


def too_early(programme: Programme) -> set[tuple[int, int]]:
    """Those of `Programme.overwrites` that come in the wrong order in some order of all steps."""
    steps = [(1 << n, step.after, n) for n, step in enumerate(programme.steps)]
    readers = [0] * len(steps)
    for reader, writer in programme.overwrites():
        readers[writer] |= 1 << reader
    unread = [0] * len(steps)
    waiting, seen = [0], {0}
    while waiting:
        done = waiting.pop()
        for bit, after, n in steps:
            if done & bit or after & ~done:
                continue
            unread[n] |= readers[n] & ~done
            now = done | bit
            if now not in seen:
                seen.add(now)
                waiting.append(now)
    assert max(seen) == (1 << len(steps)) - 1  # nobody waits for ever
    return {
        (reader, n) for n, bits in enumerate(unread) for reader in range(len(steps)) if bits >> reader & 1
    }


@pytest.mark.parametrize(
    ("calls", "zones", "pieces"),
    [
        ("CC", TWO | {"result_slots": 1}, 1),
        ("CCC", TWO, 1),
        pytest.param("CC", TWO, 2, marks=pytest.mark.long),
        pytest.param("DD", TWO | {"forward_slots": 1}, 1, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_orders_themselves_say_the_same(calls: str, zones: dict[str, int], pieces: int) -> None:
    programme = Programme(calls, zones, pieces)
    behind = programme.behind()
    found = too_early(programme)
    assert found == {(reader, n) for reader, n in programme.overwrites() if not behind[n] >> reader & 1}
    assert bool(found) == bool(programme.trouble())
