"""How the emulation's threads and processes talk to each other, and what must not come of it.

A pattern is a few threads, each of which calls functions of the emulation's headers; what they do is read
from their compiled code (`compiled`). Its `never` are ends that the model must not allow: an empty one
stands for the ways that the threads go themselves, which must not go together. docs/protocol.md has a table
of the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.memory_order.armv8 import Condition, Instruction, Program, Store, Thread
from tests.memory_order.compiled import SHARED, WAITERS, Machine, Place

WINDOW, OWN = SHARED, SHARED + 0x80000
"""A peer's window, and memory of a rank's own."""
ROW, ENTRY, NEXT = WINDOW + 0x10000, WINDOW + 0x100, WINDOW + 0x200
ROW_BYTES = 4096  # more than what is polled
UB, UB_ENTRY = 0x1000, 0x100
UB_OF = OWN + 0x20000  # where a probe without a core has one
MOST = (1 << 64) - 1


@dataclass(frozen=True)
class Pattern:
    """One of them.

    Attributes:
        name: what it is about.
        probe: whose functions are called.
        threads: runs them, and returns what each thread did.
        never: ends that are not to be.
        places: what is shared; `threads` may locate more.
    """

    name: str
    probe: str
    threads: Callable[[Machine], Sequence[Thread]]
    never: Sequence[Condition]
    places: dict[str, Place]

    def program(self, machine: Machine) -> Program:
        """What the model takes."""
        machine.places |= self.places
        return Program(self.threads(machine), machine.starts)

    def ends(self, program: Program) -> list[Condition]:
        """Those of `never` that the model allows."""
        return [end for end in self.never if program.allows(end)]


def _word(address: int) -> Place:
    """What is polled: it arrives as a whole."""
    return Place(address)


def _data(address: int) -> Place:
    """What is read by whoever has seen a flag, and by copies that may move it in any order."""
    return Place(address, is_data=True, is_polled=False)


ENTRY_PLACES = {"row": _data(ROW + 512), "flag": _word(ENTRY)}


def _core(machine: Machine, cached_bytes: int = MOST, is_paced: int = 0) -> None:
    machine.fill(OWN, ROW_BYTES)
    machine.call("set_up", cached_bytes, WINDOW, is_paced)
    machine.call("fill", 0, 0x8000, 1)


ONES = 0x0101010101010101


def _send_row(machine: Machine) -> Thread:
    return machine.run(
        "sender",
        ("copy_in", UB, OWN, ROW_BYTES),
        ("copy_out", ROW, UB, ROW_BYTES),
        ("copy_out", ENTRY, UB_ENTRY, 32),
    )


def _take_row(machine: Machine) -> Thread:
    return machine.run(
        "receiver",
        ("copy_in", UB_ENTRY, ENTRY, 32),
        ("copy_in", UB, ROW, ROW_BYTES),
        ("copy_out", OWN, UB, ROW_BYTES),
        finds={"flag": [ONES]},
    )


def _rows_and_entries(cached_bytes: int) -> Callable[[Machine], list[Thread]]:
    def threads(machine: Machine) -> list[Thread]:
        _core(machine, cached_bytes)
        sender = _send_row(machine)
        return [sender, _take_row(machine)]

    return threads


def _row_behind_row(machine: Machine) -> list[Thread]:
    """The head of a streamed row says that the one before it is there."""
    _core(machine, 0)
    sender = machine.run(
        "sender", ("copy_out", ROW, UB, ROW_BYTES), ("copy_out", ROW + ROW_BYTES, UB, ROW_BYTES)
    )
    receiver = machine.run(
        "receiver",
        ("copy_in", UB_ENTRY, ROW + ROW_BYTES, 32),
        ("copy_in", UB, ROW, ROW_BYTES),
        ("copy_out", OWN, UB, ROW_BYTES),
        finds={"head": [ONES]},
    )
    return [sender, receiver]


def _one_block(machine: Machine) -> list[Thread]:
    _core(machine)
    sender = machine.run("sender", ("copy_out", ENTRY, UB_ENTRY, 32))
    return [sender, machine.run("receiver", ("copy_in", UB_ENTRY, ENTRY, 32), finds={"flag": [ONES]})]


def _in_band(machine: Machine) -> list[Thread]:
    _core(machine)
    sender = machine.run("sender", ("copy_blocks_out", ROW, UB))
    receiver = machine.run(
        "receiver", ("copy_in", UB_ENTRY, ROW + 480, 32), ("copy_in", UB, ROW, 480), finds={"flag": [ONES]}
    )
    return [sender, receiver]


def _held_back(machine: Machine) -> list[Thread]:
    _core(machine, is_paced=1)
    sender = machine.run(
        "sender", ("copy_out", ENTRY, UB_ENTRY, 32), ("copy_out", NEXT, UB_ENTRY, 32), ("finish",)
    )
    receiver = machine.run(
        "receiver", ("copy_in", UB_ENTRY, NEXT, 32), ("copy_in", UB, ENTRY, 32), finds={"flag": [ONES]}
    )
    return [sender, receiver]


def _cleared(machine: Machine) -> list[Thread]:
    """A kernel clears an entry and then, in a later one, tells the peer, who writes it anew."""
    _core(machine)
    clears = machine.run("clears", ("plain_store", "entry", 0), ("copy_out", NEXT, UB_ENTRY, 32))
    writes = machine.run(
        "writes", ("copy_in", UB, NEXT, 32), ("copy_out", ENTRY, UB_ENTRY, 32), finds={"flag": [ONES]}
    )
    return [clears, writes]


def _rung(machine: Machine) -> list[Thread]:
    """A call in rounds: its bell before anything else; Python looks at it behind the dispatch."""
    _core(machine)
    sender = machine.run("sender", ("plain_store", "bell", 1), ("copy_out", ENTRY, UB_ENTRY, 32))
    receiver = machine.run(
        "receiver", ("copy_in", UB_ENTRY, ENTRY, 32), ("plain_load", "bell"), finds={"flag": [ONES]}
    )
    return [sender, receiver]


def _notified(machine: Machine) -> list[Thread]:
    """A streamed row with a flag in it, and a doorbell behind."""
    _core(machine, 0)
    machine.locate("count", "doorbell", WINDOW)
    sender = machine.run("sender", ("copy_out", ROW, UB, ROW_BYTES), ("notify", ROW))
    return [sender, machine.run("receiver", ("scalar_load", "count"), ("barrier",), ("plain_load", "row"))]


def _counted(machine: Machine) -> list[Thread]:
    """Who sleeps looks at the count first: a flag that it counts is seen then."""
    _core(machine)
    machine.locate("count", "doorbell", WINDOW)
    sender = machine.run("sender", ("copy_out", ENTRY, UB_ENTRY, 32), ("notify", ENTRY))
    finds = {"count": [1], "flag": [0]}
    receiver = machine.run("receiver", ("poll_once", WINDOW), ("copy_in", UB, ENTRY, 32), finds=finds)
    return [sender, receiver]


def _scalar(machine: Machine) -> list[Thread]:
    """A word that a kernel stores by itself, behind a streamed row."""
    _core(machine, 0)
    sender = machine.run("sender", ("copy_out", ROW, UB, ROW_BYTES), ("scalar_store", "word"))
    finds = {"word": [1]}
    return [
        sender,
        machine.run("receiver", ("scalar_load", "word"), ("barrier",), ("plain_load", "row"), finds=finds),
    ]


def _barrier(machine: Machine) -> list[Thread]:
    """Two words that a kernel stores, with a barrier of its pipes between."""
    _core(machine)
    sender = machine.run("sender", ("scalar_store", "row"), ("barrier",), ("scalar_store", "word"))
    finds = {"word": [1]}
    return [
        sender,
        machine.run("receiver", ("scalar_load", "word"), ("barrier",), ("scalar_load", "row"), finds=finds),
    ]


def _python(machine: Machine) -> list[Thread]:
    """A word behind others, as moe_triton.balance leaves and reads them."""
    sender = machine.run("sender", ("plain_store", "row", 1), ("moe_fence",), ("plain_store", "flag", 1))
    receiver = machine.run(
        "receiver", ("plain_load", "flag"), ("moe_fence",), ("plain_load", "row"), finds={"flag": [1]}
    )
    return [sender, receiver]


def _python_takes(machine: Machine) -> list[Thread]:
    """Bytes of a ring are read before their place is given back, and others are written into it."""
    taker = machine.run("taker", ("plain_load", "row"), ("moe_fence",), ("plain_store", "flag", 1))
    putter = machine.run(
        "putter", ("plain_load", "flag"), ("moe_fence",), ("plain_store", "row", 1), finds={"flag": [1]}
    )
    return [taker, putter]


def _masked(machine: Machine) -> list[Thread]:
    """Results are read, and then whether their rank had masked this one before it wrote others."""
    reader = machine.run("reader", ("plain_load", "row"), ("is_masked", "byte"))
    masker = machine.run("masker", ("byte_store", "byte", 1), ("moe_fence",), ("plain_store", "row", 1))
    return [reader, masker]


BELL = OWN + 0x30000
BELL_PLACES = {
    "count": _word(BELL),
    "wake_at": _word(BELL + 8),
    "wakes": Place(BELL + 16, 4),
}


def _missed_ring(machine: Machine) -> list[Thread]:
    ringer = machine.run("ringer", ("ring", "count"), finds={"wake_at": [0]})
    sleeper = machine.run(
        "sleeper", ("sleep_until", "count", 1), finds={"wakes": [0], "wake_at": [0, 0], "count": [0]}
    )
    return [ringer, sleeper]


def _missed_wake(seen: int) -> Callable[[Machine], list[Thread]]:
    def threads(machine: Machine) -> list[Thread]:
        ringer = machine.run("ringer", ("ring", "count"), finds={"count": [0], "wake_at": [1], "wakes": [0]})
        finds = {"wakes": [seen], "wake_at": [0, 0], "count": [0]}
        sleeper = machine.run("sleeper", ("sleep_until", "count", 1), finds=finds)
        return [ringer, sleeper]

    return threads


def _rings(machine: Machine) -> None:
    machine.call("set_up")
    for name in ("tail", "head"):
        machine.locate(name, name)
    machine.locate("entry", "entry", is_data=True, is_polled=False)
    machine.locate("rings", "rings", size=4)
    machine.locate("depth", "depth", size=4)


def _posted(machine: Machine) -> list[Thread]:
    _rings(machine)
    core = machine.run("core", ("push", 7), finds={"tail": [0], "head": [0]})
    nic = machine.run("nic", ("posted",), ("at",), finds={"tail": [1]})
    return [core, nic]


def _posted_bytes(machine: Machine) -> list[Thread]:
    """What is posted was written before, as any row in a rank's own memory."""
    _rings(machine)
    calls = (("plain_store", "row", 1), ("push", 7))
    core = machine.run("core", *calls, finds={"tail": [0], "head": [0]})
    return [core, machine.run("nic", ("posted",), ("plain_load", "row"), finds={"tail": [1]})]


