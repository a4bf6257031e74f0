"""A rank's own flight recorder: the memory that it writes (`moe_triton.core.flight_file`)."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import json
import mmap
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from moe_triton.core import shared_memory
from moe_triton.core.endings import at_end
from moe_triton.core.errors import WindowError
from moe_triton.core.flight_file import (
    BOUNDS_US,
    MAGIC,
    NUM_OPERATORS,
    NUM_RUNS,
    NUM_STEPS,
    OPERATORS,
    PREFIX,
    STATES,
    VERSION,
    Flight,
    Header,
    PeerStruct,
    Places,
    RunStruct,
    read,
    write_text,
)
from moe_triton.core.logs import log_of
from moe_triton.core.plan import Plan

NO_NUMBER = (1 << 64) - 1
MOST_LEFT = 64
"""Of files that killed processes have left, beyond which the oldest go at once."""
MOST_ERROR = 1000
"""Characters of an error that are kept."""
STALE_S = 3600.0
"""So old is what a process has left that was killed, before others remove it."""
_MOST_US = (1 << 32) - 1
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)
_log = log_of("construction")


class PeersAre(IntEnum):
    """What the peers are that a step's kernel waits for, as it numbers them; others are of another group."""

    RANKS = 0
    EXPERTS = 1
    OTHERS = 2


class Flown(NamedTuple):
    """How runs of a plan are recorded.

    Attributes:
        number: of its text.
        operator: which of `OPERATORS`.
        ends_run: whether a run of the operator is over with it.
        counts: whether its tokens and rows are those of a run, and no other plan's of the same one.
        steps: names of its phases.
        kinds: of each, one of `PeersAre`.
        row_bytes: of a row as it travels; 0 where it brings none.
    """

    number: int
    operator: int
    ends_run: bool
    counts: bool
    steps: tuple[str, ...]
    kinds: tuple[int, ...]
    row_bytes: int


