"""A rank's flight recorder as it lies in memory: what native code and Python write, and what others read.

The memory is a file of the user's in the folder of windows, so that it outlives a process that is killed. It
has a header, the newest runs of plans in a ring, for each rank how long it was waited for, and texts, which
are JSON. Times are of CLOCK_MONOTONIC, the same for all processes of a machine.

What is read here may be cut, damaged or of another version: every length is checked before it is used.
"""

from __future__ import annotations

import collections.abc
import ctypes
import functools
import json
import math
import os
import reprlib
import stat
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from moe_triton.core.plan import BEHIND

PREFIX = "moe_triton-flight-"
MAGIC, VERSION = b"moe-flgt", 1
_PAGE = 4096  # the same everywhere: a file may be read on a machine of other pages
_MOST_BYTES = 64 << 20  # of a file
_MOST_RANKS = 1 << 16
_MOST = 1 << 64  # numbers are below it
NUM_RUNS = 256  # of plans: an operator in rounds has several
NUM_STEPS = 32
NUM_OPERATORS = 64
"""The newest of a buffer that are told of."""
BOUNDS_US = tuple(digit * 10**power for power in range(1, 8) for digit in (1, 3))[:-1]
"""Upper bounds of a histogram of waits, 10 us to 10 s; behind them there is one class more."""
NUM_CLASSES = len(BOUNDS_US) + 1
OPERATORS, TOTALS = ("dispatch", "combine", "barrier"), ("runs", "tokens", "rows")
TEXT_BYTES = {"about": 16 << 10, "plans": 64 << 10, "said": 16 << 10, "why": 8 << 10, "refused": 4 << 10}
_READS = 20  # of what changes meanwhile
_WRITTEN_MEANWHILE = 9  # runs, at most one and those that begin while 100 KB are read


class FlightError(ValueError):
    """A recorder cannot be read: it says why."""


class OtherFileError(FlightError):
    """A file is sound, and something else."""


