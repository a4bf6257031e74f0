"""A device that only tests have: queues of work that run when somebody waits, in any order that events allow.

It stands in for what torch_npu and CANN's run time do with streams, so that the back end's own code can be
watched. Work is real: kernels run as they do on the CPU. What it is strict about:

- torch_npu submits work to streams from a thread of its own. Here it stays in `Device.queue` until a stream's
  handle is asked for; launches that bypass the queue overtake the work in it.
- nothing runs before a wait, and then streams run in the order that the `policy` prefers. - memory of a
launch is not reused before the launch has run, even if it is freed; that of a graph as long as the
  graph lives. torch_npu's allocator goes by streams, with the same effect.
- captured work does not run; a graph that waits for an event from outside of it is refused.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

POLICIES = ("compute first", "communication first", "random")
AT_ONCE = "at once"  # nothing is put off: for what reads memory as an NPU's own operators would, in order


@dataclass(frozen=True)
class Work:
    """One piece of work of a stream.

    Attributes:
        kind: "launch", "record", "wait" or "copy".
        name: of a kernel; or of nothing.
        stream: where it goes.
        run: what it does.
        event: that it records or waits for.
        version: index of the record among those of that event.
        words: of a launch: blocks, then its arguments.
    """

    kind: str
    name: str
    stream: FakeStream
    run: Callable[[], None] = lambda: None
    event: FakeEvent | None = None
    version: int = 0
    words: tuple[int, ...] = ()


@dataclass
class Device:
    """All streams of a process.

    Attributes:
        policy: which stream runs first where several could.
        queue: what torch_npu has not handed over yet.
        log: all work in the order in which it reached its stream, and when the host waited.
    """

    policy: str = "random"
    seed: int = 0
    queue: list[Work] = field(default_factory=list)
    log: list[Work | str] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    graph: FakeGraph | None = None
    held: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.user_stream = FakeStream(self, "compute")

    def by_queue(self, work: Work) -> None:
        """Work of torch_npu."""
        self.queue.append(work)
        if self.policy == AT_ONCE:
            self.hand_over()

    def at_once(self, work: Work) -> None:
        """Work that goes past torch_npu."""
        self.log.append(work)
        if self.graph is not None:
            self.graph.work.append(work)
        else:
            self._put(work)

    def _put(self, work: Work) -> None:
        work.stream.pending.append(work)
        if self.policy == AT_ONCE:
            work.stream.step()

    def hold(self, memory: object) -> None:
        """Memory of launches that have not run yet."""
        (self.held if self.graph is None else self.graph.held).append(memory)

    def hand_over(self) -> None:
        """torch_npu's thread has nothing left to do."""
        waiting, self.queue = self.queue, []
        for work in waiting:
            self.at_once(work)

    def synchronize(self) -> None:
        """Runs everything."""
        if self.graph is not None:
            raise RuntimeError("the host waits for the device while a graph is captured")
        self.hand_over()
        self.log.append("synchronize")
        while any(stream.pending for stream in self.streams):
            ready = [stream for stream in self.streams if stream.is_ready]
            if not ready:
                heads = [(s.name, s.pending[0]) for s in self.streams if s.pending]
                raise RuntimeError(f"streams wait for each other for ever: {heads}")
            self._next(ready).step()
        self.held.clear()

    def _next(self, ready: list[FakeStream]) -> FakeStream:
        if self.policy == "random":
            return self._random.choice(ready)
        wanted = self.policy.removesuffix(" first")
        return min(ready, key=lambda stream: stream.name != wanted)

    def launches(self) -> list[Work]:
        """Kernels in the order in which they reached their streams."""
        return [work for work in self.log if isinstance(work, Work) and work.kind == "launch"]


class FakeStream:
    """``torch.npu.Stream``."""

    def __init__(self, device: Device, name: str = "communication") -> None:
        self.owner, self.name = device, name
        self.device = torch.device("cpu")
        self.pending: deque[Work] = deque()
        device.streams.append(self)

    @property
    def npu_stream(self) -> int:
        """The handle, once torch_npu has handed over what it has."""
        self.owner.hand_over()
        return 0x1000 + self.owner.streams.index(self)

    def wait_event(self, event: FakeEvent) -> None:
        self.owner.by_queue(Work("wait", "", self, event=event, version=event.recorded))

    @property
    def is_ready(self) -> bool:
        """Whether its next work could run."""
        if not self.pending:
            return False
        work = self.pending[0]
        return work.kind != "wait" or (work.event is not None and work.event.ended >= work.version)

    def step(self) -> None:
        """Runs its next work."""
        work = self.pending.popleft()
        if work.kind == "record":
            assert work.event is not None
            work.event.ended = work.version
        work.run()


class FakeEvent:
    """``torch.npu.Event``."""

    def __init__(self, device: Device, enable_timing: bool = False) -> None:
        self.owner, self.is_timed = device, enable_timing
        self.recorded = self.ended = 0

    def record(self, stream: FakeStream) -> None:
        self.recorded += 1
        self.owner.by_queue(Work("record", "", stream, event=self, version=self.recorded))

    def query(self) -> bool:
        if self.owner.graph is not None:
            raise RuntimeError("no event can be asked for while a graph is captured")
        return self.ended >= self.recorded

    def synchronize(self) -> None:
        """Runs work until this is recorded."""
        self.owner.hand_over()
        while not self.query():
            ready = [stream for stream in self.owner.streams if stream.is_ready]
            if not ready:
                raise RuntimeError("an event that never comes")
            self.owner._next(ready).step()

    def elapsed_time(self, end: FakeEvent) -> float:
        if not (self.is_timed and end.is_timed and self.query() and end.query()):
            raise RuntimeError("an event without a time")
        return 0.25


class FakeGraph:
    """``torch.npu.NPUGraph``: a list of work, run again with every `replay`."""

    def __init__(self, device: Device) -> None:
        self.owner = device
        self.work: list[Work] = []
        self.held: list[object] = []

    def replay(self) -> None:
        device = self.owner
        device.hand_over()
        device.hold(self)
        versions: dict[tuple[int, int], int] = {}
        for work in self.work:
            if work.event is not None:
                key = id(work.event), work.version
                if work.kind == "record":
                    work.event.recorded += 1
                    versions[key] = work.event.recorded
                elif key not in versions:
                    raise RuntimeError("a graph waits for an event that was recorded outside of it")
                work = replace(work, version=versions[key])
            device.log.append(work)
            device._put(work)


class FakeCapture:
    """``torch.npu.graph(graph)``."""

    def __init__(self, graph: FakeGraph) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        device = self._graph.owner
        device.synchronize()
        device.graph = self._graph

    def __exit__(self, *_: Any) -> None:
        device = self._graph.owner
        device.hand_over()
        device.graph = None
