"""What a back end offers: windows that peers can write to, and a way to run plans."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from moe_triton.backends.waits import Waits
from moe_triton.core.call_program import CallProgram, PlanProgram
from moe_triton.core.plan import Launch, Plan
from moe_triton.rendezvous.meeting import Meeting

Bindings = Mapping[str, torch.Tensor | int]
# Shape and dtype of a tensor to be made.
TensorSpec = tuple[tuple[int, ...], torch.dtype]


class Window(Protocol):
    """Memory of this rank that every peer can write to, and where the peers' windows are."""

    base: int
    """Address of this rank's window."""

    peers: tuple[int, ...]
    """Address of each rank's window as seen from here, by rank; ``peers[rank] == base``."""

    def tensor(self) -> torch.Tensor:
        """This rank's window as a flat uint8 tensor."""
        ...

    def barrier(self) -> None:
        """Waits for every rank of the group."""
        ...

    def close(self) -> None:
        """Gives the memory back. May be called twice."""
        ...


class TraceEvent(NamedTuple):
    """Something that took time. Times are of CLOCK_MONOTONIC, the same for all ranks of a machine.

    Attributes:
        begin_ns: when it began.
        end_ns: when it ended.
        call: number of the call.
        launch: in which launch of the call's plan.
        block: on which block.
        kind: what it is (``moe_triton.core.ascendc.TRACE_BLOCK`` and on).
        peer: for whom a wait was, as its kernel numbers its peers: by rank, or by expert; else -1.
    """

    begin_ns: int
    end_ns: int
    call: int
    launch: int
    block: int
    kind: int
    peer: int


class TracedCall(NamedTuple):
    """One run of a plan.

    Attributes:
        plan: what ran.
        number: the how many-th run of any plan, from 1.
        begin_ns: when it began.
        end_ns: when it ended.
        tokens: that the rank passed, or -1.
        rows: that were received (dispatch) or sent back (combine), where that is known, or -1.
        failed: the launch that reported something or failed, or None.
    """

    plan: Plan
    number: int
    begin_ns: int
    end_ns: int
    tokens: int
    rows: int
    failed: Launch | None


class TraceLog(Protocol):
    """What the plans of one communicator did, in memory. There is room for so much; the newest is kept."""

    def take(self) -> tuple[list[TracedCall], list[TraceEvent], int]:
        """Calls with all of their events, and how many have been dropped; then forgets them."""
        ...


class Executable(Protocol):
    """A plan made ready for one back end."""

    @property
    def failed_launch(self) -> Launch | None:
        """The one that reported something in the last run that failed, or None."""
        ...

    @property
    def failed_report(self) -> torch.Tensor:
        """What it reported, (blocks, words) int32 on the host."""
        ...

    def run(self, bindings: Bindings) -> int:
        """Runs every launch in order.

        Args:
            bindings: a tensor or an integer for each hole that is not fixed.

        Returns:
            0, or a report code (`moe_triton.core.ascendc`) of the first launch that reported one; later
            launches have then not run. Of an asynchronous back end always 0: see `outcome`.
        """
        ...

    def outcome(self, wait: bool) -> int | None:
        """What the runs so far have reported, where `run` does not wait for their end.

        Args:
            wait: for the runs to end; and look at runs that were captured, too.

        Returns:
            0 or a report code, or None where the last run has not ended yet.
        """
        ...

    def durations_us(self) -> dict[str, float]:
        """Microseconds that each step of the last run took."""
        ...


class CallSetting(NamedTuple):
    """What whole calls of a buffer need to know of it, and share with Python's way of making them.

    Attributes:
        owner: which buffer it is.
        rounds: the record of its `Rounds`.
        last: the executable that each operator ran last.
        lock: held while an operator runs.
        handle_type: of dispatch's handle.
        waits: those of its calls.
        failed: called when a run has failed, with operator, executable, what gives its report code or raises
            why there is none, and what holes held; raises.
    """

    owner: int
    rounds: ctypes.Structure
    last: dict[str, Executable]
    lock: threading.Lock
    handle_type: type
    waits: Waits
    failed: Callable[[Any, Executable, Callable[[], int], Bindings], None]