class FlightMemory:
    """Memory of the recorder of one buffer, in a file that others of the user read.

    Where the folder has no room, it is this process's own: calls go on, and what it holds ends with them.

    Args:
        rank: this one.
        num_ranks: of the group.
        about: of the buffer; it goes into the file as JSON.
        rank_of_experts: the rank of each expert as combine's waits number them.

    Attributes:
        path: of the file; None where there is none.
        header: in the memory.
        numbers: by operator, what its runs have now in place of the number of the record of runs; or
            `NO_NUMBER`.
        token: that no other recorder has.
    """

    def __init__(
        self, rank: int, num_ranks: int, about: Mapping[str, Any], ranks_of_experts: Sequence[int]
    ) -> None:
        self.places, self.num_ranks = Places.of(num_ranks), num_ranks
        self.ranks_of_experts = tuple(ranks_of_experts)
        self.path, self._map, self._fd = _made(self.places.total_bytes)
        self._memory: mmap.mmap | bytearray = self._map
        self._lock = threading.Lock()
        self._numbers: dict[tuple[object, ...], int] = {}
        self._plans = ""
        self._is_closed = False
        self.numbers = (ctypes.c_uint64 * len(OPERATORS))(*[NO_NUMBER] * len(OPERATORS))
        self.token = secrets.token_hex(12)
        self.header = Header.from_buffer(self._memory)
        self.header.header_bytes, self.header.version = ctypes.sizeof(Header), VERSION
        self.header.total_bytes = self.places.total_bytes
        self.header.pid, self.header.uid = os.getpid(), os.geteuid()
        self.header.rank, self.header.num_ranks = rank, num_ranks
        self.header.unix_minus_monotonic_ns = time.time_ns() - time.monotonic_ns()
        self.header.opened_ns = time.monotonic_ns()
        self.about = dict(about)
        self.say_about(**about)
        # The last of all: who finds it finds all else.
        self.header.magic = MAGIC
        self._end = at_end(self, partial(_give_back, self.path, self._fd))

    def say_about(self, **more: object) -> None:
        """Adds to what is said of the buffer."""
        self.about |= more
        self._write("about", json.dumps(self.about, default=str))

    def _write(self, name: str, text: str) -> None:
        with self._lock, memoryview(self._memory) as memory:
            write_text(memory, self.header, self.places, name, text)

    def say(self, said: Mapping[str, object]) -> None:
        """What the running run waits for, as somebody has asked."""
        said_ns = time.monotonic_ns()
        self._write("said", json.dumps({**said, "index": self.header.num_runs, "said_ns": said_ns}))
        self.header.said_ns = said_ns

    def say_refused(self, operator: str, number: int, error: str) -> None:
        """A call's arguments were refused. Of several the last one is kept."""
        said = {
            "operator": operator,
            "number": number,
            "error": error[:MOST_ERROR],
            "at_ns": time.monotonic_ns(),
        }
        self._write("refused", json.dumps(said))

    def answered(self) -> None:
        """All is answered that has been asked until now."""
        self.header.answered = self.header.asked

    def say_state(self, state: str, why: str = "") -> None:
        """Whether it is open, broken or closed. What it was broken by stays said."""
        if why and not self.header.why_bytes:
            self._write("why", why)
        self.header.state = STATES.index(state)

    def flown(self, plan: Plan, kinds: Sequence[int], row_bytes: int) -> Flown | None:
        """Registers a plan; None for work that is no operator's.

        Args:
            plan: whose runs will be recorded.
            kinds: of each launch, one of `PeersAre`.
            row_bytes: of a row as it travels.
        """
        if plan.operator not in OPERATORS:
            return None
        steps = tuple(launch.step for launch in plan.launches)
        key = plan.operator, plan.zone, plan.half, steps
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            text = {"operator": plan.operator, "zone": plan.zone, "phase": plan.half.strip(), "steps": steps}
            self._plans += json.dumps(text) + "\n"
            self._write("plans", self._plans)
        operator = OPERATORS.index(plan.operator)
        # A half has what the other one has not; of phases the last one has all.
        counts = plan.ends_run or not plan.phase
        return Flown(number, operator, plan.ends_run, counts, steps, tuple(kinds), row_bytes)

    def address_of(self, at: int) -> int:
        """Of a byte of the memory, for native code."""
        return ctypes.addressof(self.header) + at

    def run_at(self, number: int) -> RunStruct:
        """Where a run is recorded."""
        at = self.places.runs + number % NUM_RUNS * ctypes.sizeof(RunStruct)
        return RunStruct.from_buffer(self._memory, at)

    def begin_run(self, flown: Flown, count: int, tokens: int) -> RunStruct:
        """A run begins that Python makes, or starts."""
        number = self.header.num_runs + 1
        run = self.run_at(number)
        ctypes.memset(ctypes.addressof(run), 0, ctypes.sizeof(run))
        run.begin_ns, run.count, run.plan = time.monotonic_ns(), count, flown.number
        run.tokens, run.rows, run.awaited_rank = tokens, -1, -1
        run.number = self.header.num_runs = number
        return run

    def end_run(
        self, run: RunStruct, flown: Flown, result: int, steps_us: Sequence[float], rows: int = -1
    ) -> None:
        """It ends.

        Args:
            run: what `begin_run` has returned.
            flown: its plan.
            result: as of ``moe_run_plan``.
            steps_us: of each step.
            rows: received, or sent back; -1 where that is not known.
        """
        for number, us in enumerate(steps_us[:NUM_STEPS]):
            run.steps_us[number] = us
        run.result, run.rows = result, rows if result == 0 else -1
        if result == 0:
            self.header.runs[flown.operator] += flown.ends_run
        if result == 0 and flown.counts:
            self.header.tokens[flown.operator] += max(0, run.tokens)
            self.header.rows[flown.operator] += max(0, rows)
        run.end_ns = time.monotonic_ns()

    def note_waits(self, run: RunStruct, waited_us: Sequence[int]) -> None:
        """What a run has waited for ranks, if Python is told; native code notes its own.

        Args:
            run: what `begin_run` has returned.
            waited_us: of each rank of the group; 0 for not at all, or not known.
        """
        longest = max(range(len(waited_us)), key=waited_us.__getitem__)
        if waited_us[longest] > 0:
            run.awaited_rank, run.awaited_us = longest, min(waited_us[longest], _MOST_US)
        for rank, us in enumerate(waited_us[: self.num_ranks]):
            if us > 0:
                peer = self._peer_at(rank)
                peer.sum_us += us
                peer.classes[bisect.bisect_left(BOUNDS_US, us)] += 1

    def _peer_at(self, rank: int) -> PeerStruct:
        return PeerStruct.from_buffer(self._memory, self.places.peers + rank * ctypes.sizeof(PeerStruct))

    def read(self, num_operators: int = NUM_OPERATORS) -> Flight:
        """What it holds now.

        Args:
            num_operators: whose runs are wanted, of the newest.
        """
        return read(self._copy, str(self.path or "this process"), num_operators)

    def _copy(self) -> bytes:
        with self._lock:
            return bytes(self._memory)

    @property
    def is_open(self) -> bool:
        """Whether its buffer is not closed."""
        return not self._is_closed

    def leave_to_parent(self) -> None:
        """In a child that was forked: the file is the parent's, and so is its lock."""
        self._is_closed = True
        if self._end.still_active():
            self._end.cancel()
            if self._fd >= 0:
                os.close(self._fd)

    def close(self) -> None:
        """Removes the file, and gives its memory back: no run may begin. What it held can still be read."""
        self._is_closed = True
        if self.header.state == 0:
            self.say_state("closed")
        self._end()
        with self._lock:
            self._memory = bytearray(self._memory)
            self.header = Header.from_buffer(self._memory)
        # Who looks at the memory at this moment keeps it.
        with contextlib.suppress(BufferError):
            self._map.close()


