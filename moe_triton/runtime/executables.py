"""The plans of one communicator, compiled when a call first needs them, and the memory that they share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal, cast

import torch

from moe_triton.backends.base import Backend, Calls, Executable, PreparedCalls, TraceLog, Window
from moe_triton.core.ascendc import REPORT_WORDS
from moe_triton.core.errors import BufferStateError
from moe_triton.core.kernel import MAX_PHASES
from moe_triton.core.plan import Plan
from moe_triton.core.reach import NUM_CHANGES_WORDS
from moe_triton.core.records import TRAFFIC
from moe_triton.core.traffic import PLACEHOLDER, Traffic
from moe_triton.operators.buffer import COMBINE_OF_BUFFER, DISPATCH_OF_BUFFER, attributes_of, symbols_like
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.runtime.recorder import Recorder
from moe_triton.schemes.rank_context import CALL_WORDS, COUNTED, OPERATORS, Operator
from moe_triton.schemes.scheme import Output, Scheme
from moe_triton.tables import KernelSettings


class PlanMemory:
    """The contents of placeholders that are the same in every call.

    Args:
        scheme: whose plans share it.
        windows: in the scheme's order.
        device: of all tensors made here.

    Attributes:
        bindings: by the name of the placeholder.
        report: (phases of a launch, blocks, words) int32.
        posts: whether queues lead to some of this rank's peers.
    """

    def __init__(self, scheme: Scheme, windows: Sequence[Window], device: torch.device) -> None:
        self._scheme, self._device = scheme, device
        context = scheme.context
        self.posts = bool(scheme.queued_peers)
        self.report = torch.zeros(
            MAX_PHASES, context.num_blocks, REPORT_WORDS, dtype=torch.int32, device=device
        )
        self.bindings: dict[str, torch.Tensor] = {}
        for spec, window in zip(scheme.windows, windows, strict=True):
            prefix = spec.peers.prefix
            self.bindings[f"{prefix}window"] = window.tensor()
            # Behind the ranks' words those of changes to masks (`moe_triton.core.reach`).
            words = (*window.peers, *(0,) * NUM_CHANGES_WORDS)
            self.bindings[f"{prefix}peers"] = torch.tensor(words, dtype=torch.int64, device=device)
        if context.zones_on_device:
            self.bindings["zones"] = torch.zeros(2 * len(OPERATORS), dtype=torch.int32, device=device)
        self.bindings["call_words"] = torch.zeros(CALL_WORDS, dtype=torch.int32, device=device)
        self.bindings["report"] = self.report

    def add_scratch(self, placeholders: Iterable[str]) -> None:
        """Allocates the scratch memory of these placeholders that does not exist yet."""
        scratch = self._scheme.scratch()
        for placeholder in placeholders:
            if placeholder in scratch and placeholder not in self.bindings:
                elements, dtype, is_zeroed = scratch[placeholder]
                make = torch.zeros if is_zeroed else torch.empty
                self.bindings[placeholder] = make(elements, dtype=dtype, device=self._device)

    def traffic(self, operator: Operator) -> Traffic | None:
        """What the last dispatch or combine has posted; None where queues lead to no peer.

        Raises:
            BufferStateError: there was no call yet, or everything is given back.
        """
        if not self.posts:
            return None
        memory = self.bindings.get(PLACEHOLDER)
        if memory is None:
            raise BufferStateError(f"there was no {operator} yet, or the buffer is closed")
        counters = memory.view(len(COUNTED), -1, TRAFFIC.num_words)[COUNTED.index(operator)]
        return Traffic.of(counters.cpu().numpy().sum(0).tolist())

    def private_bytes(self) -> int:
        """Bytes of all tensors, without the windows."""
        windows = {f"{spec.peers.prefix}window" for spec in self._scheme.windows}
        return sum(t.numel() * t.element_size() for name, t in self.bindings.items() if name not in windows)


Phase = Literal[
    "whole",
    "setup",
    "teardown",
    # of a call in rounds (`moe_triton.schemes.scheme.Scheme.phase`)
    "ask",
    "ring",
    "place",
    "routing",
    "announce",
    "starts",
    "round",
    "count",
    "entries",
    "fill",
    "restart",
    "fill_ahead",
    "late_fill",
    "local_counts",
    "gather",
    # of a dispatch in which ranks were masked
    "mend",
    "recount",
    "recall",
    # of what another rank did that is lost
    "pass_on",
]
HALVES = "whole", "setup", "teardown"
# Variant, zone, phase and parts of an operator; for a barrier, its timeout in place of the variant.
Key = tuple[Variant | int | None, int, Phase, int]
Kept = tuple[dict[Key, Executable], PreparedCalls]


class PlanCalls(ABC):
    """Native calls, which get every plan that they may run.

    Args:
        calls: the back end's.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    @abstractmethod
    def add(
        self, variant: Variant, zone: int, parts: int, tokens: torch.Tensor | None, executable: Executable
    ) -> None:
        """Registers a plan: from now on calls that need it take the native path.

        Args:
            variant: what the plan is specialised for.
            zone: what it is built for.
            parts: what it is cut into.
            tokens: where a dispatch's rows arrive, where that is in the window.
            executable: the plan.
        """

    def add_phase(self, variant: Variant, zone: int, phase: Phase, executable: Executable) -> None:  # noqa: B027
        """Registers a plan that is a phase of an operator: none, where native calls have none of them.

        Args:
            variant: what the plan is specialised for.
            zone: what it is built for.
            phase: which one.
            executable: the plan.
        """

    def swap(self, prepared: PreparedCalls) -> PreparedCalls:
        """Replaces the registered plans, ``{}`` for none, and returns the previous ones."""
        return self._calls.swap(prepared)


