"""Traces: what ran when on each rank, in one file for Perfetto.

A rank collects in memory (`Trace`), turns its events into the JSON that Chrome and Perfetto read when it
writes, a process per rank and a thread per core (`spans`), and adds them to the file that all ranks share
(`TraceFile`).

That is valid JSON at every moment, while ranks append to it and others read it:
``{"displayTimeUnit": "ns", "traceEvents": [...]}`` with an event on each line. A rank that adds its events
locks the file, writes the old and the new ones to another file, and renames that over the first.
"""

from __future__ import annotations

import fcntl
import json
import os
import reprlib
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from moe_triton.backends.base import Backend, TracedCall, TraceEvent
from moe_triton.core import ascendc
from moe_triton.core.config import Config
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError
from moe_triton.core.flight_memory import PeersAre
from moe_triton.core.plan import BEHIND, NEXT, Launch, Part, Placeholder
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.runtime import clocks
from moe_triton.runtime.clocks import HostClock
from moe_triton.runtime.recorder import peers_of
from moe_triton.schemes.rank_context import RankContext

TracePath = str | os.PathLike[str]

HEAD = b'{"displayTimeUnit":"ns","traceEvents":['
TAIL = b"\n]}\n"
MAX_PATH = 1024  # ranks tell each other
# Somebody may put a link there after the check.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

# Files that this process has added to: a buffer that replaces another one, after a rank was lost say, keeps
# its events.
_of_this_run: set[Path] = set()


class TraceFile:
    """The file that all ranks of a run add their events to, or those of one host.

    Args:
        path: of the file.
        host: number of the host whose ranks have a file of their own, ``trace.host1.json`` for
            ``trace.json``; None where there is one host.

    Attributes:
        path: of the file.
        given: the path that all ranks have been given.

    Raises:
        ArgumentError: it is no path, or a symbolic link.
    """

    def __init__(self, path: TracePath, host: int | None = None) -> None:
        try:
            name = os.fspath(path)
            if not isinstance(name, str) or not name or "\0" in name or len(name) > MAX_PATH:
                raise ValueError
            # Relative to where the process is now. Folders may be links; a file that is one is refused.
            given = Path(name)
            self.given = given.parent.resolve() / given.name if given.name else given.resolve()
            self.path = self.given
            if host is not None:
                self.path = given.with_name(f"{self.given.stem}.host{host}{self.given.suffix}")
            is_link = self.path.is_symlink()
        except Exception:  # of a caller's own class, `os.fspath` may raise anything
            rule = f"it must be the path of a file, of 1 to {MAX_PATH} characters"
            remedy = "Pass a str or an os.PathLike."
            raise ArgumentError("trace", reprlib.repr(path), rule, remedy, code=INVALID_ARGUMENT) from None
        if is_link:
            raise self._refused("it is a symbolic link", "Name the file that it points to.")

    def check_writable(self) -> None:
        """Checks that the file can be written, by making one beside it.

        Raises:
            ArgumentError: it cannot.
        """
        try:
            if self.path.exists() and not self.path.is_file():
                raise self._refused("it is no regular file", "Name a file.")
            if self.path.exists() and not os.access(self.path, os.W_OK):
                raise self._refused("there is a file that may not be written", "Remove it.")
            descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name[:32]}.", dir=self.path.parent)
            os.close(descriptor)
            Path(name).unlink()
        except OSError as error:
            rule = f"no file can be made in its folder: {error.strerror}"
            raise self._refused(rule, "Name a file in a folder that exists and can be written.") from None

    def _refused(self, rule: str, remedy: str) -> ArgumentError:
        return ArgumentError("trace", repr(str(self.path)), rule, remedy, code=INVALID_ARGUMENT)

    def start(self, *, is_first: bool) -> None:
        """Marks the file as this run's.

        Args:
            is_first: whether this is the rank that replaces what an earlier run left.

        Raises:
            ArgumentError: it cannot be written.
        """
        if is_first and self.path not in _of_this_run:
            try:
                self._replace(None, [])
            except OSError as error:
                raise self._refused(f"it cannot be written: {error.strerror}", "Name another.") from None
        _of_this_run.add(self.path)

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Adds events to those that are there.

        Raises:
            OSError: it cannot be written.
        """
        with self._locked() as old:
            self._replace(old, events)

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        while True:
            with os.fdopen(os.open(self.path, _FLAGS, 0o600), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if self._is_current(file):
                    yield file
                    return
                # Another rank has replaced the file while this one waited for the lock.

    def _is_current(self, file: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.lstat())
        except FileNotFoundError:
            return False

    def _replace(self, old: BinaryIO | None, events: Iterable[Mapping[str, Any]]) -> None:
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name[:32]}.", dir=self.path.parent)
        try:
            with os.fdopen(descriptor, "wb") as new:
                if old is None or not _copy_events(old, new):
                    new.write(HEAD)
                separator = b"" if new.tell() == len(HEAD) else b","
                for event in events:
                    new.write(separator + b"\n" + json.dumps(event, separators=(",", ":")).encode())
                    separator = b","
                new.write(TAIL)
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _copy_events(old: BinaryIO, new: BinaryIO) -> bool:
    """Copies a trace file up to its tail; False if it is not one."""
    end = os.fstat(old.fileno()).st_size - len(TAIL)
    if end < len(HEAD) or old.read(len(HEAD)) != HEAD:
        return False
    old.seek(end)
    if old.read() != TAIL:
        return False
    old.seek(0)
    shutil.copyfileobj(old, new, 1 << 20)
    new.truncate(end)
    new.seek(end)
    return True


CLOCK = "clock"
"""The name of metadata that has a `HostClock`'s fields."""
STEPS = {
    ascendc.TRACE_WRITE: "write",
    ascendc.TRACE_SYNC: "sync",
    ascendc.TRACE_FLAG: "flag",
    ascendc.TRACE_WRITE_AND_FLAG: "write + flag",
    ascendc.TRACE_POLL: "poll",
    ascendc.TRACE_POST: "post",
}
Json = dict[str, Any]