# Plans that have been prepared for calls, by the name of the operator.
PreparedCalls = dict[str, list[object]]


class Calls(Protocol):
    """Whole calls at less cost than Python's, where they are as usual."""

    def operator(self, program: CallProgram) -> Callable[..., Any]:
        """One operator.

        Returns:
            Called with its arguments, what the operator returns; or None where the call is anything but
            usual: nothing has happened then.
        """
        ...

    def add(self, plan: PlanProgram, executable: Executable) -> None:
        """From now on calls like this one need not go Python's way."""
        ...

    def exchange(self, prepared: PreparedCalls) -> PreparedCalls:
        """Other plans from now on; ``{}`` for none. Returns those until now."""
        ...


class Host(Protocol):
    """What calls ask of a back end before there is one: where tensors are, and what the host may read."""

    @property
    def device(self) -> torch.device:
        """Where tensors have to be."""
        ...

    def describe(self, *tensors: object) -> Hashable | None:
        """What tells the dtypes, sizes, contiguity and devices of a call's tensors from those of another.

        Args:
            tensors: each may be None.

        Returns:
            A key; None where one may be no plain tensor (`moe_triton.core.plain_tensors`).
        """
        ...

    def is_capturing(self) -> bool:
        """Whether what runs now goes into a graph instead."""
        ...

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's contents in memory of the host, which waits for them; not while `is_capturing`."""
        ...


class Backend(Protocol):
    """Chosen once, when a buffer is constructed."""

    name: str
    device: torch.device
    is_asynchronous: bool
    """Whether runs end later than the calls that start them."""
    captures_graphs: bool
    """Whether runs can be captured in a graph."""

    @property
    def waits(self) -> Waits:
        """Those of its runs: a back end serves one communicator."""
        ...

    def is_capturing(self) -> bool:
        """Whether what runs now goes into a graph instead."""
        ...

    def measure(self, on: bool) -> None:
        """Whether runs note how long each step took, where that costs something."""
        ...

    def window_limit(self) -> int | None:
        """Bytes that a data window may take where the user names no limit; None for any number."""
        ...

    def identity(self) -> dict[str, str]:
        """Versions and settings that must be the same on every rank."""
        ...

    def synchronize(self) -> None:
        """Waits until everything that was run has ended: a run may return before it has.

        What is read with torch's own operators is in order without it; the host's clock is not.
        """
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor on the device, from memory that is recycled."""
        ...

    def empty_all(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """`empty` for each, at less cost than one by one."""
        ...

    def make_window(self, num_bytes: int, meeting: Meeting) -> Window:
        """Makes this rank's window and maps every peer's."""
        ...

    def make_trace_log(self, max_events: int, last_entry: int) -> TraceLog:
        """Room for a trace.

        Args:
            max_events: that are kept.
            last_entry: where in ``recv_offsets`` the number of all rows stands.
        """
        ...

    def compile(
        self, plan: Plan, report: torch.Tensor, fixed: Bindings, log: TraceLog | None = None
    ) -> Executable:
        """Makes a plan ready to run.

        Args:
            plan: what to run.
            report: the tensor that its kernels report to, one run after the other.
            fixed: what some of its holes hold in every call.
            log: of `make_trace_log`, where its runs are to be traced.
        """
        ...

    def make_calls(self, setting: CallSetting) -> Calls | None:
        """A faster way for a buffer's usual calls, or None where this machine has none."""
        ...

    def num_blocks(self, num_ranks: int) -> int:
        """Blocks per kernel that suit this machine when ``num_ranks`` ranks share it."""
        ...

    def read_int32(self, tensor: torch.Tensor, index: int) -> int:
        """An element of a contiguous int32 tensor, as the host sees it. The index is within the tensor."""
        ...

    def take_ids(
        self, topk_idx: torch.Tensor, num_experts: int
    ) -> tuple[torch.Tensor, tuple[int, str] | None]:
        """A copy of contiguous ids, (T, K) int32 or int64, as int32, and what `first_bad_id` says of it.

        Ids that 32 bits cannot hold become others that are as bad.
        """
        ...

    def first_bad_id(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[int, str] | None:
        """Position in the flattened ids of the first one that breaks a rule, and which rule."""
        ...
