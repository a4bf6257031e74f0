"""A plan on the NPU's streams: launched without waiting, and looked at afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from moe_triton.backends.base import Bindings, Recording
from moe_triton.backends.npu.raised_waits import RaisedWaits
from moe_triton.backends.npu.runtime import Event, Runtime, Stream
from moe_triton.backends.npu.schedule import BEGIN, schedule
from moe_triton.backends.npu.steps import Step, make_step
from moe_triton.backends.phases import PhaseTimes, first_code, is_profiled, launch_names, name_of, recorded
from moe_triton.core.abi import REPORT, TIMES, word_of
from moe_triton.core.ascendc import REPORT_WORDS
from moe_triton.core.errors import BufferStateError
from moe_triton.core.flight_file import NUM_RUNS, RunStruct
from moe_triton.core.kernel import MAX_PHASES, AscendCKernel
from moe_triton.core.plan import Launch, Phases, Plan, num_blocks

_UNRECORDED = nullcontext()


class NpuExecutable:
    """A plan as launches on two streams. A call fills the placeholders and launches all of them.

    A call never waits for the device and allocates nothing but outputs, from torch's allocator, so it can be
    captured. Each launch that can report has its own report, which is kept once something has been reported;
    all of them are copied to the host after each run.

    Args:
        plan: what to run.
        fixed: contents of the placeholders that are the same in every call.
        runtime: torch_npu.
        communication: the stream of launches that move data between ranks.
        two_streams: whether both streams are used; otherwise everything runs on the user's.
        recording: how the flight recorder has its runs: when each was started and, once somebody has looked,
            how it ended and what it raised in the caller's ``performance_info``. None for not at all.
    """

    def __init__(
        self,
        plan: Plan,
        fixed: Bindings,
        runtime: Runtime,
        communication: Stream,
        two_streams: bool,
        recording: Recording | None = None,
    ) -> None:
        self._recording, self._begun = recording, list[RunStruct]()
        self._raised = RaisedWaits(runtime, recording.memory) if recording else None
        self.plan, self._runtime, self._communication = plan, runtime, communication
        self.failed_launch: Launch | None = None
        self.failed_report = torch.zeros(0, REPORT_WORDS, dtype=torch.int32, device="cpu")
        self._placeholders = tuple(name for name in plan.placeholders if name not in fixed and name != REPORT)
        self._times = PhaseTimes(plan, runtime.device)
        self._reporting = [phases for phases in self._times.launches if _reports(phases[0])]
        blocks = max((num_blocks(phases) for phases in self._reporting), default=1)
        self._reports = torch.zeros(
            (len(self._reporting), MAX_PHASES, blocks, REPORT_WORDS), dtype=torch.int32, device=runtime.device
        )
        self._fixed = fixed  # keeps the memory alive whose addresses stand in the launches
        self._steps = self._make_steps()
        self._range = name_of(plan)
        self._step_ranges = launch_names(plan, self._times.launches)
        self._schedule = schedule([phases[0] for phases in self._times.launches], two_streams)
        self._events = self._make_events()
        self._host_reports = runtime.host_copy(self._reports)
        self._copied: Event | None = None
        self._timed: list[tuple[Event, Event]] = []
        self._graph_events: list[dict[int, Event]] = []
        self._measures = False

    def _make_steps(self) -> list[Step]:
        reports, first = iter(self._reports), 0
        steps = []
        for phases in self._times.launches:
            bound = {**self._fixed, TIMES: self._times.of(first)}
            report_bytes = 0
            if _reports(phases[0]):
                bound[REPORT] = report = next(reports)
                report_bytes = report[0].numel() * report.element_size()
            steps.append(make_step(phases, bound, self._placeholders, report_bytes))
            first += len(phases)
        return steps

    def _make_events(self) -> dict[int, Event]:
        numbers = [i for i, launch in enumerate(self._schedule.launches) if launch.is_awaited]
        if self._schedule.begin_is_awaited:
            numbers.append(BEGIN)
        return {number: self._runtime.make_event() for number in numbers}

    def run(self, bindings: Bindings) -> int:
        """Launches every step in order, and returns 0 without waiting for the device."""
        if not is_profiled():
            return self._run(bindings, [])
        with recorded(self._range):
            return self._run(bindings, self._step_ranges)

    def _run(self, bindings: Bindings, ranges: Sequence[str]) -> int:
        values = [word_of(bindings[name]) for name in self._placeholders]
        runtime = self._runtime
        capturing = runtime.is_capturing()
        events = self._events
        if capturing:
            # An event belongs to the graph that it was captured in.
            events = self._make_events()
            self._graph_events.append(events)
        if not capturing:
            self._record_begin(bindings)
        streams = {"compute": runtime.current_stream(), "communication": self._communication}
        handles = {name: runtime.handle(stream) for name, stream in streams.items()}
        if BEGIN in events:
            events[BEGIN].record(streams["compute"])
        measured = self._begin_measuring() if self._measures and not capturing else None
        for number, (step, launch) in enumerate(zip(self._steps, self._schedule.launches, strict=True)):
            stream = streams[launch.stream]
            if launch.waits_for is not None:
                stream.wait_event(events[launch.waits_for])
            if measured:
                measured[number][0].record(stream)
            # A launch that bypasses torch_npu's queue must find it empty: earlier events and kernels are in
            # it.
            handle = runtime.handle(stream) if step.is_direct else handles[launch.stream]
            with recorded(ranges[number]) if ranges else _UNRECORDED:
                step.launch(values, handle)
            if measured:
                measured[number][1].record(stream)
            if launch.is_awaited:
                events[number].record(stream)
        if self._schedule.end is not None:
            streams["compute"].wait_event(events[self._schedule.end])
        if not capturing and self._reporting:
            self._copy_reports(streams["compute"])
        if not capturing and self._raised:
            self._raised.end(self._begun[-1])
        return 0

    def _record_begin(self, bindings: Bindings) -> None:
        if self._recording is None or self._raised is None:
            return
        memory, flown = self._recording.memory, self._recording.flown
        tokens = bindings.get("num_tokens", -1)
        assert isinstance(tokens, int)
        # Of those that nobody has looked at the ring has the newest.
        del self._begun[: -(NUM_RUNS // 2)]
        self._begun.append(memory.begin_run(flown, self._recording.next_number, tokens))
        self._raised.begin(bindings)

    def _note_ended(self, code: int) -> None:
        """All that was started has ended; of what has gone wrong the device says it of the last one."""
        if self._recording is None or self._raised is None:
            return
        self._raised.note()
        for run in self._begun:
            result = code if run is self._begun[-1] else 0
            self._recording.memory.end_run(run, self._recording.flown, result, ())
        self._begun.clear()

    def _copy_reports(self, stream: Stream) -> None:
        # Reports are kept: if a copy is still under way, the next one brings the same.
        if self._copied is None:
            self._copied = self._runtime.make_event()
        elif not self._copied.query():
            return
        self._runtime.copy(self._host_reports, self._reports)
        self._copied.record(stream)

    @property
    def ran(self) -> Sequence[Phases]:
        """Returns nothing: a device's runs are not stopped between launches."""
        return ()

    def resume(self, bindings: Bindings) -> int:
        """Runs it."""
        return self.run(bindings)

    def outcome(self, wait: bool) -> int | None:
        """Returns 0 or a code that was reported, or None if the last run has not ended yet."""
        code = self._outcome(wait)
        if code is not None:
            self._note_ended(code)
        return code

    def _outcome(self, wait: bool) -> int | None:
        if not self._reporting:
            return 0
        if wait:
            self._runtime.synchronize()
            self._host_reports.copy_(self._reports)
        elif self._copied is None or not self._copied.query():
            return None
        for index, phases in enumerate(self._reporting):
            code, phase = first_code(self._host_reports[index])
            if code:
                self.failed_launch = phases[phase]
                self.failed_report = self._host_reports[index, phase, : num_blocks(phases)]
                return code
        return 0

    def measure(self, on: bool) -> None:
        """Whether runs measure each step from now on. Not for graphs that were captured before."""
        self._measures = on
        for step in self._steps:
            step.note_times(on)

    def _begin_measuring(self) -> list[tuple[Event, Event]]:
        if not self._timed:
            make = self._runtime.make_event
            self._timed = [(make(timed=True), make(timed=True)) for _ in self._steps]
        return self._timed

    def durations_us(self) -> dict[str, float]:
        """Returns the microseconds that each step took. Waits for the last run that was measured.

        Raises:
            BufferStateError: none was.
        """
        if not self._timed:
            raise BufferStateError("no run was measured: call measure(True) before it")
        self._runtime.synchronize()
        durations = [0.0] * len(self.plan.launches)
        first = 0
        for phases, (begin, end) in zip(self._times.launches, self._timed, strict=True):
            durations[first] = begin.elapsed_time(end) * 1e3
            first += len(phases)
        return self.plan.by_step(self._times.durations_us(durations))


def _reports(launch: Launch) -> bool:
    return isinstance(launch.kernel, AscendCKernel)