@dataclass(frozen=True)
class TracedRank:
    """The rank that events come from, and what their peer numbers mean.

    Attributes:
        config: the group's.
        rank: this rank in the group.
        num_blocks: blocks per kernel.
        ranks: each rank's number in torch.distributed's world.
        exchange_ranks: likewise of the two tensor-parallel ranks, if there are two.
    """

    config: Config
    rank: int
    num_blocks: int
    ranks: tuple[int, ...]
    exchange_ranks: tuple[int, ...] = ()

    @property
    def pid(self) -> int:
        """This rank's number in torch.distributed's world."""
        return self.ranks[self.rank]

    def rank_of_peer(self, launch: Launch, peer: int) -> int:
        """The rank, as numbered in the world, of a peer number in a kernel."""
        kind = peers_of(launch)
        if kind == PeersAre.OTHERS:
            return self.exchange_ranks[peer]
        if kind == PeersAre.RANKS:
            return self.ranks[peer]
        c = self.config
        if peer < c.num_experts:
            return self.ranks[c.rank_of_expert(peer)]
        return self.ranks[c.rank_of_shared_expert(peer - c.num_experts, self.rank)]


def metadata(
    traced: TracedRank, num_dropped: int, *, has_link: bool = False, clock: HostClock | None = None
) -> Iterator[Json]:
    """Names of the process and its threads, the number of dropped calls, and a host's clock among several."""
    yield _meta(traced.pid, 0, "process_name", name=f"rank {traced.pid}")
    yield _meta(traced.pid, 0, "process_sort_index", sort_index=traced.pid)
    if clock:
        yield _meta(traced.pid, 0, CLOCK, **asdict(clock))
    if num_dropped:
        labels = f"{num_dropped} oldest calls dropped"
        yield _meta(traced.pid, 0, "process_labels", labels=labels, dropped_calls=num_dropped)
    for block in range(traced.num_blocks):
        yield _meta(traced.pid, block, "thread_name", name=f"core {block}")
    if has_link:
        yield _meta(traced.pid, traced.num_blocks, "thread_name", name="link")