def _full_ring(machine: Machine) -> list[Thread]:
    """An entry is read before another one takes its place."""
    _rings(machine)
    nic = machine.run("nic", ("at",), ("pop",), finds={"head": [0]})
    core = machine.run("core", ("push", 7), finds={"tail": [0], "head": [1]})
    return [nic, core]


def _delivered(machine: Machine) -> list[Thread]:
    """Posted bytes are read before their memory is used anew."""
    _rings(machine)
    nic = machine.run("nic", ("plain_load", "row"), ("pop",), finds={"head": [0]})
    core = machine.run("core", ("delivered",), ("plain_store", "row", 1), finds={"head": [1]})
    return [nic, core]


def _missed_post(machine: Machine) -> list[Thread]:
    _rings(machine)
    core = machine.run("core", ("ring_bell",), finds={"rings": [0], "depth": [0]})
    nic = machine.run("nic", ("sleep_since", 0), finds={"rings": [0]})
    return [core, nic[: _futex_at(nic)]]


def _missed_post_wake(machine: Machine) -> list[Thread]:
    _rings(machine)
    core = machine.run("core", ("ring_bell",), finds={"rings": [0], "depth": [3]})
    nic = machine.run("nic", ("sleep_since", 0), finds={"depth": [0], "rings": [0]})
    return [core, nic[: _futex_at(nic) + 3]]