def _give_back(path: Path | None, fd: int) -> None:
    """Removes the file, and lets go of its lock."""
    if path is not None:
        path.unlink(missing_ok=True)
        os.close(fd)


def _made(num_bytes: int) -> tuple[Path | None, mmap.mmap, int]:
    """Memory of zeros: its file, itself, and a descriptor of its own that holds the file's lock.

    A mapping holds what it was made of open, in a forked child, too, and with it a lock.
    """
    try:
        folder = shared_memory.folder()
        _remove_stale(folder, f"{PREFIX}{os.geteuid()}-")
        path = folder / f"{PREFIX}{os.geteuid()}-{secrets.token_hex(12)}"
        fd = shared_memory.create_locked(path)
    except (OSError, WindowError) as error:
        return _private(num_bytes, error)
    try:
        # All of it now: who touches a page that a full file system has no room for is killed.
        os.posix_fallocate(fd, 0, num_bytes)
        mapped = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return path, mmap.mmap(mapped, num_bytes), fd
        finally:
            os.close(mapped)
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(fd)
        return _private(num_bytes, error)


def _remove_stale(folder: Path, prefix: str) -> None:
    shared_memory.remove_unlocked(folder, prefix, STALE_S)
    left = [(path.stat().st_mtime_ns, path.name) for path in folder.glob(f"{prefix}*") if path.exists()]
    for _, name in sorted(left, reverse=True)[MOST_LEFT:]:
        shared_memory.remove_unlocked(folder, name)


def _private(num_bytes: int, error: Exception) -> tuple[None, mmap.mmap, int]:
    _log.warning(
        "the flight recorder is kept in this process alone, and ends with it: %s. Free memory in /dev/shm.",
        error,
    )
    return None, mmap.mmap(-1, num_bytes), -1
