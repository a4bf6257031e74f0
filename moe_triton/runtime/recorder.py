"""The flight recorder of a buffer: what it records, says while it waits, and keeps of an error.

Native code writes runs (`moe_triton.core.flight_memory`); what takes longer is done here, on request or once
something has gone wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from moe_triton.backends.base import Recording
from moe_triton.backends.waits import Waiting
from moe_triton.core import shared_memory
from moe_triton.core.errors import (
    ArgumentError,
    BufferStateError,
    CommunicationTimeoutError,
    MoeTritonError,
    RankLostError,
)
from moe_triton.core.flight_file import OPERATORS, PREFIX, Flight, FlightError, read_file
from moe_triton.core.flight_memory import NO_NUMBER, FlightMemory, PeersAre
from moe_triton.core.logs import log_of
from moe_triton.core.open_folders import opened
from moe_triton.core.plan import Launch, Plan
from moe_triton.core.records import PROTOCOL_VERSION
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.runtime.diagnosis import awaited_ranks, group_of
from moe_triton.runtime.slow_rank import EVERY_S, NUM_ROUNDS, SlowRankLog
from moe_triton.schemes.fullmesh.ascendc import COMBINE_READY, COMBINE_WAIT
from moe_triton.schemes.rank_context import RankContext

VARIABLE, FOLDER_VARIABLE = "MOE_TRITON_FLIGHT", "MOE_TRITON_FLIGHT_FOLDER"
ON, OFF = ("", "1", "on"), ("0", "off")
MOST_FILES = 1024
"""Of what was written down of errors, in a folder; older ones go."""
ASK_S, LOOK_S = 0.3, 0.005
"""For a wait to say whom it is for: it looks up every 50 ms."""
_NAME = re.compile(rf"{re.escape(PREFIX)}\d+-[0-9a-f]{{24}}")
_MOST_NAME = 128
_WRITTEN = re.compile(r"flight-([0-9a-f]{8}|alone)-rank\d+\.json")
_log = log_of("deaths")


def is_wanted() -> bool:
    """Whether there is a recorder, by the variable.

    Raises:
        ArgumentError: it is set to something else.
    """
    value = os.environ.get(VARIABLE, "")
    if value.lower() not in ON + OFF:
        rule, remedy = (
            "it is 'on' or 'off'",
            f"Unset it, or set it to one of these; {FOLDER_VARIABLE} is for a folder.",
        )
        raise ArgumentError(VARIABLE, value, rule, remedy)
    return value.lower() in ON


def folder() -> Path:
    """Where what was recorded before an error is written to."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    return Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"moe_triton-flight-{os.geteuid()}"


def peers_of(launch: Launch) -> PeersAre:
    """What the peers of a launch's waits are, as its kernel numbers them."""
    if ":" in launch.step:  # an exchange between two tensor-parallel ranks
        return PeersAre.OTHERS
    return PeersAre.EXPERTS if launch.kernel in (COMBINE_WAIT, COMBINE_READY) else PeersAre.RANKS


