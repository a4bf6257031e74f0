"""`Communicator`: one group's windows, plans and zones, and the one place that turns the zones.

`moe_triton.buffer` and `moe_triton.torch_npu_ops` check what their users pass and make the outputs; both run
their operators here. An operator runs whole, or as setup (up to its flags) and teardown (from the wait on).
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch

from moe_triton.agreement import agree
from moe_triton.ascendc import MAX_BLOCKS, REPORT_TIMEOUT, REPORT_WORDS
from moe_triton.backends import make_backend
from moe_triton.backends.base import Backend, Bindings, Executable, Window
from moe_triton.config import Config
from moe_triton.diagnosis import missing_ranks
from moe_triton.errors import ArgumentError, BufferStateError, CommunicationTimeoutError
from moe_triton.layout import NUM_ZONES, DirectLayout
from moe_triton.limits import check_config
from moe_triton.plan import Launch
from moe_triton.rendezvous import Meeting
from moe_triton.schemes import make_scheme
from moe_triton.schemes.site import Site
from moe_triton.schemes.variants import DispatchVariant, Variant
from moe_triton.trace import Trace, TraceFile, TracePath
from moe_triton.tuning import Tuning

# Orders the uses of a process's communicators: the same on every rank, since all make the same calls.
_clock = itertools.count(1)

Phase = Literal["whole", "setup", "teardown"]


class Communicator:
    """Runs dispatch, combine and barriers of one rank. Collective: every rank makes the same calls.

    Args:
        meeting: the group.
        config: the group's settings.
        make: makes the back end.
        check_window: called with the data window's bytes before anything is allocated; raises if that is
            too much.
        num_blocks: blocks per kernel, None for what suits the machine.
        timeout_s: seconds that one wait may take.
        exchange: the tensor-parallel group of two, where there is one.
        tuning: how operators are cut into parts; None for the usual way.
        trace: file for a trace of all ranks, None for none.

    Raises:
        ArgumentError: a size breaks a limit.
        ConfigMismatchError: ranks disagree.
        WindowError: no memory for a window.
        CommunicationTimeoutError: a rank did not come.
    """

    def __init__(
        self,
        meeting: Meeting,
        config: Config,
        make: Callable[[], Backend] = lambda: make_backend("cpu", "triton"),
        *,
        check_window: Callable[[int], None] = lambda num_bytes: None,
        num_blocks: int | None = None,
        timeout_s: float = 60.0,
        exchange: Meeting | None = None,
        tuning: Tuning | None = None,
        trace: TracePath | None = None,
    ) -> None:
        self.config, self.rank = config, meeting.rank
        file = TraceFile(trace) if trace is not None else None

        def prepare() -> Backend:
            if file:
                file.check_writable()
            return make()

        self.backend = agree(meeting, config, prepare, trace=str(file.path) if file else None)
        check_config(config)
        blocks = num_blocks if num_blocks is not None else self.backend.num_blocks(meeting.num_ranks)
        if not 1 <= blocks <= MAX_BLOCKS:
            raise ArgumentError("num_blocks", blocks, f"it must be 1 to {MAX_BLOCKS}", "Pass None.")
        tuning = tuning or Tuning()
        tuning.check(blocks)
        self.site = Site(
            config,
            self.rank,
            blocks,
            int(timeout_s * 1e6),
            self.backend.name,
            exchange.rank if exchange else None,
            tuning,
        )
        self.layout = self.site.layout
        self.capacity = self.site.capacity
        check_window(self.layout.data_bytes)
        self._scheme = make_scheme(self.site)
        self.counts = {"dispatch": 0, "combine": 0, "barrier": 0}
        self._trace = (
            Trace.start(file, self.site, self.backend, self.counts, meeting, exchange) if file else None
        )
        self._windows: list[Window] = [self.backend.make_window(self.layout.window_bytes, meeting)]
        if exchange:
            self._windows.append(self.backend.make_window(self.site.exchange.window_bytes, exchange))
        self._fixed: dict[str, torch.Tensor] = {}
        self._report = torch.zeros(blocks, REPORT_WORDS, dtype=torch.int32, device=self.backend.device)
        self._allocate()
        self._executables: dict[tuple[object, int, Phase, int], Executable] = {}
        self._last: dict[str, Executable] = {}
        self._views: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}
        self._in_flight: dict[str, Variant] = {}
        # A full wait is known to lie behind this many combines; see `_separate_combines`.
        self._covered, self._covered_at_teardown = 0, 0
        self._broken = ""
        self._lock = threading.Lock()
        self._closed = False
        self.last_use = 0
        if self._trace:
            weakref.finalize(self, self._trace.close)  # if nobody else closes it

    def _allocate(self) -> None:
        """Memory that every plan needs; the rest of the scratch comes with the first plan that asks."""
        device = self.backend.device
        for name, window in zip(("", "exchange_"), self._windows, strict=False):
            self._fixed[f"{name}window"] = window.tensor()
            peers = torch.tensor(window.peers, dtype=torch.int64, device=device)
            self._fixed[f"{name}peers"] = peers
            # For kernels that reach a peer's window from this one, in elements of 16 bits.
            self._fixed[f"{name}peer_offsets"] = (peers - window.base) // 2
        self._fixed["report"] = self._report

    def run(self, variant: Variant, bindings: Bindings, phase: Phase = "whole") -> None:
        """Runs an operator, or one half of it.

        Args:
            variant: what it is specialised for.
            bindings: a tensor or an integer for each hole of its plan that is not scratch.
            phase: which half.

        Raises:
            BufferStateError: closed, broken, in use by another thread, or halves out of order.
            CommunicationTimeoutError: a rank's data did not come in time; the communicator is then broken.
        """
        operator = "dispatch" if isinstance(variant, DispatchVariant) else "combine"
        self._enter()
        try:
            if phase != "whole" or self._in_flight:
                self._check_halves(operator, variant, phase)
            if operator == "combine" and phase != "teardown":
                self._separate_combines()
            zone = self._zone(operator)
            executable = self._executable((variant, zone, phase, self._parts(operator, bindings)))
            if operator == "dispatch" and phase != "teardown":
                # Our flags leave now: they cover the combines that have ended by now.
                self._covered_at_teardown = self.counts["combine"]
            self._execute(operator, executable, zone, bindings, turn=phase != "setup")
            if phase == "setup":
                self._in_flight[operator] = variant
            elif operator == "dispatch":
                self._covered = self._covered_at_teardown
            self._last[operator] = executable
        finally:
            self._lock.release()

    def barrier(self, timeout_us: int | None = None) -> None:
        """Waits for every rank of the group, at most so many microseconds; None for the usual time.

        Raises:
            BufferStateError: closed, broken or in use by another thread.
            CommunicationTimeoutError: a rank did not come; the communicator is then broken.
        """
        self._enter()
        try:
            self._full_wait(timeout_us)
        finally:
            self._lock.release()

    def _enter(self) -> None:
        if self._closed:
            raise BufferStateError("the buffer is closed. Construct a new one.")
        if self._broken:
            raise BufferStateError(f"the buffer is broken: {self._broken}. Rebuild it on every rank.")
        if not self._lock.acquire(blocking=False):
            raise BufferStateError("another thread is inside this buffer; calls must not overlap")
        self.last_use = next(_clock)

    def _check_halves(self, operator: str, variant: Variant, phase: Phase) -> None:
        pending = self._in_flight.get(operator)
        if phase != "teardown":
            if pending is not None:
                raise BufferStateError(
                    f"a {operator} is set up and not yet torn down, and only one may be. "
                    f"Call {operator}_teardown first."
                )
        elif pending is None:
            raise BufferStateError(f"no {operator} is set up. Call {operator}_setup first.")
        else:
            del self._in_flight[operator]

    def _parts(self, operator: str, bindings: Bindings) -> int:
        tokens = bindings.get("num_tokens", 0)  # combine's setup works on rows
        assert isinstance(tokens, int)
        tuning = self.site.tuning
        each = tuning.dispatch_tokens if operator == "dispatch" else tuning.combine_tokens
        return -(-tokens // each) if tokens > each else 1

    def _zone(self, operator: str) -> int:
        counts = self.counts
        if self.site.is_version_1 and operator != "barrier":
            return (counts["dispatch"] + counts["combine"]) % NUM_ZONES
        return counts[operator] % NUM_ZONES

    def _separate_combines(self) -> None:
        """Makes the full wait that must lie between combine i and i + 2 (protocols.md), where none did.

        A wait covers the combines that a rank had ended when it posted its flags.
        """
        if not self.site.combine_waits_for_all and self.counts["combine"] >= self._covered + NUM_ZONES:
            self._full_wait()

    def _full_wait(self, timeout_us: int | None = None) -> None:
        ended = self.counts["combine"]
        zone = self._zone("barrier")
        key: tuple[object, int, Phase, int] = (("barrier", timeout_us), zone, "whole", 1)
        if key not in self._executables:
            self._executables[key] = self._compile(self._scheme.barrier(zone, timeout_us))
        self._execute("barrier", self._executables[key], zone, {}, turn=True, timeout_us=timeout_us)
        self._covered = ended

    def _execute(
        self,
        operator: str,
        executable: Executable,
        zone: int,
        bindings: Bindings,
        *,
        turn: bool,
        timeout_us: int | None = None,
    ) -> None:
        number = self.counts[operator]
        try:
            code = executable.run(bindings)
        except BaseException as error:
            self._broken = f"{operator} number {number} ended in {type(error).__name__}"
            raise
        finally:
            # The zone turns exactly once per operator, on failure too.
            self.counts[operator] += turn
        if code:
            assert executable.failed_launch is not None
            self._fail(operator, number, zone, code, executable.failed_launch, bindings, timeout_us)

    def _executable(self, key: tuple[Variant, int, Phase, int]) -> Executable:
        found = self._executables.get(key)
        if found is None:
            variant, zone, phase, parts = key
            build = getattr(self._scheme, phase)
            found = self._executables[key] = self._compile(build(variant, zone, parts))
        return found

    def _compile(self, plan: Any) -> Executable:
        scratch = self.site.scratch()
        for hole in plan.holes:
            if hole in scratch and hole not in self._fixed:
                elements, dtype = scratch[hole]
                self._fixed[hole] = torch.empty(elements, dtype=dtype, device=self.backend.device)
        log = self._trace.log if self._trace else None
        return self.backend.compile(plan, self._report, self._fixed, log)

    def _fail(
        self,
        operator: str,
        number: int,
        zone: int,
        code: int,
        launch: Launch,
        bindings: Bindings,
        timeout_us: int | None,
    ) -> None:
        if code != REPORT_TIMEOUT:
            self._broken = f"{operator} number {number} met a row that names no place in this group"
            raise BufferStateError(f"{self._broken}; it was not sent. Rebuild the buffer on every rank.")
        memory = {**self._fixed, **bindings}
        missing = missing_ranks(self.site, operator, zone, launch, memory, self._report)
        group = "tensor-parallel " if ":" in launch.step else ""
        self._broken = f"{operator} number {number} timed out waiting for {group}rank(s) {missing}"
        raise CommunicationTimeoutError(
            operator,
            number,
            zone,
            missing,
            f"their flags did not come within {(timeout_us or self.site.timeout_us) / 1e6:g} s. "
            f"Rebuild the buffer once they are back.",
        )

    def window_tensor(self, name: Literal["rows", "results"], dtype: torch.dtype) -> torch.Tensor:
        """Direct: where the next dispatch puts its rows, or the next combine looks for results first.

        Args:
            name: "rows" of dispatch, or "results" of combine.
            dtype: of the elements.

        Returns:
            (A, H): memory of this rank's window.
        """
        zone = self._zone("dispatch" if name == "rows" else "combine")
        key = name, zone, dtype
        view = self._views.get(key)
        if view is None:
            layout = self.layout
            assert isinstance(layout, DirectLayout)
            region = layout.rows(dtype.itemsize) if name == "rows" else layout.results
            start, num_bytes = region.offset(zone=zone), self.capacity * region.stride("index")
            flat = self._fixed["window"][start : start + num_bytes].view(dtype)
            view = self._views[key] = flat.view(self.capacity, self.config.hidden)
        return view

    @property
    def window_base(self) -> int:
        """Address of this rank's window."""
        return self._windows[0].base

    def in_flight(self, operator: str) -> Variant | None:
        """What an operator was set up for that is not torn down yet, or None."""
        return self._in_flight.get(operator)

    @property
    def is_usable(self) -> bool:
        """Whether it is open, and no failure has put the ranks out of step."""
        return not (self._closed or self._broken)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is set up that is not torn down."""
        return not self._in_flight

    def check_usable(self) -> None:
        """Checks that the communicator is neither closed nor broken.

        Raises:
            BufferStateError: it is.
        """
        if self._closed or self._broken or self._lock.locked():
            self._enter()
            self._lock.release()

    def durations_us(self, operator: str) -> dict[str, float]:
        """Microseconds that each step of this rank's last dispatch or combine took.

        Raises:
            BufferStateError: it has not run yet.
        """
        if operator not in self._last:
            raise BufferStateError(f"there was no {operator} yet")
        return self._last[operator].durations_us()

    def write_trace(self) -> None:
        """Adds what has happened since the last time to the trace.

        Raises:
            BufferStateError: there is none, or another thread is inside.
            OSError: the file cannot be written.
        """
        if self._trace is None or self._closed:
            raise BufferStateError("there is no trace: the buffer was made without one, or is closed")
        if not self._lock.acquire(blocking=False):
            raise BufferStateError("another thread is inside this buffer; calls must not overlap")
        try:
            self._trace.write()
        finally:
            self._lock.release()

    def scratch_bytes(self) -> int:
        """Private memory that plans have asked for so far, in bytes."""
        windows = {"window", "exchange_window"}
        return sum(t.numel() * t.element_size() for n, t in self._fixed.items() if n not in windows)

    def close(self) -> None:
        """Gives the windows back. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._executables.clear()
            self._last.clear()
            self._views.clear()
            self._fixed.clear()
            for window in self._windows:
                window.close()
            if self._trace:
                self._trace.close()
