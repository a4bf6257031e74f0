"""Well-known small programs, and whether Armv8 allows how they end.

Names are those of the literature, which says of each what is stated here: Alglave, Maranget, Tautschnig,
"Herding Cats" (TOPLAS 2014), for the shapes; Pulte, Flur, Deacon, French, Sarkar, Sewell, "Simplifying ARM
Concurrency" (POPL 2018), and Alglave, Deacon, Grisenthwaite, Hacquard, Maranget, "Armed Cats" (TOPLAS
2021), for Armv8's verdicts, multi-copy atomicity among them; Deacon's ``aarch64.cat`` in herd for acquire
and release.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.memory_order.armv8 import Acquire, Branch, Condition, Fence, Load, Program, Store, Thread, Update

FULL, LOADS, STORES, ISB = Fence.FULL, Fence.LOADS, Fence.STORES, Fence.INSTRUCTIONS


class Litmus(NamedTuple):
    """One of them.

    Attributes:
        name: the literature's.
        threads: what runs.
        end: what is asked for.
        is_allowed: the answer.
    """

    name: str
    threads: list[Thread]
    end: Condition
    is_allowed: bool

    @property
    def program(self) -> Program:
        """What the model takes."""
        return Program(self.threads)


def w(place: str, value: int | str = 1, **more: object) -> Store:
    """A store."""
    return Store(place, value, **more)  # type: ignore[arg-type]


def wl(place: str, value: int | str = 1) -> Store:
    """A store-release."""
    return Store(place, value, release=True)


def r(place: str, into: str, *address: str) -> Load:
    """A load, whose address may come from registers."""
    return Load(place, into, address=address)


def ra(place: str, into: str) -> Load:
    """A load-acquire."""
    return Load(place, into, Acquire.YES)


def rq(place: str, into: str) -> Load:
    """A load-acquire that later releases need not wait for."""
    return Load(place, into, Acquire.PC)


def xchg(place: str, into: str, value: int = 1, acquire: bool = True, release: bool = True) -> Update:
    """An exchange."""
    return Update(place, into, sets=value, acquire=acquire, release=release)


MP_END = {"a": 1, "b": 0}
SB_END = {"a": 0, "b": 0}
LB_END = {"a": 1, "b": 1}
IRIW_END = {"a": 1, "b": 0, "c": 1, "d": 0}
WRC_END = {"a": 1, "b": 1, "c": 0}
ISA2_END = {"a": 1, "b": 1, "c": 0}


def mp(*threads: Thread, allowed: bool, name: str) -> Litmus:
    """Message passing: data, then a flag, which another thread looks at first."""
    return Litmus(f"MP{name}", list(threads), MP_END, allowed)


def iriw(name: str, first: Thread, second: Thread, allowed: bool) -> Litmus:
    """Independent reads of independent writes."""
    return Litmus(f"IRIW{name}", [[w("x")], first, [w("y")], second], IRIW_END, allowed)


def _plain(allowed: bool = True) -> list[Litmus]:
    return [
        mp([w("x"), w("y")], [r("y", "a"), r("x", "b")], allowed=allowed, name=""),
        Litmus("SB", [[w("x"), r("y", "a")], [w("y"), r("x", "b")]], SB_END, allowed),
        Litmus("LB", [[r("x", "a"), w("y")], [r("y", "b"), w("x")]], LB_END, allowed),
        Litmus("S", [[w("x", 2), w("y")], [r("y", "a"), w("x")]], {"a": 1, "x": 2}, allowed),
        Litmus("R", [[w("x"), w("y")], [w("y", 2), r("x", "a")]], {"a": 0, "y": 2}, allowed),
        Litmus("2+2W", [[w("x", 2), w("y")], [w("y", 2), w("x")]], {"x": 2, "y": 2}, allowed),
        iriw("", [r("x", "a"), r("y", "b")], [r("y", "c"), r("x", "d")], allowed),
        Litmus("WRC", [[w("x")], [r("x", "a"), w("y")], [r("y", "b"), r("x", "c")]], WRC_END, allowed),
        Litmus(
            "ISA2", [[w("x"), w("y")], [r("y", "a"), w("z")], [r("z", "b"), r("x", "c")]], ISA2_END, allowed
        ),
        Litmus(
            "RWC",
            [[w("x")], [r("x", "a"), r("y", "b")], [w("y"), r("x", "c")]],
            {"a": 1, "b": 0, "c": 0},
            allowed,
        ),
        Litmus(
            "3.SB",
            [[w("x"), r("y", "a")], [w("y"), r("z", "b")], [w("z"), r("x", "c")]],
            {"a": 0, "b": 0, "c": 0},
            allowed,
        ),
        Litmus(
            "3.2W",
            [[w("x", 2), w("y")], [w("y", 2), w("z")], [w("z", 2), w("x")]],
            {"x": 2, "y": 2, "z": 2},
            allowed,
        ),
    ]


def fenced(litmus: Litmus) -> Litmus:
    """With a full barrier between any two accesses of a thread: only interleavings are left."""
    threads: list[Thread] = [
        [each for access in thread for each in (access, FULL)][:-1] for thread in litmus.threads
    ]
    return Litmus(f"{litmus.name}+dmbs", threads, litmus.end, False)


MP_WRITER: Thread = [w("x"), FULL, w("y")]

LITMUS = [
    *_plain(),
    *map(fenced, _plain()),
    # Message passing with less.
    mp(MP_WRITER, [r("y", "a"), r("x", "b")], allowed=True, name="+dmb+po"),
    mp([w("x"), w("y")], [r("y", "a"), FULL, r("x", "b")], allowed=True, name="+po+dmb"),
    mp([w("x"), STORES, w("y")], [r("y", "a"), LOADS, r("x", "b")], allowed=False, name="+dmb.st+dmb.ld"),
    mp([w("x"), LOADS, w("y")], [r("y", "a"), LOADS, r("x", "b")], allowed=True, name="+dmb.ld+dmb.ld"),
    mp(MP_WRITER, [r("y", "a"), STORES, r("x", "b")], allowed=True, name="+dmb+dmb.st"),
    mp(MP_WRITER, [r("y", "a"), r("x", "b", "a")], allowed=False, name="+dmb+addr"),
    mp([w("x"), w("y")], [r("y", "a"), r("x", "b", "a")], allowed=True, name="+po+addr"),
    mp(MP_WRITER, [r("y", "a"), Branch("a"), r("x", "b")], allowed=True, name="+dmb+ctrl"),
    mp(MP_WRITER, [r("y", "a"), Branch("a"), ISB, r("x", "b")], allowed=False, name="+dmb+ctrlisb"),
    mp(MP_WRITER, [r("y", "a"), ISB, r("x", "b")], allowed=True, name="+dmb+isb"),
    mp([w("x"), wl("y")], [ra("y", "a"), r("x", "b")], allowed=False, name="+popl+poap"),
    mp([w("x"), wl("y")], [rq("y", "a"), r("x", "b")], allowed=False, name="+popl+poqp"),
    mp([w("x"), wl("y")], [r("y", "a"), r("x", "b")], allowed=True, name="+popl+po"),
    mp([wl("x"), w("y")], [ra("y", "a"), r("x", "b")], allowed=True, name="+polp+poap"),
    mp([w("x"), wl("y")], [r("y", "a"), ra("x", "b")], allowed=True, name="+popl+popa"),
    # Behind a flag: a store is not speculated and forwarded where its address has come from the flag (PPOAA),
    # where a branch decided it, it may be (PPOCA).
    mp(
        MP_WRITER,
        [r("y", "a"), Branch("a"), w("z"), r("z", "c"), r("x", "b", "c")],
        allowed=True,
        name="+PPOCA",
    ),
    mp(
        MP_WRITER,
        [r("y", "a"), w("z", 1, address=("a",)), r("z", "c"), r("x", "b", "c")],
        allowed=False,
        name="+PPOAA",
    ),
    # Atomics as hand-over: the write half releases, the read half acquires, neither does the other's part.
    mp([w("x"), xchg("y", "c")], [ra("y", "a"), r("x", "b")], allowed=False, name="+po-swpal+poap"),
    mp(
        [w("x"), xchg("y", "c", release=False)],
        [ra("y", "a"), r("x", "b")],
        allowed=True,
        name="+po-swpa+poap",
    ),
    mp([w("x"), wl("y")], [xchg("y", "a", 2), r("x", "b")], allowed=False, name="+popl+swpal-po"),
    mp(
        [w("x"), wl("y")],
        [xchg("y", "a", 2, acquire=False), r("x", "b")],
        allowed=True,
        name="+popl+swpl-po",
    ),
    # A release sequence: an update behind the release hands it on.
    Litmus(
        "MP+popl+rmw+poap",
        [[w("x"), wl("y")], [Update("y", "c", adds=1)], [ra("y", "a"), r("x", "b")]],
        {"a": 2, "c": 1, "b": 0},
        False,
    ),
    # Store buffering: a load-acquire waits for store-releases, one of the weaker kind does not.
    Litmus("SB+rel-acq", [[wl("x"), ra("y", "a")], [wl("y"), ra("x", "b")]], SB_END, False),
    Litmus("SB+rel-acqpc", [[wl("x"), rq("y", "a")], [wl("y"), rq("x", "b")]], SB_END, True),
    Litmus("SB+rel-po", [[wl("x"), r("y", "a")], [wl("y"), r("x", "b")]], SB_END, True),
    Litmus("SB+po-acq", [[w("x"), ra("y", "a")], [w("y"), ra("x", "b")]], SB_END, True),
    Litmus("SB+dmb.sts", [[w("x"), STORES, r("y", "a")], [w("y"), STORES, r("x", "b")]], SB_END, True),
    Litmus("SB+dmb.lds", [[w("x"), LOADS, r("y", "a")], [w("y"), LOADS, r("x", "b")]], SB_END, True),
    Litmus("SB+dmb+po", [[w("x"), FULL, r("y", "a")], [w("y"), r("x", "b")]], SB_END, True),
    Litmus("SB+swpal-acq", [[xchg("x", "c"), ra("y", "a")], [xchg("y", "d"), ra("x", "b")]], SB_END, False),
    Litmus(
        "SB+swpa-acq",
        [[xchg("x", "c", release=False), ra("y", "a")], [xchg("y", "d", release=False), ra("x", "b")]],
        SB_END,
        True,
    ),
    # Load buffering: any dependency is enough, and values do not come out of thin air.
    Litmus(
        "LB+addrs",
        [[r("x", "a"), w("y", 1, address=("a",))], [r("y", "b"), w("x", 1, address=("b",))]],
        LB_END,
        False,
    ),
    Litmus("LB+datas", [[r("x", "a"), w("y", "a")], [r("y", "b"), w("x", "b")]], LB_END, False),
    Litmus(
        "LB+data+po",
        [[r("x", "a"), w("y", 1, data=("a",))], [r("y", "b"), w("x")]],
        LB_END,
        True,
    ),
    Litmus(
        "LB+ctrls", [[r("x", "a"), Branch("a"), w("y")], [r("y", "b"), Branch("b"), w("x")]], LB_END, False
    ),
    Litmus("LB+acq+data", [[ra("x", "a"), w("y")], [r("y", "b"), w("x", 1, data=("b",))]], LB_END, False),
    Litmus("LB+rels", [[r("x", "a"), wl("y")], [r("y", "b"), wl("x")]], LB_END, False),
    Litmus("LB+dmb.lds", [[r("x", "a"), LOADS, w("y")], [r("y", "b"), LOADS, w("x")]], LB_END, False),
    Litmus("LB+dmb.sts", [[r("x", "a"), STORES, w("y")], [r("y", "b"), STORES, w("x")]], LB_END, True),
    # An address that is not known yet may be one that faults: later writes wait for it.
    Litmus(
        "LB+addrpos",
        [[r("x", "a"), r("z", "c", "a"), w("y")], [r("y", "b"), r("v", "d", "b"), w("x")]],
        LB_END,
        False,
    ),
    # One side of S, R and 2+2W.
    Litmus(
        "S+dmb+data",
        [[w("x", 2), FULL, w("y")], [r("y", "a"), w("x", 1, data=("a",))]],
        {"a": 1, "x": 2},
        False,
    ),
    Litmus(
        "S+dmb.st+ctrl",
        [[w("x", 2), STORES, w("y")], [r("y", "a"), Branch("a"), w("x")]],
        {"a": 1, "x": 2},
        False,
    ),
    Litmus("S+rel+acq", [[w("x", 2), wl("y")], [ra("y", "a"), w("x")]], {"a": 1, "x": 2}, False),
    Litmus("S+dmb+po", [[w("x", 2), FULL, w("y")], [r("y", "a"), w("x")]], {"a": 1, "x": 2}, True),
    Litmus(
        "R+dmb.st+dmb", [[w("x"), STORES, w("y")], [w("y", 2), FULL, r("x", "a")]], {"a": 0, "y": 2}, False
    ),
    Litmus("R+rels-acq", [[w("x"), wl("y")], [wl("y", 2), ra("x", "a")]], {"a": 0, "y": 2}, False),
    Litmus("R+dmb+po", [[w("x"), FULL, w("y")], [w("y", 2), r("x", "a")]], {"a": 0, "y": 2}, True),
    Litmus(
        "2+2W+dmb.sts", [[w("x", 2), STORES, w("y")], [w("y", 2), STORES, w("x")]], {"x": 2, "y": 2}, False
    ),
    Litmus("2+2W+rels", [[w("x", 2), wl("y")], [w("y", 2), wl("x")]], {"x": 2, "y": 2}, False),
    Litmus("2+2W+dmb+po", [[w("x", 2), FULL, w("y")], [w("y", 2), w("x")]], {"x": 2, "y": 2}, True),
    # Multi-copy atomic: a write is there for all others at once, so a third thread needs dependencies alone.
    iriw("+addrs", [r("x", "a"), r("y", "b", "a")], [r("y", "c"), r("x", "d", "c")], False),
    iriw("+acqs", [ra("x", "a"), r("y", "b")], [ra("y", "c"), r("x", "d")], False),
    iriw("+addr+po", [r("x", "a"), r("y", "b", "a")], [r("y", "c"), r("x", "d")], True),
    Litmus(
        "WRC+addrs",
        [[w("x")], [r("x", "a"), w("y", 1, address=("a",))], [r("y", "b"), r("x", "c", "b")]],
        WRC_END,
        False,
    ),
    Litmus("WRC+po+addr", [[w("x")], [r("x", "a"), w("y")], [r("y", "b"), r("x", "c", "b")]], WRC_END, True),
    Litmus(
        "WRC+data+po",
        [[w("x")], [r("x", "a"), w("y", 1, data=("a",))], [r("y", "b"), r("x", "c")]],
        WRC_END,
        True,
    ),
    Litmus(
        "ISA2+dmb+addr+addr",
        [[w("x"), FULL, w("y")], [r("y", "a"), w("z", 1, address=("a",))], [r("z", "b"), r("x", "c", "b")]],
        ISA2_END,
        False,
    ),
    Litmus(
        "ISA2+po+addr+addr",
        [[w("x"), w("y")], [r("y", "a"), w("z", 1, address=("a",))], [r("z", "b"), r("x", "c", "b")]],
        ISA2_END,
        True,
    ),
    # Of one place.
    Litmus("CoRR", [[w("x")], [r("x", "a"), r("x", "b")]], MP_END, False),
    Litmus(
        "CoRR2",
        [[w("x", 1)], [w("x", 2)], [r("x", "a"), r("x", "b")], [r("x", "c"), r("x", "d")]],
        {"a": 1, "b": 2, "c": 2, "d": 1},
        False,
    ),
    Litmus("CoWW", [[w("x", 1), w("x", 2)]], {"x": 1}, False),
    Litmus("CoWR", [[w("x", 1), r("x", "a")], [w("x", 2)]], {"a": 2, "x": 1}, False),
    Litmus("CoWR0", [[w("x", 1), r("x", "a")]], {"a": 0}, False),
    Litmus("CoRW1", [[r("x", "a"), w("x", 1)]], {"a": 1}, False),
    Litmus("CoRW2", [[r("x", "a"), w("x", 1)], [w("x", 2)]], {"a": 2, "x": 2}, False),
    # Atomics of one place: none is lost, and no write comes in between.
    Litmus("two additions", [[Update("x", "a", adds=1)], [Update("x", "b", adds=1)]], SB_END, False),
    Litmus("addition and write", [[Update("x", "a", adds=1)], [w("x", 5)]], {"a": 0, "x": 5}, True),
    Litmus("write in an addition", [[Update("x", "a", adds=1)], [w("x", 5)]], {"a": 0, "x": 1}, False),
]