class Looks:
    """Looks at all recorders of a process now and then, on a thread that ends when none is open."""

    def __init__(self) -> None:
        self._recorders: WeakSet[Recorder] = WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, recorder: Recorder) -> None:
        """Looks at one more."""
        with self._lock:
            self._recorders.add(recorder)
            if self._thread is None or not self._thread.is_alive():  # as in a child that was forked
                self._thread = threading.Thread(target=self._run, name="moe_triton looks", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no thread can be started: nobody says who is slow
                    self._thread = None

    def _run(self) -> None:
        while True:
            time.sleep(EVERY_S)
            if not self._look():
                return

    def _look(self) -> bool:
        """Whether any is open. Nothing here keeps one for longer."""
        with self._lock:
            recorders = [each for each in self._recorders if each.memory.is_open]
            if not recorders:
                self._thread = None
        for recorder in recorders:
            try:
                recorder.look()
            except Exception:
                _log.exception("whether a rank is slow cannot be said")
        return bool(recorders)


_looks = Looks()


def _renew() -> None:
    """In a child that was forked: threads of the parent do not exist here, and one may have held the lock."""
    global _looks
    _looks = Looks()


os.register_at_fork(after_in_child=_renew)


class Recorder:
    """Of one communicator.

    Args:
        context: of its rank.
        backend: its back end's name.
        rounds: the record of its runs.
        queues: by rank, how many posts are not delivered; nothing where there are no queues.
        relays: whether ranks pass on what others send.

    Attributes:
        group: which all ranks of the buffer have alike; "" until they have met.
        files: of all ranks; None of one on another host, or without.
    """

    def __init__(
        self,
        context: RankContext,
        backend: str,
        rounds: Any,
        queues: Callable[[], Mapping[int, int]],
        relays: bool,
    ) -> None:
        self._context, self._rounds, self._queues = context, rounds, queues
        self._relays = relays
        c, self.group = context.config, ""
        experts = [c.rank_of_expert(expert) for expert in range(c.num_experts)]
        experts += [c.rank_of_shared_expert(each, context.rank) for each in range(c.num_shared_experts)]
        about = {
            "version": version_of("moe_triton"),
            "protocol": PROTOCOL_VERSION,
            "host": socket.gethostname(),
            "scheme": c.scheme,
            "product": c.product,
            "backend": backend,
            "hidden": c.hidden,
            "num_topk": c.num_topk,
            "num_experts": c.num_experts,
            "num_max_tokens_per_rank": c.num_max_tokens_per_rank,
            "servers": [*c.topology.servers],
            "timeout_s": context.timeout_us / 1e6,
        }
        self.memory = FlightMemory(context.rank, c.num_ranks, about, experts)
        self.files: list[Path | None] = [None] * c.num_ranks
        self._kept: set[int] = set()
        self._slow: SlowRankLog | None = None
        self._to_keep: list[int] = []

    @property
    def name(self) -> str:
        """Of its file; a text of its own where it has none."""
        return self.memory.path.name if self.memory.path else self.memory.token

    @contextlib.contextmanager
    def going_on(self, operator: str, number: int) -> Iterator[None]:
        """What runs meanwhile is of one call, which counts once it has ended well.

        Args:
            operator: of the call.
            number: which of its operator it is.
        """
        memory, which = self.memory, OPERATORS.index(operator)
        before = memory.header.runs[which]
        memory.numbers[which] = number
        try:
            yield
        finally:
            memory.numbers[which] = NO_NUMBER
        if memory.header.runs[which] == before:
            memory.header.runs[which] += 1

    def meet(self, names: Sequence[object], hosts: Sequence[int]) -> None:
        """Takes in the names of all ranks' files.

        Args:
            names: by rank; what is none is not looked at.
            hosts: the number of each rank's.
        """
        rank = self._context.rank
        texts = [str(name)[:_MOST_NAME] for name in names]
        self.group = hashlib.sha256(" ".join(texts).encode(errors="replace")).hexdigest()[:8]
        known = [name if _NAME.fullmatch(name) else "" for name in texts]
        self.memory.say_about(group=self.group)
        log = log_of("waits", rank=rank, num_ranks=self._context.config.num_ranks, group=self.group)
        # A round has two operators.
        memory = self.memory
        self._slow = SlowRankLog(lambda: memory.read(2 * NUM_ROUNDS).runs, log, relays=self._relays)
        _looks.add(self)
        if self.memory.path is None:
            return
        at = self.memory.path.parent
        here = [bool(name) and hosts[other] == hosts[rank] for other, name in enumerate(known)]
        self.files = [at / name if is_here else None for name, is_here in zip(known, here, strict=True)]

    def recording(self, plan: Plan, variant: Variant | int | None) -> Recording | None:
        """How runs of a plan are recorded; None for not at all.

        Args:
            plan: that is compiled.
            variant: of its operator; anything else for a barrier.
        """
        flown = self.memory.flown(plan, [peers_of(each) for each in plan.launches], self._row_bytes(variant))
        if flown is None:
            return None
        return Recording(self.memory, flown, self._rounds, self._context.num_entries)

    def _row_bytes(self, variant: Variant | int | None) -> int:
        hidden = self._context.config.hidden
        if isinstance(variant, DispatchVariant):
            return hidden * variant.row_dtype.itemsize + 4 * variant.row_format.num_scales(hidden)
        if isinstance(variant, CombineVariant):
            return hidden + hidden // 8 * 4 if variant.block_quantize else hidden * variant.dtype.itemsize
        return 0

    def say(self, waiting: Waiting) -> None:
        """Writes down what a wait is for. On the thread that waits."""
        context, plan = self._context, waiting.plan
        ranks = awaited_ranks(context, waiting)
        if ranks is None:
            return
        number = sum(count for _, count in waiting.awaited.values())
        since_ns = time.monotonic_ns() - int(waiting.seconds * 1e9)
        said: dict[str, object] = {
            "step": waiting.launch.step,
            "since_ns": since_ns,
            "ranks": ranks,
            "group": group_of(context, waiting.launch).strip().removesuffix("-parallel"),
            "awaited": f"{number} flags" if number else "",
            "num_bytes": self._bytes_of(plan),
            "queues": self._queues(),
        }
        self.memory.say(said)

    def _bytes_of(self, plan: Plan) -> int:
        """What this rank's tokens are in the running call, for each of their experts."""
        run = self.memory.run_at(self.memory.header.num_runs)
        c = self._context.config
        tokens = max(0, int(run.tokens))
        return tokens * (c.num_topk + c.num_shared_experts) * c.hidden * torch.bfloat16.itemsize

    def flight(self) -> Flight:
        """What is recorded now. From any thread: a wait that goes on is asked whom it is for."""
        header = self.memory.header
        if self.now().running is not None:
            header.asked += 1
            end = time.monotonic() + ASK_S
            while header.answered != header.asked and time.monotonic() < end:
                time.sleep(LOOK_S)
        return self.now()

    def now(self) -> Flight:
        """The same, and nobody is asked."""
        try:
            return replace(self.memory.read(), read_ns=time.monotonic_ns())
        except FlightError as error:
            raise BufferStateError(
                f"the flight recorder was written over by another process: {error}"
            ) from error

    def give_up(self, why: str, error: BaseException | None = None) -> None:
        """The buffer is broken: what was recorded is written down."""
        try:
            self._note_error(why, error)
        except Exception:  # the caller's own error counts, whatever becomes of its record
            _log.exception("what was recorded before an error cannot be written down")

    def _note_error(self, why: str, error: BaseException | None) -> None:
        text = why if error is None else f"{why}: {error}"
        if isinstance(error, MoeTritonError):  # which says by itself of which call it is
            text = f"{type(error).__name__}: {error}"
        if isinstance(error, CommunicationTimeoutError):
            self.memory.header.timeouts += 1
        if isinstance(error, RankLostError):
            self.keep_of(error.missing_ranks)
        if self.memory.header.state == 0:
            self.memory.say_state("broken", text)
        self.keep()

    def keep(self) -> None:
        """Writes down what this rank has recorded, once."""
        rank = self._context.rank
        if rank not in self._kept:
            self._kept.add(rank)
            self._write(rank, self.now())

    def note_masked(self, rank: int, why: str) -> None:
        """A rank is masked from now on. What it has recorded is written down later: others wait for this."""
        self.memory.header.masked += 1
        self._to_keep.append(rank)

    def keep_of(self, ranks: Sequence[int]) -> None:
        """Writes down what ranks have recorded that have died."""
        for rank in ranks:
            path = self.files[rank] if 0 <= rank < len(self.files) else None
            if path is None or rank in self._kept:
                continue
            self._kept.add(rank)
            try:
                self._write(rank, read_file(path))
            except (OSError, FlightError) as error:
                _log.debug("what rank %d recorded cannot be read: %s", rank, error)

    def _write(self, rank: int, flight: Flight) -> None:
        name = f"flight-{self.group or 'alone'}-rank{rank}.json"
        try:
            with opened(folder(), makes=True) as at:
                if why := at.why_not_ours() or at.why_unsafe:
                    raise OSError(why)
                new = at.inside / f".{name}.{os.getpid()}"
                fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    with os.fdopen(fd, "w") as file:
                        json.dump(flight.as_json(), file)
                    new.replace(at.inside / name)
                except BaseException:
                    new.unlink(missing_ok=True)
                    raise
                _remove_old(at.inside)
                path = at.path / name
        except OSError as error:
            _log.warning("what was recorded of rank %d is not written down: %s", rank, error)
            return
        _log.info("what rank %d recorded is in %s: moe-triton flight %s", rank, path, path.parent)

    def look(self) -> None:
        """Writes down what is to be, and says which rank is slow. Now and then, on a thread of its own."""
        self.keep_of(self._to_keep)
        if self._slow is not None and self.memory.is_open:
            self._slow.looked(self.memory.header.num_runs)

    def close(self) -> None:
        """Removes the file, and those of ranks of this machine that have died."""
        self.keep_of(self._to_keep)
        self.memory.close()
        for path in self.files:
            if path is not None and path != self.memory.path:
                shared_memory.remove_unlocked(path.parent, path.name)


def _remove_old(at: Path) -> None:
    """Leaves the newest files. Other ranks do so at the same time."""
    ours = []
    for path in at.iterdir():
        if _WRITTEN.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):
                ours.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(ours, reverse=True)[MOST_FILES:]:
        path.unlink(missing_ok=True)