def spans(
    traced: TracedRank, calls: Sequence[TracedCall], events: Iterable[TraceEvent], counts: Mapping[str, int]
) -> list[Json]:
    """Spans of calls, of the blocks of their launches, of their steps, of waits for ranks, and of the link.

    Args:
        traced: the rank that they come from.
        calls: all calls up to now, except the oldest.
        events: of these calls.
        counts: runs of each operator so far.
    """
    named = dict(zip((call.number for call in calls), _names(calls, counts), strict=True))
    by_number = {call.number: call for call in calls}
    made = [
        _complete(traced, 0, call, named[call.number], "operator", _call_arguments(call)) for call in calls
    ]
    waits: list[tuple[TraceEvent, Launch]] = []
    for event in events:
        call, name = by_number[event.call], named[event.call]
        if event.kind == ascendc.TRACE_LINK:
            made.append(_carried(traced, event, name))
            continue
        launch = call.plan.launches[event.launch]
        if event.kind == ascendc.TRACE_WAIT:
            waits.append((event, launch))
        elif event.kind == ascendc.TRACE_BLOCK:
            arguments = {
                "of": name,
                "kernel": launch.kernel.name,
                **_bytes_moved(traced, launch, call.tokens),
            }
            made.append(_complete(traced, event.block, event, launch.step, launch.stream, arguments))
        else:
            made.append(_complete(traced, event.block, event, STEPS[event.kind], "step", {"of": name}))
    made += _waits(traced, named, waits)
    # A span comes before those nested in it.
    return sorted(made, key=lambda span: (span["ts"], -span["dur"]))


def _names(calls: Sequence[TracedCall], counts: Mapping[str, int]) -> list[str]:
    """Like "dispatch #3", or "dispatch #3 setup". Counted from the end, since old calls may be dropped."""
    left, names = dict(counts), []
    for call in reversed(calls):
        operator = call.plan.operator
        left[operator] -= call.plan.ends_run  # as the communicator counts
        number = left[operator] - (call.plan.phase in BEHIND)
        names.append(f"{operator} #{number}{call.plan.half}")
    return names[::-1]


def _waits(
    traced: TracedRank, named: Mapping[int, str], waits: Iterable[tuple[TraceEvent, Launch]]
) -> list[Json]:
    """One span for each rank that a block waited for. Combine waits by expert: the longest counts."""
    longest: dict[tuple[int, int, int, int], TraceEvent] = {}
    for event, launch in waits:
        key = (event.call, event.launch, event.block, traced.rank_of_peer(launch, event.peer))
        if key not in longest or longest[key].end_ns < event.end_ns:
            longest[key] = event
    return [
        _complete(traced, block, event, f"wait for rank {rank}", "wait", {"of": named[call], "rank": rank})
        for (call, _, block, rank), event in longest.items()
    ]


def _carried(traced: TracedRank, event: TraceEvent, of: str) -> Json:
    """A message on the link, which is behind the cores."""
    rank = traced.ranks[event.peer]
    return _complete(traced, traced.num_blocks, event, f"to rank {rank}", "link", {"of": of, "rank": rank})


def _call_arguments(call: TracedCall) -> Json:
    arguments: Json = {"zone": call.plan.zone}
    if call.tokens >= 0:
        arguments["tokens"] = call.tokens
    if call.rows >= 0:
        arguments["rows"] = call.rows
    if call.traffic:
        for what, number in call.traffic._asdict().items():
            arguments |= {f"{what} {where}": count for where, count in number._asdict().items()}
    if call.failed:
        arguments["failed"] = call.failed.step
    return arguments