def _futex_at(thread: Thread) -> int:
    return next(at for at, each in enumerate(thread) if getattr(each, "place", "") == WAITERS)


def _rung_before_posted(machine: Machine) -> list[Thread]:
    _rings(machine)
    finds = {"tail": [0], "head": [0], "rings": [0], "depth": [0]}
    core = machine.run("core", ("push", 7), ("ring_bell",), finds=finds)
    nic = machine.run("nic", ("count_rings",), ("posted",), finds={"rings": [1], "tail": [0]})
    return [core, nic]


def _launch(machine: Machine) -> None:
    machine.call("set_up")
    for name in ("arrived", "running"):
        machine.locate(name, name, size=4)
    machine.locate("ended", "ended", size=4)
    machine.locate("failed", "failed", size=1)
    machine.locate("blocks", "blocks", size=4, is_data=True)
    machine.locate("stopping", "stopping", size=1, is_data=True)
    for name in ("round_of_meeting", "round_of_pool", "tail", "num_events"):
        machine.locate(name, name)
    for name in ("why", "body", "event"):
        machine.locate(name, name, is_data=True, is_polled=False)


MEETING, POOL = "round_of_meeting", "round_of_pool"
TWO_DATA = {"one": _data(ROW), "two": _data(ROW + 64)}