class Header(ctypes.Structure):
    """The beginning. Native code knows `num_runs`, `asked` and `answered` by address (``moe::Flight``)."""

    _fields_ = (
        ("magic", ctypes.c_char * 8),
        ("version", ctypes.c_uint32),
        ("header_bytes", ctypes.c_uint32),
        ("total_bytes", ctypes.c_uint64),
        ("num_runs", ctypes.c_uint64),  # that have begun
        ("asked", ctypes.c_uint64),  # how often somebody has asked what the running wait is for
        ("answered", ctypes.c_uint64),  # the last of these that was
        ("pid", ctypes.c_int64),
        ("uid", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
        ("unix_minus_monotonic_ns", ctypes.c_int64),
        ("opened_ns", ctypes.c_uint64),
        ("said_ns", ctypes.c_uint64),
        ("state", ctypes.c_uint32),  # a number of `STATES`
        ("writing", ctypes.c_uint32),  # odd while a text is written
        *((f"{name}_bytes", ctypes.c_uint32) for name in TEXT_BYTES),
        *((name, ctypes.c_uint64 * len(OPERATORS)) for name in TOTALS),
        ("timeouts", ctypes.c_uint64),
        ("masked", ctypes.c_uint64),
    )


STATES = "open", "broken", "closed"


class RunStruct(ctypes.Structure):
    """``moe::FlightRun``: one run of a plan."""

    _fields_ = (
        ("number", ctypes.c_uint64),  # from 1 on; 0 while it is being written
        ("begin_ns", ctypes.c_uint64),
        ("end_ns", ctypes.c_uint64),  # 0: it runs
        ("count", ctypes.c_uint64),  # which run of its operator it belongs to, from 0 on
        ("result", ctypes.c_int64),  # as of moe_run_plan
        ("plan", ctypes.c_uint32),
        ("step", ctypes.c_uint32),  # the phase that runs, or ran last
        ("tokens", ctypes.c_int32),  # -1: not known
        ("rows", ctypes.c_int32),
        ("awaited_rank", ctypes.c_int32),  # whom it waited for longest; -1: nobody
        ("awaited_us", ctypes.c_uint32),
        ("steps_us", ctypes.c_float * NUM_STEPS),
    )


class PeerStruct(ctypes.Structure):
    """``moe::FlightPeer``: sums over all runs, of one rank of the group."""

    _fields_ = (
        ("classes", ctypes.c_uint64 * NUM_CLASSES),
        ("sum_us", ctypes.c_uint64),
        ("bytes_in", ctypes.c_uint64),
        ("bytes_out", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Places:
    """Where the parts of a recorder lie.

    Attributes:
        runs, peers, now: the ring, `PeerStruct` of each rank, and microseconds of the running run for each.
        texts: each one's first byte.
        total_bytes: of all.
    """

    runs: int
    peers: int
    now: int
    texts: Mapping[str, int]
    total_bytes: int

    @staticmethod
    def of(num_ranks: int) -> Places:
        """For so many ranks."""
        runs = (ctypes.sizeof(Header) + 63) // 64 * 64
        peers = runs + NUM_RUNS * ctypes.sizeof(RunStruct)
        now = peers + num_ranks * ctypes.sizeof(PeerStruct)
        at = now + (4 * num_ranks + 63) // 64 * 64
        texts = {}
        for name, num_bytes in TEXT_BYTES.items():
            texts[name] = at
            at += num_bytes
        return Places(runs, peers, now, texts, (at + _PAGE - 1) // _PAGE * _PAGE)


@dataclass(frozen=True)
class Run:
    """One run of a plan: a whole operator, or a phase of one.

    Attributes:
        index: among all runs of the buffer, from 1 on.
        operator: "dispatch", "combine" or "barrier".
        number: which of its operator it belongs to, from 0 on.
        zone: of the windows.
        phase: of an operator in rounds or halves; "" for a whole one.
        begin_ns, end_ns: of CLOCK_MONOTONIC; None as an end: it runs.
        tokens, rows: of this rank, and received or sent back; None where that is not known.
        step: that runs, or ran last.
        steps_us: microseconds of each that has ended, by name.
        awaited: whom it waited for longest, and for how many microseconds; None for nobody.
        ended: "well", "running", or why not: "timed out" and the like.
    """

    index: int
    operator: str
    number: int
    zone: int
    phase: str
    begin_ns: int
    end_ns: int | None
    tokens: int | None
    rows: int | None
    step: str
    steps_us: Mapping[str, float]
    awaited: tuple[int, int] | None
    ended: str

    @property
    def name(self) -> str:
        """As messages have it."""
        return f"{self.operator} number {self.number}"


@dataclass(frozen=True)
class Wait:
    """What a rank waits for, as it has said itself.

    Attributes:
        operator, number, zone, step: of the call.
        since_ns: when the wait began, of CLOCK_MONOTONIC.
        said_ns: when that was said.
        ranks: that have not come.
        group: "" for the expert-parallel one, whose numbers ranks are, or "tensor".
        awaited: what of, such as "12 of 64 tokens".
        num_bytes: that this rank sends or takes in the call at most; 0 where that is not known.
        queues: by rank, posts that are not delivered yet.
    """

    operator: str
    number: int
    zone: int
    step: str
    since_ns: int
    said_ns: int
    ranks: Sequence[int]
    group: str = ""
    awaited: str = ""
    num_bytes: int = 0
    queues: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """A call whose arguments were refused: nothing was sent, and peers wait for it.

    Attributes:
        operator: of the call.
        number: that it would have been.
        error: what was raised.
        at_ns: when, of CLOCK_MONOTONIC.
    """

    operator: str
    number: int
    error: str
    at_ns: int


@dataclass(frozen=True)
class PeerTotals:
    """Sums over all runs of the buffer, of one rank of the group.

    Attributes:
        classes: how many runs waited for its latest flag so long, by `BOUNDS_US`, and how many longer.
        sum_us: that they waited.
        bytes_in: of rows that dispatches have received from it.
        bytes_out: of results that combines have sent it.
    """

    classes: Sequence[int]
    sum_us: int
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(frozen=True)
class Flight:
    """What a recorder held when it was read.

    Attributes:
        source: file or buffer that it is from.
        group: which all ranks of a buffer have alike.
        host: its machine's name.
        about: of the buffer: scheme, sizes and the like.
        unix_minus_monotonic_ns: what makes its times those of ``time.time_ns()``.
        read_ns: when it was read, or written down.
        state: "open", "broken" or "closed"; `why` says why it is broken.
        runs: the newest, oldest first.
        wait: what the running one waits for, where it has said so.
        totals: by operator, of ``runs``, ``tokens`` and ``rows``.
        peers: of each rank.
        timeouts, masked: how often calls ran out of time, and ranks were masked here.
        refused: the last call that was refused for its arguments.
    """

    source: str
    version: str
    protocol: int
    group: str
    rank: int
    num_ranks: int
    pid: int
    host: str
    about: Mapping[str, Any]
    unix_minus_monotonic_ns: int
    opened_ns: int
    read_ns: int
    state: str
    why: str
    num_runs: int
    runs: Sequence[Run]
    wait: Wait | None
    totals: Mapping[str, Mapping[str, int]]
    peers: Sequence[PeerTotals]
    timeouts: int
    masked: int
    refused: Refused | None = None

    @property
    def running(self) -> Run | None:
        """The run that has not ended."""
        return self.runs[-1] if self.runs and self.runs[-1].end_ns is None else None

    def as_json(self) -> dict[str, Any]:
        """For a file, which `moe-triton flight` reads.

        Examples:
            >>> import json
            >>> text = json.dumps(buffer.flight().as_json())
        """
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "source"}
        values["runs"] = [{**vars(run)} for run in self.runs]
        values["wait"] = None if self.wait is None else {**vars(self.wait)}
        values["peers"] = [{**vars(each)} for each in self.peers]
        values["refused"] = None if self.refused is None else {**vars(self.refused)}
        return {"moe_triton_flight": VERSION, **values}


def write_text(memory: memoryview, header: Header, places: Places, name: str, text: str) -> None:
    """Replaces a text; a reader sees the old one, the new one, or that it is being written.

    Args:
        memory: of the recorder.
        header: in it.
        places: of its parts.
        name: which one.
        text: cut where it has no room.
    """
    data = text.encode(errors="backslashreplace")[: TEXT_BYTES[name]]
    header.writing |= 1  # it may be odd already, where a signal has ended another writing
    at = places.texts[name]
    memory[at : at + len(data)] = data
    setattr(header, f"{name}_bytes", len(data))
    header.writing = (header.writing | 1) + 1


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a file of this user's, or of root's.

    Raises:
        FlightError: it is another user's, or none.
        OSError: it cannot be opened.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    state = os.fstat(fd)
    why_not = "" if stat.S_ISREG(state.st_mode) else "it is no file"
    if state.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        why_not = f"it belongs to user {state.st_uid}, not to you"
    if why_not:
        os.close(fd)
        raise FlightError(why_not)
    return fd


def read_file(path: Path) -> Flight:
    """Reads a recorder's file, or what was written down of one.

    Raises:
        FlightError: another user's, cut, damaged or of another version; it says which.
        OSError: it cannot be opened.
    """
    with os.fdopen(open_own(path), "rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise FlightError(f"it has more than {_MOST_BYTES >> 20} MB")
    if data[: len(MAGIC)] == MAGIC:
        return read(lambda: data, str(path))
    return of_json(data, str(path))


def read(copy: Callable[[], bytes], source: str, num_operators: int = NUM_OPERATORS) -> Flight:
    """Reads a recorder that may be written meanwhile.

    Args:
        copy: of its bytes.
        source: what to call it.
        num_operators: whose runs are wanted, of the newest.

    Raises:
        FlightError: cut, damaged or of another version.
    """
    for _ in range(_READS):
        data = copy()
        header = _header(data)
        # The texts are whole if nobody has begun one while they were copied.
        if not header.writing & 1 and _header(copy()).writing == header.writing:
            break
    places = Places.of(header.num_ranks)
    texts = {}
    for name, most in TEXT_BYTES.items():
        length = min(getattr(header, f"{name}_bytes"), most)
        texts[name] = data[places.texts[name] :][:length].decode(errors="replace")
    about = _object(texts["about"])
    plans = [_object(line) for line in texts["plans"].splitlines()]
    runs = _of_newest(_runs(data, header, places, plans), num_operators)
    peers_at, size = places.peers, ctypes.sizeof(PeerStruct)
    structs = [PeerStruct.from_buffer_copy(data, peers_at + rank * size) for rank in range(header.num_ranks)]
    state = STATES[header.state] if header.state < len(STATES) else "damaged"
    running = runs[-1] if runs and runs[-1].end_ns is None else None
    return Flight(
        source=source,
        version=str(about.get("version", "")),
        protocol=_integer(about.get("protocol")),
        group=str(about.get("group", "")),
        rank=header.rank,
        num_ranks=header.num_ranks,
        pid=header.pid,
        host=str(about.get("host", "")),
        about=about,
        unix_minus_monotonic_ns=header.unix_minus_monotonic_ns,
        opened_ns=header.opened_ns,
        read_ns=max([header.opened_ns, *(run.end_ns or run.begin_ns for run in runs)]),
        state=state,
        why=texts["why"],
        num_runs=header.num_runs,
        runs=runs,
        wait=_wait(_object(texts["said"]), running),
        totals={
            operator: {name: getattr(header, name)[i] for name in TOTALS}
            for i, operator in enumerate(OPERATORS)
        },
        peers=[
            PeerTotals(list(each.classes), each.sum_us, each.bytes_in, each.bytes_out) for each in structs
        ],
        timeouts=header.timeouts,
        masked=header.masked,
        refused=_refused(_object(texts["refused"])),
    )


def _header(data: bytes) -> Header:
    if len(data) < ctypes.sizeof(Header):
        raise FlightError(f"it is cut: {len(data)} bytes of a header of {ctypes.sizeof(Header)}")
    header = Header.from_buffer_copy(data)
    if header.magic != MAGIC:
        raise FlightError("it is no flight recorder")
    if header.version != VERSION:
        raise FlightError(f"it is of version {header.version}, and this is {VERSION}")
    if header.header_bytes != ctypes.sizeof(Header) or not 0 < header.num_ranks <= _MOST_RANKS:
        raise FlightError("it is damaged: its header has other sizes")
    if not 0 <= header.rank < header.num_ranks:
        raise FlightError(f"it is damaged: rank {header.rank} of {header.num_ranks}")
    total = Places.of(header.num_ranks).total_bytes
    if header.total_bytes != total:
        raise FlightError("it is damaged: its header has another size of it")
    if len(data) < total:
        raise FlightError(f"it is cut: {len(data)} of {total} bytes")
    return header


def _runs(data: bytes, header: Header, places: Places, plans: Sequence[Mapping[str, Any]]) -> list[Run]:
    runs = []
    # Those are left out that may have been written over while this was read.
    first = max(1, header.num_runs - NUM_RUNS + _WRITTEN_MEANWHILE)
    for index in range(first, header.num_runs + 1):
        at = places.runs + index % NUM_RUNS * ctypes.sizeof(RunStruct)
        each = RunStruct.from_buffer_copy(data, at)
        if each.number != index:  # being written, or written over
            continue
        plan = plans[each.plan] if each.plan < len(plans) else {}
        steps = plan.get("steps")
        names = [str(name) for name in steps] if isinstance(steps, list) else []
        steps_us: dict[str, float] = {}
        # One that has not ended well has not run all.
        last = len(names) if each.end_ns and each.result == 0 else each.step
        for name, us in zip(names[:last], each.steps_us, strict=False):
            if math.isfinite(us):
                steps_us[name] = steps_us.get(name, 0.0) + float(us)
        awaited = None
        if 0 <= each.awaited_rank < header.num_ranks and each.awaited_us:
            awaited = each.awaited_rank, each.awaited_us
        phase = str(plan.get("phase", ""))
        runs.append(
            Run(
                index=index,
                operator=str(plan.get("operator", "unknown")),
                # What comes behind the last round of a call is recorded when that has been counted.
                number=max(0, each.count - (phase in BEHIND)),
                zone=_integer(plan.get("zone")),
                phase=phase,
                begin_ns=each.begin_ns,
                end_ns=each.end_ns or None,
                tokens=each.tokens if each.tokens >= 0 else None,
                rows=each.rows if each.rows >= 0 else None,
                step=names[each.step] if each.step < len(names) else "",
                steps_us=steps_us,
                awaited=awaited,
                ended=_ending(each),
            )
        )
    return runs


def _of_newest(runs: Sequence[Run], num_operators: int) -> list[Run]:
    """The runs of the newest operators, none of which lacks its beginning but for want of room."""
    names = list(dict.fromkeys((run.operator, run.number) for run in reversed(runs)))
    kept = set(names[:num_operators])
    return [run for run in runs if (run.operator, run.number) in kept]


_MASKED = 1 << 32


def _ending(run: RunStruct) -> str:
    if not run.end_ns:
        return "running"
    if run.result == 0:
        return "well"
    if run.result >= _MASKED:
        return "well, without ranks that were masked meanwhile"
    return "stopped or reported" if run.result > 0 else "failed"


def _wait(said: Mapping[str, Any], running: Run | None) -> Wait | None:
    """What was said of the running run's wait."""
    if running is None or not said or _integer(said.get("index")) != running.index:
        return None
    ranks = said.get("ranks")
    queues = said.get("queues")
    return Wait(
        running.operator,
        running.number,
        running.zone,
        str(said.get("step", running.step)),
        _integer(said.get("since_ns")),
        _integer(said.get("said_ns")),
        [_integer(rank) for rank in ranks] if isinstance(ranks, list) else [],
        str(said.get("group", "")),
        str(said.get("awaited", "")),
        _integer(said.get("num_bytes")),
        {_integer(rank): _integer(n) for rank, n in queues.items()} if isinstance(queues, dict) else {},
    )


def _refused(said: Mapping[str, Any]) -> Refused | None:
    if not said:
        return None
    operator, error = str(said.get("operator", "")), str(said.get("error", ""))
    return Refused(operator, _integer(said.get("number")), error, _integer(said.get("at_ns")))


def _object(text: str) -> Mapping[str, Any]:
    """What a text holds that may be damaged."""
    try:
        made = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return made if isinstance(made, dict) else {}


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return 0
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return 0
    return number if abs(number) < _MOST else 0


def of_json(data: bytes, source: str) -> Flight:
    """Reads what `Flight.as_json` has made.

    Raises:
        FlightError: it is something else, damaged or of another version.
    """
    try:
        made = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FlightError(f"it is neither a recorder nor JSON: {error}") from error
    if not isinstance(made, dict) or "moe_triton_flight" not in made:
        raise OtherFileError("it is no flight recorder")
    version = made["moe_triton_flight"]
    if version != VERSION:
        raise FlightError(f"it is of version {reprlib.repr(version)}, and this is {VERSION}")
    try:
        flight: Flight = _typed(Flight, {**made, "source": source})
    except (KeyError, TypeError, ValueError) as error:
        raise FlightError(f"it is damaged: {error!r}") from error
    if not 0 <= flight.rank < flight.num_ranks <= _MOST_RANKS:
        raise FlightError(f"it is damaged: rank {flight.rank} of {flight.num_ranks}")
    return flight


_hints = functools.cache(typing.get_type_hints)


def _typed(kind: Any, value: Any) -> Any:
    """A value of JSON as one of a type of the classes here.

    Raises:
        KeyError: a field is missing.
        TypeError: it is of another type.
        ValueError: a number is out of range, or a key is none.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is types.UnionType:  # of one type and None
        return None if value is None else _typed(inner[0], value)
    if isinstance(kind, type) and is_dataclass(kind):
        named, hints = _instance(dict, value), _hints(kind)
        needed = [each.name for each in fields(kind) if each.default is each.default_factory is MISSING]
        return kind(**{name: _typed(hints[name], named[name]) for name in hints if name in {*needed, *named}})
    if origin is collections.abc.Mapping:
        keys, values = inner
        pairs = _instance(dict, value).items()  # whose keys are texts in JSON
        return {_typed(keys, int(key) if keys is int else key): _typed(values, each) for key, each in pairs}
    if origin is tuple:
        return tuple(_typed(each, part) for each, part in zip(inner, _instance(list, value), strict=True))
    if origin is collections.abc.Sequence:
        return [_typed(inner[0], each) for each in _instance(list, value)]
    if kind in (int, float) and type(value) in (int, float) and not -_MOST < value < _MOST:
        raise ValueError(f"a number is {reprlib.repr(value)}")
    return float(value) if kind is float and type(value) is int else _instance(kind, value)


def _instance(kind: type, value: Any) -> Any:
    """The value, which must be of this very type."""
    if type(value) is not kind:
        raise TypeError(f"{reprlib.repr(value)} is no {kind.__name__}")
    return value