class Executables:
    """Compiles each plan once, and registers it with the native calls.

    Args:
        scheme: builds the plans.
        settings: of their Triton kernels.
        backend: compiles them.
        memory: shared by all of them.
        log: of a trace, or None.
        recorder: the flight recorder, or None.

    Attributes:
        log, recorder: for the plans that are compiled from now on.
        calls: the native calls, or None.
    """

    def __init__(
        self,
        scheme: Scheme,
        settings: KernelSettings,
        backend: Backend,
        memory: PlanMemory,
        log: TraceLog | None,
        recorder: Recorder | None = None,
    ) -> None:
        self.recorder = recorder
        self._scheme, self._settings, self._backend = scheme, settings, backend
        self._memory, self.log = memory, log
        self._kept: dict[Key, Executable] = {}
        self._views: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}
        self.calls: PlanCalls | None = None
        self._is_suspended = False
        self._are_stopped = False

    def operator(self, variant: Variant, zone: int, phase: Phase, parts: int) -> Executable:
        """A dispatch or combine, or a half of one."""
        return self._found((variant, zone, phase, parts))

    def barrier(self, zone: int, timeout_us: int | None) -> Executable:
        """A full wait of ``timeout_us`` at most; None for the buffer's timeout."""
        return self._found((timeout_us, zone, "whole", 1))

    def key_of(self, executable: Executable) -> Key:
        """What a plan was compiled for."""
        return next(key for key, kept in self._kept.items() if kept is executable)

    def _found(self, key: Key) -> Executable:
        executable = self._kept.get(key)
        return self.put(key, self.plan(key)) if executable is None else executable

    def plan(self, key: Key) -> Plan:
        """The plan of a key, with the settings of the tables."""
        of, zone, phase, parts = key
        if of is None or isinstance(of, int):
            return self._scheme.barrier(zone, of)
        if phase in HALVES:
            plan = cast(Plan, getattr(self._scheme, phase)(of, zone, parts))
        else:
            plan = self._scheme.phase(phase, of, zone, parts)
        return self._settings.tuned(plan)

    def compile(self, plan: Plan, variant: Variant | int | None = None) -> Executable:
        """Compiles a plan, and allocates the scratch memory that it needs.

        Args:
            plan: what to run.
            variant: of its operator; anything else for a barrier.

        Raises:
            BufferStateError: a graph is being captured, where nothing can be compiled.
        """
        if self._backend.is_capturing():
            raise BufferStateError(
                f"a {plan.operator} of this kind has not run before, and nothing can be prepared inside a "
                f"graph. Run the same calls once before the capture."
            )
        self._memory.add_scratch(plan.placeholders)
        recording = self.recorder.recording(plan, variant) if self.recorder else None
        of_plan = plan, self._memory.report, self._memory.bindings, self.log, recording
        return self._backend.compile(*of_plan)

    def _prepare(self, key: Key, executable: Executable) -> None:
        variant, zone, phase, parts = key
        if self.calls is None or self._is_suspended or variant is None or isinstance(variant, int):
            return
        if phase != "whole":
            self.calls.add_phase(variant, zone, phase, executable)
        else:
            tokens = None
            if isinstance(variant, DispatchVariant):
                tokens = self.window_view("rows", zone, variant.row_dtype)
            self.calls.add(variant, zone, parts, tokens, executable)
        if self._are_stopped or self._is_suspended:  # meanwhile, by another thread
            self.calls.swap({})

    def window_view(self, output: Output, zone: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The view of an output in this rank's window, the same tensor every time.

        Args:
            output: which one.
            zone: of the operator.
            dtype: of the elements.

        Returns:
            (A, H), or None if the output is a separate tensor.

        Raises:
            BufferStateError: the window is given back.
        """
        key = output, zone, dtype
        view = self._views.get(key)
        if view is None and (region := self._scheme.place(output, dtype.itemsize)):
            context = self._scheme.context
            start, num_bytes = region.offset(zone=zone), context.capacity * region.stride("index")
            window = self._memory.bindings.get("window")
            if window is None:  # another thread closes
                raise BufferStateError("the buffer is closed. Construct a new one.")
            flat = window[start : start + num_bytes].view(dtype)
            view = self._views[key] = flat.view(context.capacity, context.config.hidden)
        return view

    def results_in_window(self) -> list[torch.Tensor]:
        """Where combine reads this rank's results, by zone; empty unless they are in the window."""
        zones = range(self._scheme.rounds.num_zones)
        views = [self.window_view("results", zone, torch.bfloat16) for zone in zones]
        return [view for view in views if view is not None]

    def keys(self) -> list[Key]:
        """The keys of everything compiled so far."""
        return list(self._kept)

    def swap(self, kept: Kept) -> Kept:
        """Replaces everything compiled so far, and returns it. For benchmarks."""
        before = self._kept, self.calls.swap(kept[1]) if self.calls else {}
        self._kept = kept[0]
        return before

    def put(self, key: Key, plan: Plan) -> Executable:
        """Compiles a plan for a key and registers it; benchmarks pass other plans than the key's own."""
        executable = self._kept[key] = self.compile(plan, key[0])
        self._prepare(key, executable)
        return executable

    def suspend_calls(self, suspended: bool) -> None:
        """Has Python do all calls, from any thread; or lets native code do them again.

        Args:
            suspended: whether Python is to do them.
        """
        if self.calls is None or suspended == self._is_suspended:
            return
        self._is_suspended = suspended
        if suspended:
            self.calls.swap({})
            return
        for key, executable in self._kept.items():
            self._prepare(key, executable)

    def stop_calls(self) -> None:
        """Disables native calls, so that Python raises why no call is possible any more. From any thread."""
        self._are_stopped = True
        if self.calls is not None:
            self.calls.swap({})

    def clear(self) -> None:
        """Forgets everything."""
        self.stop_calls()
        self._kept.clear()
        self._views.clear()


FIRST_CALL_BYTES = 8 << 20
"""What a process takes until its calls repeat: to load kernels, and for Python's objects (measured: 5 MB)."""


def call_bytes(scheme: Scheme) -> int:
    """Private bytes that a plain dispatch and its combine take on this rank, when most rows arrive.

    Scratch memory, outputs, and what the process itself takes.
    """
    context, dtype = scheme.context, torch.bfloat16
    config = context.config
    tables, is_paired = scheme.tables_of(config), context.exchange_rank is not None
    keeps = tables is not None  # and then takes weights
    words = tables.num_words if tables else 0
    attributes = attributes_of(config, context.rank, context.exchange_rank, table_words=words)
    sizes = {"BS": config.num_max_tokens_per_rank, "rows": context.capacity, **attributes}
    outputs = 0
    dispatched = DispatchVariant(dtype, weights=keeps, keeps_tables=keeps, exchange=is_paired)
    combined = CombineVariant(dtype, weights=keeps, exchange=is_paired)
    for operator, variant in ((DISPATCH_OF_BUFFER, dispatched), (COMBINE_OF_BUFFER, combined)):
        s = symbols_like(operator, config, dtype, **sizes)
        for output in operator.returned(variant):
            if output.name == "tokens" and scheme.place("rows", dtype.itemsize):
                continue
            shape, kind = s.spec(output)
            outputs += math.prod(shape) * kind.itemsize
    return FIRST_CALL_BYTES + outputs + scheme.workspace_bytes(dispatched, combined)