def _met(machine: Machine) -> list[Thread]:
    _launch(machine)
    first = machine.run(
        "first",
        ("plain_store", "one", 1),
        ("meet",),
        ("plain_load", "two"),
        finds={MEETING: [0, 1], "arrived": [0]},
    )
    last = machine.run(
        "last",
        ("plain_store", "two", 1),
        ("meet",),
        ("plain_load", "one"),
        finds={MEETING: [0], "arrived": [1]},
    )
    return [first, last]


def _met_twice(machine: Machine) -> list[Thread]:
    """Who waits in the first meeting begins the next one at once."""
    _launch(machine)
    finds = {MEETING: [0, 1, 1], "arrived": [0, 2]}
    first = machine.run("first", ("meet",), ("meet",), finds=finds, until=("arrived", 2))
    last = machine.run("last", ("meet",), finds={MEETING: [0], "arrived": [1]})
    return [first, last]


def _round_before_arrival(machine: Machine) -> list[Thread]:
    """Who arrives knows the round: found later, it could be the next one's, for which nobody else comes."""
    _launch(machine)
    first = machine.run("first", ("meet",), finds={MEETING: [1], "arrived": [0]}, until=("arrived", 1))
    return [first, machine.run("last", ("meet",), finds={MEETING: [0], "arrived": [1]})]


def _ended(machine: Machine) -> list[Thread]:
    """A block that has met, and ended, is not one that ended without meeting."""
    _launch(machine)
    finds = {MEETING: [0, 0, 0], "arrived": [0], "ended": [1]}
    first = machine.run("first", ("meet",), finds=finds, until=(MEETING, 3))
    last = machine.run("last", ("meet",), ("end",), finds={MEETING: [0], "arrived": [1], "ended": [0]})
    return [first, last]


def _failed(machine: Machine) -> list[Thread]:
    _launch(machine)
    machine.fill(OWN + 8, 1)
    fails = machine.run("fails", ("fail", OWN))
    return [fails, machine.run("looks", ("has_failed",), finds={"failed": [1]})]


def _begun(machine: Machine) -> list[Thread]:
    """A round of the pool has its body, and what the launching thread wrote before."""
    _launch(machine)
    finds = {POOL: [0], "running": [0]}
    calls = (("plain_store", "one", 1), ("does", 1, ROW + 64), ("run", 0))
    launches = machine.run("launches", *calls, finds=finds, until=("running", 2))
    serves = machine.run("serves", ("serve", 0), finds={POOL: [1, 1], "running": [1]}, until=("running", 1))
    at = next(at for at, each in enumerate(serves) if getattr(each, "place", "") == "body")
    looks = machine.run("looks", ("plain_load", "one"))
    return [launches, [*serves[: at + 1], *looks, *serves[at + 1 :]]]


def _done(work: int) -> Callable[[Machine], list[Thread]]:
    """A round has ended: what its blocks did is there."""

    def threads(machine: Machine) -> list[Thread]:
        _launch(machine)
        machine.call("does", work, ROW + 64)
        finds = {POOL: [0], "running": [0]}
        launches = machine.run("launches", ("run", 0), finds=finds)
        looks = machine.run("looks", ("plain_load", "event" if work == 3 else "two"))
        serves = machine.run(
            "serves", ("serve", 0), finds={POOL: [1, 1], "running": [1]}, until=("running", 1)
        )
        return [[*launches, *looks], serves]

    return threads


