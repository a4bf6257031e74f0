"""A plan on the NPU's streams: launched without waiting, and looked at afterwards."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_triton.backends.base import Bindings
from moe_triton.backends.npu.runtime import Event, Runtime, Stream
from moe_triton.backends.npu.schedule import BEGIN, schedule
from moe_triton.backends.npu.steps import make_step
from moe_triton.core.abi import word_of
from moe_triton.core.ascendc import REPORT_WORDS, first_code
from moe_triton.core.errors import BufferStateError
from moe_triton.core.kernel import AscendCKernel
from moe_triton.core.plan import Hole, Launch, Plan

REPORT = "report"


class NpuExecutable:
    """A plan as launches on two streams. A call fills the holes and launches all of them.

    A call never waits for the device and allocates nothing but outputs, from torch's allocator, so it can be
    captured. Each launch that can report has its own report, which is kept once something has been reported;
    all of them are copied to the host after each run.

    Args:
        plan: what to run.
        fixed: contents of the holes that are the same in every call.
        runtime: torch_npu.
        communication: the stream of launches that move data between ranks.
        two_streams: whether both streams are used; otherwise everything runs on the user's.
    """

    def __init__(
        self, plan: Plan, fixed: Bindings, runtime: Runtime, communication: Stream, two_streams: bool
    ) -> None:
        self._plan, self._runtime, self._communication = plan, runtime, communication
        self.failed_launch: Launch | None = None
        self._holes = tuple(name for name in plan.holes if name not in fixed and name != REPORT)
        reporting = [i for i, launch in enumerate(plan.launches) if _reports(launch)]
        blocks = max((plan.launches[i].blocks for i in reporting), default=1)
        self._reports = torch.zeros(
            (len(reporting), blocks, REPORT_WORDS), dtype=torch.int32, device=runtime.device
        )
        self._reporting = [plan.launches[i] for i in reporting]
        self._fixed = fixed  # keeps the memory alive whose addresses stand in the launches
        index_of = {number: index for index, number in enumerate(reporting)}
        self._steps = [
            make_step(_reporting_to(launch, self._reports, index_of.get(i)), fixed, self._holes)
            for i, launch in enumerate(plan.launches)
        ]
        self._schedule = schedule(plan.launches, two_streams)
        self._events = self._make_events()
        self._host_reports = runtime.host_copy(self._reports)
        self._copied: Event | None = None
        self._timed: list[tuple[Event, Event]] = []
        self._graph_events: list[dict[int, Event]] = []
        self.measures = False

    def _make_events(self) -> dict[int, Event]:
        numbers = [i for i, launch in enumerate(self._schedule.launches) if launch.is_awaited]
        if self._schedule.begin_is_awaited:
            numbers.append(BEGIN)
        return {number: self._runtime.make_event() for number in numbers}

    def run(self, bindings: Bindings) -> int:
        """See `moe_triton.backends.base.Executable`."""
        values = [word_of(bindings[name]) for name in self._holes]
        runtime = self._runtime
        capturing = runtime.is_capturing()
        events = self._events
        if capturing:
            # An event belongs to the graph that it was captured in.
            events = self._make_events()
            self._graph_events.append(events)
        streams = {"compute": runtime.current_stream(), "communication": self._communication}
        handles = {name: runtime.handle(stream) for name, stream in streams.items()}
        if BEGIN in events:
            events[BEGIN].record(streams["compute"])
        measured = self._begin_measuring() if self.measures and not capturing else None
        for number, (step, launch) in enumerate(zip(self._steps, self._schedule.launches, strict=True)):
            stream = streams[launch.stream]
            if launch.waits_for is not None:
                stream.wait_event(events[launch.waits_for])
            if measured:
                measured[number][0].record(stream)
            # A launch that bypasses torch_npu's queue must find it empty: earlier events and kernels are in
            # it.
            step.launch(values, runtime.handle(stream) if step.is_direct else handles[launch.stream])
            if measured:
                measured[number][1].record(stream)
            if launch.is_awaited:
                events[number].record(stream)
        if self._schedule.end is not None:
            streams["compute"].wait_event(events[self._schedule.end])
        if not capturing and self._reporting:
            self._copy_reports(streams["compute"])
        return 0

    def _copy_reports(self, stream: Stream) -> None:
        # Reports are kept: if a copy is still under way, the next one brings the same.
        if self._copied is None:
            self._copied = self._runtime.make_event()
        elif not self._copied.query():
            return
        self._runtime.copy(self._host_reports, self._reports)
        self._copied.record(stream)

    def outcome(self, wait: bool) -> int | None:
        """See `moe_triton.backends.base.Executable`."""
        if not self._reporting:
            return 0
        if wait:
            self._runtime.synchronize()
            self._host_reports.copy_(self._reports)
        elif self._copied is None or not self._copied.query():
            return None
        for index, launch in enumerate(self._reporting):
            if code := first_code(self._host_reports[index]):
                self.failed_launch = launch
                return code
        return 0

    @property
    def failed_report(self) -> torch.Tensor:
        """See `moe_triton.backends.base.Executable`."""
        assert self.failed_launch is not None
        number = next(i for i, launch in enumerate(self._reporting) if launch is self.failed_launch)
        return self._host_reports[number, : self.failed_launch.blocks]

    def _begin_measuring(self) -> list[tuple[Event, Event]]:
        if not self._timed:
            make = self._runtime.make_event
            self._timed = [(make(timed=True), make(timed=True)) for _ in self._steps]
        return self._timed

    def durations_us(self) -> dict[str, float]:
        """See `moe_triton.backends.base.Executable`. Waits for the last run that was measured.

        Raises:
            BufferStateError: none was.
        """
        if not self._timed:
            raise BufferStateError("no run was measured: call measure(True) before it")
        self._runtime.synchronize()
        return self._plan.by_step([begin.elapsed_time(end) * 1e3 for begin, end in self._timed])


def _reports(launch: Launch) -> bool:
    return isinstance(launch.kernel, AscendCKernel)


def _reporting_to(launch: Launch, reports: torch.Tensor, index: int | None) -> Launch:
    """The launch with the address of its own report."""
    if index is None:
        return launch
    address = reports.data_ptr() + index * reports[0].numel() * reports.element_size()
    values = tuple(
        address if isinstance(value, Hole) and value.name == REPORT else value for value in launch.values
    )
    return replace(launch, values=values)
