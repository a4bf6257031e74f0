"""The recorders of this machine's ranks: which there are, whether their processes run, and asking them."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from moe_triton.core import shared_memory
from moe_triton.core.flight_file import (
    NUM_RUNS,
    PREFIX,
    Flight,
    FlightError,
    Header,
    Places,
    RunStruct,
    open_own,
    read,
)
from moe_triton.core.flight_group import Processes, ProcessState

PROC = Path("/proc")
ANSWER_S, _LOOK_S = 0.5, 0.01
_WORD = ctypes.sizeof(ctypes.c_uint64)
_STATE, _STARTED = 0, 19
"""Among the fields of /proc/PID/stat that stand behind the name, which may hold anything (proc(5))."""

_STATES: Mapping[bytes, ProcessState] = {b"T": "stopped", b"t": "stopped", b"Z": "gone", b"X": "gone"}


@dataclass(frozen=True)
class Unread:
    """A file that holds no recorder that can be read.

    Attributes:
        path: of it.
        why: it cannot.
    """

    path: Path
    why: str


@dataclass(frozen=True)
class Seen:
    """What was found.

    Attributes:
        flights: of recorders.
        processes: of these, whose state is known.
        unread: files of this user that cannot be read.
    """

    flights: Sequence[Flight]
    processes: Processes
    unread: Sequence[Unread]


def ask_all(folder: Path) -> Seen:
    """Asks ranks in a call what they wait for, and reads all recorders of this user.

    Who does not answer, as it is stopped or waits for nobody, is read as it is.

    Args:
        folder: where recorders are.
    """
    unread = list[Unread]()
    states: dict[tuple[str, int], ProcessState] = {}
    with ExitStack() as opened:
        recorders = []
        for path in sorted(folder.glob(f"{PREFIX}*")):
            if path.suffix == shared_memory.UNLOCKED or not _is_own(path):
                continue
            try:
                recorders.append(opened.enter_context(Recorder(path)))
            except FileNotFoundError:
                continue  # its buffer has just been closed
            except (FlightError, OSError) as error:
                unread.append(unread_of(path, error))
        for recorder in recorders:
            flight = recorder.flight
            state = recorder.state()
            if state is not None:
                states[flight.host, flight.pid] = state
            if state not in ("stopped", "gone"):
                recorder.ask()
        until = time.monotonic() + ANSWER_S
        while time.monotonic() < until and not all(recorder.has_answered() for recorder in recorders):
            time.sleep(_LOOK_S)
        flights = [recorder.read() for recorder in recorders]
    return Seen(flights, states, unread)


def unread_of(path: Path, error: FlightError | OSError) -> Unread:
    """A file with what is wrong with it."""
    return Unread(path, (error.strerror if isinstance(error, OSError) else None) or str(error))


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


class Recorder:
    """An open recorder, of a process that may go on writing.

    The file is read and not mapped: one that is cut meanwhile would end this process.

    Args:
        path: of its file.

    Attributes:
        flight: what it held last.

    Raises:
        FlightError: it cannot be read; it says why.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, open_own(path, os.O_RDWR)
        try:
            self.flight = self._read()
        except BaseException:
            os.close(self._fd)
            raise
        self._question, self._run = 0, self.flight.running

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _read(self) -> Flight:
        # A little later than it was, so that no time in it lies ahead.
        made = read(self._copy, str(self._path))
        return replace(made, read_ns=time.monotonic_ns())

    def _copy(self) -> bytes:
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0)

    def read(self) -> Flight:
        """What it holds now; what it held last if it cannot be read any more."""
        with suppress(FlightError, OSError):
            self.flight = self._read()
        return self.flight

    def state(self) -> ProcessState | None:
        """What its process does."""
        return _state_of(self.flight, self._fd)

    def ask(self) -> None:
        """Asks what the running call waits for, if there is one."""
        if self._run is not None:
            number = self._word("asked") + 1
            try:
                os.pwrite(self._fd, ctypes.c_uint64(number), Header.asked.offset)
            except OSError:
                return  # a full file system: it may have no page for that
            self._question = number

    def has_answered(self) -> bool:
        """Whether there is nothing to wait for: it has answered, was not asked, or its call is over."""
        if not self._question or self._run is None or self._word("answered") >= self._question:
            return True
        at = Places.of(self.flight.num_ranks).runs + self._run.index % NUM_RUNS * ctypes.sizeof(RunStruct)
        data = os.pread(self._fd, ctypes.sizeof(RunStruct), at)
        if len(data) < ctypes.sizeof(RunStruct):
            return True
        run = RunStruct.from_buffer_copy(data)
        return bool(run.number != self._run.index or run.end_ns)

    def _word(self, field: str) -> int:
        data = os.pread(self._fd, _WORD, getattr(Header, field).offset)
        return int.from_bytes(data, "little")


def state_of(path: Path, flight: Flight) -> ProcessState | None:
    """What the process of a recorder does; None where that is not known.

    Args:
        path: of the recorder, in this machine's memory.
        flight: that it holds.
    """
    try:
        fd = open_own(path)
    except (FlightError, OSError):
        return None
    try:
        return _state_of(flight, fd)
    finally:
        os.close(fd)


def _state_of(flight: Flight, fd: int) -> ProcessState | None:
    if flight.host != platform.node():
        return None
    # In another pid namespace its number may be nobody's, or somebody else's.
    gone: ProcessState | None = None if _is_locked(fd) else "gone"
    try:
        fields = (PROC / str(flight.pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return gone
    if _started_ns(int(fields[_STARTED])) > _since_boot_ns(flight.opened_ns):
        return gone
    return _STATES.get(fields[_STATE], "running")


def _is_locked(fd: int) -> bool:
    """Whether the process that made a file has it open, or one that this has forked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _started_ns(ticks: int) -> int:
    """When a process started, or a tick before, by ticks since the machine did; suspended time counts."""
    return ticks * (10**9 // os.sysconf("SC_CLK_TCK"))


def _since_boot_ns(monotonic_ns: int) -> int:
    """A time of the monotonic clock as one since boot, at most: the machine may have been suspended since."""
    ahead_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    return monotonic_ns + ahead_ns