def _next_round(machine: Machine) -> list[Thread]:
    """A thread of the pool has read what its round does before the next one's takes its place."""
    _launch(machine)
    machine.call("does", 0, ROW)
    finds = {POOL: [0, 1], "running": [0]}
    launches = machine.run("launches", ("run", 0), ("run", 1), finds=finds, until=(POOL, 2))
    serves = machine.run("serves", ("serve", 0), finds={POOL: [1, 1], "running": [1]}, until=("running", 1))
    return _numbered([launches, serves], "body")


def _numbered(threads: Sequence[Thread], place: str) -> list[Thread]:
    """With numbers from 1 on for the addresses that are written to a place, in their order."""
    values: dict[int, int] = {0: 0}
    made: list[list[Instruction]] = []
    for thread in threads:
        made.append([])
        for each in thread:
            if isinstance(each, Store) and each.place == place:
                assert isinstance(each.value, int)
                each = replace(each, value=values.setdefault(each.value, len(values)))
            made[-1].append(each)
    return list(made)


def _stopped(machine: Machine) -> list[Thread]:
    """A thread of the pool that finds another round finds that it is to end."""
    _launch(machine)
    ends = machine.run("ends", ("stop",), finds={POOL: [0]}, until=(POOL, 1))
    serves = machine.run("serves", ("serve", 0), finds={POOL: [1, 1]}, until=("stopping", 1))
    return [ends, serves]


def _queue_of_launches(machine: Machine) -> list[Thread]:
    """A core posts behind one that posted to the same queue in the launch before."""
    _launch(machine)
    machine.call("does", 2, 0)
    launches = machine.run(
        "launches", ("run", 0), ("run", 0), finds={POOL: [0, 1], "running": [0]}, until=(POOL, 2)
    )
    one = {POOL: [1, 1], "running": [1], "tail": [0]}
    serves = machine.run("serves", ("serve", 0), finds=one, until=("running", 1))
    two = {POOL: [2, 2], "tail": [0]}
    other = machine.run("other", ("serve", 1), finds=two, until=("tail", 1))
    return [serves, launches, other]


def _two_events(machine: Machine) -> list[Thread]:
    """Blocks that trace at once have entries of their own."""
    _launch(machine)
    first = machine.run("first", ("add_event",), finds={"num_events": [0]})
    return [first, machine.run("other", ("add_event",), finds={"num_events": [0]})]


MESSAGE = 0x4000  # in a window
MESSAGE_BYTES = 8192


def _posts(machine: Machine) -> None:
    machine.call("set_up", WINDOW, BELL)
    machine.fill(OWN, MESSAGE_BYTES)


def _message(machine: Machine) -> list[Thread]:
    """A long message: its flag is at its end."""
    _posts(machine)
    nic = machine.run("nic", ("put", MESSAGE, OWN, MESSAGE_BYTES))
    end = WINDOW + MESSAGE + MESSAGE_BYTES - 32
    peer = machine.run("peer", ("copy_in_order", UB_OF, end), ("plain_load", "row"), finds={"end": [ONES]})
    return [nic, peer]


def _two_messages(machine: Machine) -> list[Thread]:
    _posts(machine)
    nic = machine.run("nic", ("put", MESSAGE, OWN, MESSAGE_BYTES), ("put", 0x100, OWN, 32))
    peer = machine.run(
        "peer", ("copy_in_order", UB_OF, ENTRY), ("plain_load", "last"), finds={"flag": [ONES]}
    )
    return [nic, peer]


def _message_and_bell(machine: Machine) -> list[Thread]:
    _posts(machine)
    nic = machine.run("nic", ("put", 0x100, OWN, 32), ("flag",), finds={"wake_at": [0]})
    peer = machine.run(
        "peer", ("plain_load", "count"), ("copy_in_order", UB_OF, ENTRY), finds={"count": [1], "flag": [0]}
    )
    return [nic, peer]


