"""What Armv8 lets a few short threads see of each other: its axiomatic model of memory, searched whole.

A candidate execution says which write each read has read from (rf), and in which order each place was
written (co). Armv8 allows it where three axioms hold; names are those of the Arm Architecture Reference
Manual, B2.3, and of herd's ``aarch64.cat``:

- internal visibility: each place by itself is sequentially consistent;
- external visibility: `ob`, ordered-before, has no cycle. It is made of what other threads observe (obs: rfe,
  coe, fre), dependencies (dob), atomics (aob) and barriers (bob);
- atomicity: no other thread's write comes between the read and the write of an atomic.

Memory is multi-copy atomic: a write is there for all other threads at once. Where versions of the model
differ, the weakest is taken: an atomic with acquire and release is no barrier between what is before and
behind it (later versions make it one), and a release orders nothing before later writes to its place. So
what is shown to be forbidden here is forbidden by any of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


class Acquire(enum.Enum):
    """What a load asks for."""

    NO = "ldr"
    PC = "ldapr"
    YES = "ldar"


@dataclass(frozen=True)
class Load:
    """Reads a place.

    Attributes:
        place: its name.
        into: a register, whose name no other one of the program has; "" if nobody asks for it.
        acquire: its order.
        address: registers that the address is computed from.
        reads: what it must have read for the program to go this way; None: anything.
    """

    place: str
    into: str = ""
    acquire: Acquire = Acquire.NO
    address: tuple[str, ...] = ()
    reads: int | None = None


@dataclass(frozen=True)
class Store:
    """Writes a place.

    Attributes:
        place: its name.
        value: a number, or the register whose value it is.
        release: whether it is a store-release.
        address: registers that the address is computed from.
        data: further registers that the value is computed from, without changing it.
    """

    place: str
    value: int | str
    release: bool = False
    address: tuple[str, ...] = ()
    data: tuple[str, ...] = ()


@dataclass(frozen=True)
class Update:
    """Reads a place and writes it, in one: an atomic instruction, or a pair of exclusives that has succeeded.

    Attributes:
        place: its name.
        into: as of a load, what was there.
        adds: what is added to that.
        sets: what is written in its stead, if that is no sum.
        acquire: whether the read is a load-acquire.
        release: whether the write is a store-release.
        reads: as of a load.
    """

    place: str
    into: str = ""
    adds: int = 0
    sets: int | None = None
    acquire: bool = False
    release: bool = False
    reads: int | None = None


class Fence(enum.Enum):
    """A barrier."""

    FULL = "dmb ish"
    LOADS = "dmb ishld"
    STORES = "dmb ishst"
    INSTRUCTIONS = "isb"


@dataclass(frozen=True)
class Branch:
    """Decides by a register whether the rest is run: a control dependency. It is run."""

    on: str


Instruction = Load | Store | Update | Fence | Branch
Thread = Sequence[Instruction]
Condition = Mapping[str, int]
"""What registers hold at the end, and places: the values of their last writes."""


@dataclass
class _Event:
    """A read or write, as a node of the graphs.

    Attributes:
        index: of the node.
        thread: which; -1 of initial writes.
        at: its place in the thread.
        place: what it reads or writes.
        is_write: which of both.
        value: of a write that does not depend on reads.
        source: of any other write, the register it writes; of an update's, its own read.
        adds: what is added to that.
    """

    index: int
    thread: int
    at: int
    place: str
    is_write: bool
    value: int | None = None
    source: int | None = None
    adds: int = 0
    register: str = ""
    reads: int | None = None
    acquire: Acquire = Acquire.NO
    release: bool = False
    update: int | None = None  # the other half
    address: tuple[int, ...] = ()
    data: tuple[int, ...] = ()


Reach = list[int]
"""By node, the set of those behind it, as bits: closed."""


def _extended(reach: Reach, edges: Sequence[tuple[int, int]]) -> Reach | None:
    """With more edges, or None where that closes a cycle."""
    reach = list(reach)
    for begin, end in edges:
        if begin == end or reach[end] >> begin & 1:
            return None
        if reach[begin] >> end & 1:
            continue
        behind = reach[end] | 1 << end
        for node, found in enumerate(reach):
            if node == begin or found >> begin & 1:
                reach[node] = found | behind
    return reach


@dataclass
class Program:
    """Some threads, and what they begin with.

    Attributes:
        threads: what each runs, in its order.
        start: what places hold before; 0 where nothing is said.
    """

    threads: Sequence[Thread]
    start: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._events: list[_Event] = []
        self._registers: dict[str, int] = {}
        self._ordered: list[tuple[int, int]] = []
        places = sorted({i.place for t in self.threads for i in t if isinstance(i, Load | Store | Update)})
        for place in places:
            self._add(-1, 0, place, is_write=True, value=self.start.get(place, 0))
        for number, thread in enumerate(self.threads):
            self._read_thread(number, thread)
        self._places = places
        by_place = {place: [e for e in self._events if e.place == place] for place in places}
        self._writes_of = {place: [e for e in events if e.is_write] for place, events in by_place.items()}
        self._reads_of = {place: [e for e in events if not e.is_write] for place, events in by_place.items()}
        in_program = [
            (one.index, other.index)
            for events in by_place.values()
            for one in events
            for other in events
            if one.thread == other.thread >= 0 and one.index < other.index
        ]
        nothing = [0] * len(self._events)
        internal, external = _extended(nothing, in_program), _extended(nothing, self._ordered)
        assert internal is not None, "program order has no cycles"
        assert external is not None, "program order has no cycles"
        self._begin = (internal, external)

    def _add(self, thread: int, at: int, place: str, is_write: bool, **rest: object) -> _Event:
        event = _Event(len(self._events), thread, at, place, is_write, **rest)  # type: ignore[arg-type]
        self._events.append(event)
        return event

    def _read_thread(self, number: int, thread: Thread) -> None:
        """Turns instructions into events, and into the order that they have whatever is read."""
        mine: list[_Event] = []
        fences: list[tuple[int, Fence]] = []
        controls: list[tuple[int, int]] = []  # where, and by which read

        def named(register: str, event: _Event) -> None:
            if register:
                assert register not in self._registers, f"two registers are called {register}"
                self._registers[register] = event.index

        for at, each in enumerate(thread):
            if isinstance(each, Fence):
                fences.append((at, each))
            elif isinstance(each, Branch):
                controls.append((at, self._registers[each.on]))
            elif isinstance(each, Load):
                address = tuple(self._registers[r] for r in each.address)
                event = self._add(
                    number,
                    at,
                    each.place,
                    is_write=False,
                    register=each.into,
                    reads=each.reads,
                    acquire=each.acquire,
                    address=address,
                )
                named(each.into, event)
                mine.append(event)
            elif isinstance(each, Store):
                address = tuple(self._registers[r] for r in each.address)
                data = [self._registers[r] for r in each.data]
                source = self._registers[each.value] if isinstance(each.value, str) else None
                value = each.value if isinstance(each.value, int) else None
                event = self._add(
                    number,
                    at,
                    each.place,
                    is_write=True,
                    value=value,
                    source=source,
                    release=each.release,
                    address=address,
                    data=tuple(data + ([source] if source is not None else [])),
                )
                mine.append(event)
            else:
                read = self._add(
                    number,
                    at,
                    each.place,
                    is_write=False,
                    register=each.into,
                    reads=each.reads,
                    acquire=Acquire.YES if each.acquire else Acquire.NO,
                )
                named(each.into, read)
                write = self._add(
                    number,
                    at,
                    each.place,
                    is_write=True,
                    value=each.sets,
                    source=None if each.sets is not None else read.index,
                    adds=each.adds,
                    release=each.release,
                )
                read.update, write.update = write.index, read.index
                mine += [read, write]
        for later, two in enumerate(mine):
            for one in mine[:later]:
                if self._is_ordered(one, two, fences, controls):
                    self._ordered.append((one.index, two.index))
            # addr; po; [W]: who reads an address may still find that there is no such memory.
            if two.is_write:
                for between in mine[:later]:
                    self._ordered += [(read, two.index) for read in between.address]

    @staticmethod
    def _is_ordered(
        one: _Event, two: _Event, fences: Sequence[tuple[int, Fence]], controls: Sequence[tuple[int, int]]
    ) -> bool:
        """Whether one is before two, which is behind it in its thread, for everybody (dob, aob, bob)."""
        if one.update == two.index:
            return True  # aob: rmw
        between = {fence for at, fence in fences if one.at < at < two.at}
        bob = (
            Fence.FULL in between
            or (Fence.LOADS in between and not one.is_write)
            or (Fence.STORES in between and one.is_write and two.is_write)
            or one.acquire is not Acquire.NO
            or two.release
            or (one.release and two.acquire is Acquire.YES)
        )
        if bob or one.is_write:
            return bob
        if one.index in two.address or one.index in two.data:
            return True
        branches = [at for at, read in controls if read == one.index and at < two.at]
        if branches and two.is_write:
            return True
        if two.is_write:
            return False
        # (ctrl | addr; po); [ISB]; po; [R]
        barriers = [at for at, fence in fences if fence is Fence.INSTRUCTIONS and at < two.at]
        return any(branch < at for branch in branches for at in barriers)

    def allows(self, condition: Condition) -> bool:
        """Whether some execution ends like this."""
        return next(self.outcomes(condition), None) is not None

    def outcomes(self, condition: Condition | None = None) -> Iterator[dict[str, int]]:
        """How executions that Armv8 allows end: all registers and places; one end may come more than once.

        Args:
            condition: only those that end like this.
        """
        wanted = dict(condition or {})
        unknown = set(wanted) - set(self._registers) - set(self._places)
        assert not unknown, f"no register or place: {sorted(unknown)}"
        for read in self._events:
            if read.reads is not None:
                assert wanted.get(read.register, read.reads) == read.reads or not read.register
        self._wanted = {self._registers[n]: v for n, v in wanted.items() if n in self._registers}
        self._wanted |= {e.index: e.reads for e in self._events if e.reads is not None}
        self._last = {name: value for name, value in wanted.items() if name in self._places}
        yield from self._by_place(0, *self._begin, {}, {})

    def _by_place(
        self, number: int, internal: Reach, external: Reach, read_from: dict[int, int], last: dict[str, int]
    ) -> Iterator[dict[str, int]]:
        """Tries all orders of a place's writes, then the next place."""
        if number == len(self._places):
            yield from self._end(read_from, last)
            return
        place = self._places[number]
        start, *writes = self._writes_of[place]
        yield from self._in_order(number, [start], writes, internal, external, read_from, last)

    def _in_order(
        self,
        number: int,
        order: list[_Event],
        rest: list[_Event],
        internal: Reach,
        external: Reach,
        read_from: dict[int, int],
        last: dict[str, int],
    ) -> Iterator[dict[str, int]]:
        """Tries all next writes of a place, and when all are in order, what its reads have read."""
        place = self._places[number]
        if not rest:
            wanted, value = self._last.get(place), order[-1].value
            if wanted is None or value is None or wanted == value:
                reads = self._reads_of[place]
                after = {**last, place: order[-1].index}
                yield from self._by_read(number, order, reads, internal, external, read_from, after)
            return
        for write in rest:
            if any(e.thread == write.thread and e.index < write.index for e in rest):
                continue
            inside = _extended(internal, [(e.index, write.index) for e in order])
            if inside is None:
                continue
            others = [(e.index, write.index) for e in order if e.thread not in (-1, write.thread)]
            outside = _extended(external, others)
            if outside is not None:
                left = [e for e in rest if e is not write]
                yield from self._in_order(number, [*order, write], left, inside, outside, read_from, last)

    def _by_read(
        self,
        number: int,
        order: list[_Event],
        reads: list[_Event],
        internal: Reach,
        external: Reach,
        read_from: dict[int, int],
        last: dict[str, int],
    ) -> Iterator[dict[str, int]]:
        """Tries all writes that the first of these reads may have read."""
        if not reads:
            yield from self._by_place(number + 1, internal, external, read_from, last)
            return
        read, rest = reads[0], reads[1:]
        wanted = self._wanted.get(read.index)
        for at, write in enumerate(order):
            if wanted is not None and write.value is not None and write.value != wanted:
                continue
            behind = order[at + 1 :]
            if read.update is not None and self._is_parted(read, behind):
                continue
            seen = [(write.index, read.index)] if write.thread >= 0 else []
            passed = [(read.index, e.index) for e in behind if e.index != read.update]
            inside = _extended(internal, seen + passed)
            if inside is None:
                continue
            outer = [(r, w) for r, w in passed if self._events[w].thread != read.thread]
            if write.thread not in (-1, read.thread):
                outer += seen
            if write.thread == read.thread:
                outer += self._forwarded(write, read)
            outside = _extended(external, outer)
            if outside is not None:
                found = {**read_from, read.index: write.index}
                yield from self._by_read(number, order, rest, inside, outside, found, last)

    def _is_parted(self, read: _Event, behind: Sequence[_Event]) -> bool:
        """Whether another thread's write comes between the halves of an update."""
        for write in behind:
            if write.index == read.update:
                return False
            if write.thread != read.thread:
                return True
        return True

    @staticmethod
    def _forwarded(write: _Event, read: _Event) -> list[tuple[int, int]]:
        """What a read of an own write brings: (addr | data); rfi, and an atomic's write before an acquire."""
        before = [(each, read.index) for each in (*write.address, *write.data)]
        if write.update is not None and read.acquire is not Acquire.NO:
            before.append((write.index, read.index))
        return before

    def _end(self, read_from: Mapping[int, int], last: Mapping[str, int]) -> Iterator[dict[str, int]]:
        values: dict[int, int] = {}

        def value(event: _Event) -> int:
            if event.index not in values:
                if not event.is_write:
                    found = value(self._events[read_from[event.index]])
                elif event.value is not None:
                    found = event.value
                else:
                    assert event.source is not None
                    found = value(self._events[event.source]) + event.adds
                values[event.index] = found
            return values[event.index]

        if any(value(self._events[read]) != wanted for read, wanted in self._wanted.items()):
            return
        ends = {place: value(self._events[write]) for place, write in last.items()}
        if any(ends[place] != wanted for place, wanted in self._last.items()):
            return
        yield ends | {name: value(self._events[read]) for name, read in self._registers.items()}