def _bytes_moved(traced: TracedRank, launch: Launch, tokens: int) -> Json:
    """Bytes that all blocks of a launch move, if its kernel can tell."""
    count = getattr(launch.kernel, "bytes_moved", None)
    if count is None:
        return {}
    brought = {"num_tokens": tokens, "num_ids": tokens * traced.config.num_topk}
    known: dict[str, int] = {}
    for arg, value in zip(launch.kernel.args, launch.values, strict=True):
        if isinstance(value, int):
            known[arg.name] = value
        elif isinstance(value, Placeholder) and value.name.startswith(NEXT):
            return {}  # nobody has noted what the round behind this one brings
        elif isinstance(value, Placeholder) and value.name in brought:
            total = brought[value.name]
            known[arg.name] = value.of(total) if isinstance(value, Part) else total
    return {"launch_bytes": count(**known)}


def _complete(
    traced: TracedRank, block: int, span: TraceEvent | TracedCall, name: str, category: str, arguments: Json
) -> Json:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": span.begin_ns / 1e3,  # microseconds
        "dur": (span.end_ns - span.begin_ns) / 1e3,
        "pid": traced.pid,
        "tid": block,
        "args": arguments,
    }


def _meta(pid: int, tid: int, kind: str, **arguments: object) -> Json:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


MAX_EVENTS = 1 << 17  # that a rank keeps: 5 MB, and about 20 MB of JSON


class Trace:
    """What the calls of one rank did. Native code records it; Python does nothing in a call.

    Making it replaces the file, on the first rank of a group, or of each host.

    Args:
        file: where it is written.
        context: where plans run.
        backend: whose kernels are traced.
        counts: runs of each operator so far; kept up to date.
        meetings: the group, and the tensor-parallel group if there is one.

    Raises:
        ArgumentError: the file cannot be written, or the back end has no traces.
    """

    def __init__(
        self,
        file: TraceFile,
        context: RankContext,
        backend: Backend,
        counts: Mapping[str, int],
        meetings: Sequence[Meeting],
    ) -> None:
        ranks, *others = (meeting.world_ranks() for meeting in meetings)
        self._traced = TracedRank(context.config, context.rank, context.num_blocks, ranks, *others)
        self.file, self._counts, self._closed = file, counts, False
        self.log = backend.make_trace_log(MAX_EVENTS, context.num_entries - 1)
        self._clock: HostClock | None = None
        self._before = Counter[str]()
        hosts = meetings[0].hosts
        is_first = hosts.index(hosts[context.rank]) == context.rank
        file.start(is_first=is_first)  # last: a back end without traces leaves the file alone

    def compare_clocks(self, meeting: Meeting, barrier: Callable[[], None]) -> None:
        """Finds how far this host's clock is from the first one's; what has run until then is not traced.

        Args:
            meeting: the group, whose ranks' hosts are known.
            barrier: waits until every rank is here.

        Raises:
            MoeTritonError: what a barrier raises, or an exchange.
        """
        self._clock = clocks.compare(meeting, barrier)
        self.log.take()
        self._before = Counter(self._counts)

    def write(self) -> None:
        """Appends what has happened since the last write to the file.

        Raises:
            OSError: it cannot be written.
        """
        calls, events, num_dropped = self.log.take()
        has_link = any(event.kind == ascendc.TRACE_LINK for event in events)
        named = metadata(self._traced, num_dropped, has_link=has_link, clock=self._clock)
        counts = {operator: number - self._before[operator] for operator, number in self._counts.items()}
        self.file.add([*named, *spans(self._traced, calls, events, counts)])

    def close(self) -> None:
        """Writes for the last time. A failure is only a warning, so that closing goes on."""
        if self._closed:
            return
        self._closed = True
        try:
            self.write()
        except OSError as error:
            warnings.warn(f"no trace written to {self.file.path}: {error}", RuntimeWarning, stacklevel=2)