def _two_turns(machine: Machine) -> list[Thread]:
    _posts(machine)
    machine.locate("idle_at", "idle_at")
    first = machine.run("first", ("take",), finds={"idle_at": [0]})
    return [first, machine.run("other", ("take",), finds={"idle_at": [0]})]


def _log(machine: Machine) -> None:
    _posts(machine)
    machine.locate("number", "num_spans")
    machine.locate("old", "span", 0, is_data=True)
    machine.locate("new", "span", 1, is_data=True)


def _logged(machine: Machine) -> list[Thread]:
    """A span whose number Python has read is there."""
    _log(machine)
    nic = machine.run("nic", ("add_span", 7))
    python = machine.run(
        "python", ("plain_load", "number"), ("moe_fence",), ("plain_load", "old"), finds={"number": [1]}
    )
    return [nic, python]


def _written_over(machine: Machine) -> list[Thread]:
    """Python copies a span that is written over meanwhile, and finds a number that says so."""
    _log(machine)
    nic = machine.run("nic", ("add_span", 7), ("add_span", 8))
    calls = (("plain_load", "new"), ("moe_fence",), ("plain_load", "number"))
    return [nic, machine.run("python", *calls, finds={"number": [0]})]


PATTERNS = [
    Pattern(
        "rows, then their entry",
        "core",
        _rows_and_entries(MOST),
        [{"receiver.row.0": 0}],
        ENTRY_PLACES,
    ),
    Pattern(
        "streamed rows, then their entry",
        "core",
        _rows_and_entries(0),
        [{"receiver.row.0": 0}],
        ENTRY_PLACES,
    ),
    Pattern(
        "a streamed row behind another",
        "core",
        _row_behind_row,
        [{"receiver.row.0": 0}],
        {"row": _data(ROW + 512), "head": Place(ROW + ROW_BYTES, is_polled=False)},
    ),
    Pattern(
        "words of a stamp",
        "core",
        _one_block,
        [{f"receiver.{word}.0": 0} for word in ("first", "second")],
        {
            "first": Place(ENTRY, is_data=True),
            "second": Place(ENTRY + 8, is_data=True),
            "flag": _word(ENTRY + 16),
        },
    ),
    Pattern(
        "words of a header",
        "core",
        _one_block,
        [{f"receiver.{word}.0": 0} for word in ("first", "second", "third")],
        {
            "first": Place(ENTRY, is_data=True),
            "second": Place(ENTRY + 8, is_data=True),
            "third": Place(ENTRY + 16, is_data=True),
            "flag": _word(ENTRY + 24),
        },
    ),
    Pattern(
        "words of an entry",
        "core",
        _one_block,
        [{"receiver.call.0": 0}],
        {"flag": _word(ENTRY), "call": Place(ENTRY + 8, is_data=True)},
    ),
    Pattern(
        "flags in band",
        "core",
        _in_band,
        [{"receiver.row.0": 0}],
        {"row": _data(ROW + 64), "flag": _word(ROW + 480)},
    ),
    Pattern(
        "held back copies",
        "core",
        _held_back,
        [{"receiver.first.0": 0}],
        {"first": Place(ENTRY + 24, is_data=True), "flag": _word(NEXT)},
    ),
    Pattern(
        "cleared entries", "core", _cleared, [{"entry": 0}], {"entry": _word(ENTRY), "flag": _word(NEXT)}
    ),
    Pattern(
        "bells of calls in rounds",
        "core",
        _rung,
        [{"receiver.bell.0": 0}],
        {"bell": Place(OWN + 0x4000, is_data=True), "flag": _word(ENTRY)},
    ),
    Pattern(
        "a bell behind a streamed row",
        "core",
        _notified,
        [{"receiver.row.0": 0, "receiver.count.0": 1}],
        {"row": _data(ROW + 512)},
    ),
    Pattern("a count before its flag", "core", _counted, [{}], {"flag": _word(ENTRY + 24)}),
    Pattern(
        "a scalar behind a streamed row",
        "core",
        _scalar,
        [{"receiver.row.0": 0}],
        {"row": _data(ROW + 512), "word": _word(OWN + 0x4000)},
    ),
    Pattern(
        "scalars and a barrier",
        "core",
        _barrier,
        [{"receiver.row.0": 0}],
        {"row": Place(ROW, is_data=True), "word": _word(OWN + 0x4000)},
    ),
    Pattern(
        "words of Python's",
        "core",
        _python,
        [{"receiver.row.0": 0}],
        {"row": Place(ROW, is_data=True), "flag": _word(ENTRY)},
    ),
    Pattern(
        "places that Python gives back",
        "core",
        _python_takes,
        [{"taker.row.0": 1}],
        {"row": Place(ROW, is_data=True), "flag": _word(ENTRY)},
    ),
    Pattern(
        "results of a rank that masks their reader",
        "core",
        _masked,
        [{"reader.row.0": 1, "reader.byte.0": 0}],
        {"row": Place(ROW, is_data=True), "byte": Place(ENTRY, 1)},
    ),
    Pattern("a ring that a sleeper misses", "doorbell", _missed_ring, [{}], BELL_PLACES),
    Pattern("a wake before the sleep", "doorbell", _missed_wake(0), [{}], BELL_PLACES),
    Pattern("a wake that seems to be an old one", "doorbell", _missed_wake(1), [{}], BELL_PLACES),
    Pattern("entries of a queue", "rings", _posted, [{"nic.entry.0": 0}], {}),
    Pattern("posted bytes", "rings", _posted_bytes, [{"nic.row.0": 0}], {"row": _data(ROW)}),
    Pattern("places in a queue", "rings", _full_ring, [{"nic.entry.0": 7}], {}),
    Pattern("memory that was posted", "rings", _delivered, [{"nic.row.0": 1}], {"row": _data(ROW)}),
    Pattern("a post that the NIC misses", "rings", _missed_post, [{}], {}),
    Pattern("a post before the NIC sleeps", "rings", _missed_post_wake, [{}], {}),
    Pattern("a ring before its post", "rings", _rung_before_posted, [{}], {}),
    Pattern("SyncAll", "launch", _met, [{"first.two.0": 0}, {"last.one.0": 0}], TWO_DATA),
    Pattern("a SyncAll behind another", "launch", _met_twice, [{}], {}),
    Pattern("the round of a SyncAll", "launch", _round_before_arrival, [{}], {}),
    Pattern("blocks that have ended", "launch", _ended, [{}], {}),
    Pattern("why a block failed", "launch", _failed, [{"looks.why.0": 0}], {}),
    Pattern(
        "a round of the pool",
        "launch",
        _begun,
        [{"serves.body.0": 0}, {"serves.blocks.0": 0}, {"looks.one.0": 0}],
        TWO_DATA,
    ),
    Pattern("the end of a round", "launch", _done(1), [{"looks.two.0": 0}], TWO_DATA),
    Pattern("a trace behind its launch", "launch", _done(3), [{"looks.event.0": 0}], TWO_DATA),
    Pattern("two blocks that trace", "launch", _two_events, [{}], {}),
    Pattern("the next round of the pool", "launch", _next_round, [{"serves.body.0": 2}], {}),
    Pattern("the end of the pool", "launch", _stopped, [{"serves.stopping.0": 0}], {}),
    Pattern("a queue from launch to launch", "launch", _queue_of_launches, [{}], {}),
    Pattern(
        "a long message",
        "posts",
        _message,
        [{"peer.row.0": 0}],
        {"row": _data(WINDOW + MESSAGE + 4096), "end": _word(WINDOW + MESSAGE + MESSAGE_BYTES - 32)},
    ),
    Pattern(
        "a message behind another",
        "posts",
        _two_messages,
        [{"peer.last.0": 0}],
        {"last": Place(WINDOW + MESSAGE + MESSAGE_BYTES - 8, is_data=True), "flag": _word(ENTRY)},
    ),
    Pattern(
        "a bell behind a message",
        "posts",
        _message_and_bell,
        [{}],
        {**BELL_PLACES, "flag": _word(ENTRY + 24)},
    ),
    Pattern("turns of a paced link", "posts", _two_turns, [{}], {}),
    Pattern("a span that was logged", "posts", _logged, [{"python.old.0": 0}], {}),
    Pattern("a span that is written over", "posts", _written_over, [{"python.new.0": 8}], {}),
]
BY_NAME = {pattern.name: pattern for pattern in PATTERNS}
