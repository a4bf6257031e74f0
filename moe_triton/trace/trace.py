"""One rank's trace: which calls it made, in memory until it is written."""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Mapping

import torch

from moe_triton.backends.base import Backend, Bindings, Executable
from moe_triton.plan import Launch, Plan
from moe_triton.rendezvous import Meeting
from moe_triton.schemes.site import Site
from moe_triton.trace.chrome import Call, Place, metadata, spans
from moe_triton.trace.file import TraceFile

Counts = Mapping[str, int]
MAX_EVENTS = 1 << 17  # that a rank keeps: 5 MB, and about 20 MB of JSON


class Trace:
    """What the calls of one rank did. Python does nothing for it but keep a record of each call.

    Args:
        file: where it goes.
        place: where its events come from.
        backend: whose kernels are traced.
    """

    def __init__(self, file: TraceFile, place: Place, backend: Backend) -> None:
        self.file, self.place, self.backend = file, place, backend
        self.log = log = backend.make_trace_log(MAX_EVENTS)
        self._calls: deque[tuple[int, Call]] = deque(maxlen=log.capacity)
        self._numbers = itertools.count(1)
        self._num_dropped = 0
        self._closed = False

    @classmethod
    def start(
        cls, file: TraceFile, site: Site, backend: Backend, meeting: Meeting, exchange: Meeting | None
    ) -> Trace:
        """The trace of a rank of a group, which replaces the file if it is the group's first.

        Raises:
            ArgumentError: the file cannot be written.
        """
        ranks, exchange_ranks = (m.world_ranks() if m else () for m in (meeting, exchange))
        file.start(is_first=site.rank == 0)
        return cls(file, Place(site.config, site.rank, site.num_blocks, ranks, exchange_ranks), backend)

    def compile(self, plan: Plan, report: torch.Tensor, fixed: Bindings, counts: Counts) -> Executable:
        """A plan made ready, whose runs go into the trace.

        Args:
            plan: what to run.
            report: see `moe_triton.backends.base.Backend`.
            fixed: as well.
            counts: how many there were of each operator.
        """
        return TracedExecutable(self.backend.compile(plan, report, fixed, self.log), plan, self, counts)

    def begin(self, call: Call) -> None:
        """A call begins: what happens from here on is its."""
        number = next(self._numbers)
        self._calls.append((number, call))
        self.log.begin_call(number)

    def write(self) -> None:
        """Adds what has happened since the last time to the file.

        Raises:
            OSError: it cannot be written.
        """
        events = self.log.take()
        calls = dict(self._calls)
        self._calls.clear()
        whole = {event.call for event in events}
        self._num_dropped += sum(number not in whole for number in calls)
        self.file.add([*metadata(self.place, self._num_dropped), *spans(self.place, calls, events)])

    def close(self) -> None:
        """Writes for the last time. A failure only warns: there is more to be closed."""
        if self._closed:
            return
        self._closed = True
        try:
            self.write()
        except OSError as error:
            warnings.warn(f"no trace written to {self.file.path}: {error}", RuntimeWarning, stacklevel=2)


class TracedExecutable:
    """An executable whose runs go into a trace. See `moe_triton.backends.base.Executable`.

    Args:
        executable: made with the trace's log.
        plan: what it runs.
        trace: where its runs go.
        counts: how many there were of each operator.
    """

    def __init__(self, executable: Executable, plan: Plan, trace: Trace, counts: Counts) -> None:
        self._executable, self._plan, self._trace, self._counts = executable, plan, trace, counts

    @property
    def failed_launch(self) -> Launch | None:
        """See `moe_triton.backends.base.Executable`."""
        return self._executable.failed_launch

    def run(self, bindings: Bindings) -> int:
        """See `moe_triton.backends.base.Executable`."""
        integers = {name: bound for name, bound in bindings.items() if isinstance(bound, int)}
        call = Call(self._plan, self._counts[self._plan.operator], integers)
        self._trace.begin(call)
        code = self._executable.run(bindings)
        if code:
            call.failed = self._executable.failed_launch
        elif "recv_offsets" in bindings:
            offsets = bindings["recv_offsets"]
            assert not isinstance(offsets, int)
            call.rows = self._trace.backend.read_int32(offsets, self._trace.place.num_entries - 1)
        return code

    def durations_us(self) -> dict[str, float]:
        """See `moe_triton.backends.base.Executable`."""
        return self._executable.durations_us()
