"""What a back end offers: windows that peers can write to, and a way to run plans."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from moe_triton.backends.waits import Waits
from moe_triton.core.call_program import CallProgram, PlanProgram
from moe_triton.core.capabilities import Capabilities
from moe_triton.core.flight_memory import FlightMemory, Flown
from moe_triton.core.plan import Launch, Phases, Plan
from moe_triton.core.reach import Queues
from moe_triton.core.side_copies import SideCopies
from moe_triton.core.traffic import Traffic
from moe_triton.core.tuning import Tuning
from moe_triton.rendezvous.meeting import Meeting

Bindings = Mapping[str, torch.Tensor | int]
# Shape and dtype of a tensor to be made.
TensorSpec = tuple[tuple[int, ...], torch.dtype]


class Window(Protocol):
    """Memory of this rank that every peer can write to, and where the peers' windows are."""

    base: int
    """Address of this rank's window."""

    peers: tuple[int, ...]
    """A word for each rank (`moe_triton.core.reach`): the address of its window as seen from here, ``base``
    this rank's own, and bits that say how it is reached where queues lead to some.
    """

    def tensor(self) -> torch.Tensor:
        """This rank's window as a flat uint8 tensor."""

    def view(self, rank: int) -> torch.Tensor:
        """A rank's window as a flat uint8 tensor, where no queue leads to it."""

    def barrier(self) -> None:
        """Waits for every rank of the group."""

    def queued(self) -> dict[int, int]:
        """By rank, how many posts are not delivered; nothing where no queues lead there."""

    def close(self) -> None:
        """Gives the memory back. May be called twice."""


@runtime_checkable
class RenewedWindow(Protocol):
    """A window whose parts can have other memory, at the same addresses."""

    page_bytes: int
    """What begins and ends of parts have to be multiples of."""

    def is_mapped(self, rank: int) -> bool:
        """Whether a rank's window lies in this one's memory, and this one's in its."""

    @property
    def why_not_let_go(self) -> str:
        """Why it cannot `let_go` of ranks; "" if it can."""

    def let_go(self, rank: int) -> None:
        """Has a rank whose window is not mapped write nothing to this one's any more; it never comes back.

        Raises:
            WindowError: its connection cannot be closed.
        """

    def renew(self, number: int, at: int, num_bytes: int, keeps: bool) -> None:
        """Puts other memory in the place of a part of this rank's window: zeros, or what is there now.

        Args:
            number: of the part, which peers know it by.
            at: where it begins in the window.
            num_bytes: of it.
            keeps: whether its bytes stay.

        Raises:
            WindowError: there is no memory, or no address behind the window is free any more.
        """

    def follow(self, rank: int, number: int, at: int, num_bytes: int) -> None:
        """Maps what a peer has put in the place of a part of its window; nothing if it has not.

        Args:
            rank: whose window.
            number, at, num_bytes: as that rank has renewed it.

        Raises:
            WindowError: it cannot be mapped, or is no such memory.
        """

    def say_masked(self, ranks: Collection[int]) -> None:
        """Says in this rank's window whom this rank masks. From any thread; nothing once it is closed."""

    def masked_by(self, rank: int) -> frozenset[int]:
        """The ranks that a peer says it masks, behind all that has been read of it before."""


@runtime_checkable
class StandsIn(Protocol):
    """A back end by which this process runs launches of another rank of its server, which has ended."""

    def stand_in(self, window: Window, rank: int, queues: Queues) -> tuple[Backend, Window]:
        """What runs them, and where: that rank's window, which this process still has.

        Args:
            window: of this rank.
            rank: the other one.
            queues: of this rank.

        Raises:
            WindowError: there can be no thread.
        """


class HostPosts(Protocol):
    """Messages that the host posts to queues, out of a window that no kernel posts from."""

    def post(self, rank: int, local: int, remote: int, num_bytes: int) -> bool:
        """Posts a message, behind all that was posted to this rank; its bytes are read until it is delivered.

        Args:
            rank: whom to.
            local: where the bytes lie in this rank's window, behind what peers write.
            remote: where they go in that rank's window.
            num_bytes: of the message.

        Returns:
            Whether it is posted: the queue may be full.
        """

    def delivered(self, rank: int) -> int:
        """How many of the messages to a rank are there, in the order in which they were posted."""


class TraceEvent(NamedTuple):
    """Something that took time. Times are of CLOCK_MONOTONIC, the same for all ranks of a machine.

    Attributes:
        begin_ns: when it began.
        end_ns: when it ended.
        call: number of the call.
        launch: in which launch of the call's plan; -1 on the link, which carries what a call has posted.
        block: on which block; -1 on the link.
        kind: one of ``moe_triton.core.ascendc.TRACE_BLOCK`` and the like.
        peer: that a wait was for, as its kernel numbers peers: by rank, or by expert; the rank that the link
            carried a message to; else -1.
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
        number: index of the run among those of all plans, from 1.
        begin_ns: when it began.
        end_ns: when it ended.
        tokens: of the rank, or -1.
        rows: received (dispatch) or sent back (combine), or -1 if that is not known.
        failed: the launch that reported something or failed, or None.
        traffic: what it posted to queues, or None if its plan posts nothing.
    """

    plan: Plan
    number: int
    begin_ns: int
    end_ns: int
    tokens: int
    rows: int
    failed: Launch | None
    traffic: Traffic | None = None


class TraceLog(Protocol):
    """What the plans of one communicator did, in rings of memory that keep the newest."""

    def take(self) -> tuple[list[TracedCall], list[TraceEvent], int]:
        """Returns and forgets the calls with all of their events, and the number of dropped calls."""


class Executable(Protocol):
    """A plan compiled for one back end."""

    @property
    def plan(self) -> Plan:
        """What it runs."""

    @property
    def failed_launch(self) -> Launch | None:
        """The launch that reported something in the last failed run, or None."""

    @property
    def failed_report(self) -> torch.Tensor:
        """Its report, (blocks, words) int32 on the host."""

    def run(self, bindings: Bindings) -> int:
        """Runs every launch in order.

        Args:
            bindings: a tensor or an integer for each placeholder that is not fixed.

        Returns:
            0, or a report code (`moe_triton.core.ascendc`) of the first launch that reported one; later
            launches have then not run. Always 0 on an asynchronous back end: see `outcome`.
        """

    def outcome(self, wait: bool) -> int | None:
        """What the runs so far have reported, if `run` does not wait for them to end.

        Args:
            wait: wait for the runs to end, and check runs that were captured, too.

        Returns:
            0 or a report code, or None if the last run has not ended yet.
        """

    def durations_us(self) -> dict[str, float]:
        """Microseconds that each step of the last run took."""

    @property
    def ran(self) -> Sequence[Phases]:
        """Launches that have run, where `run` has returned `REPORT_MASKED`: ranks were masked meanwhile."""

    def resume(self, bindings: Bindings) -> int:
        """Runs the others; see `run`."""


class Recording(NamedTuple):
    """How the flight recorder has runs of a plan.

    Attributes:
        memory: of the recorder.
        flown: the plan.
        rounds: the record of the communicator's runs, whose ``counts`` number them.
        num_entries: of the sums of rows, by expert and rank.
    """

    memory: FlightMemory
    flown: Flown
    rounds: Any
    num_entries: int

    @property
    def next_number(self) -> int:
        """Which run of its operator the next one belongs to."""
        return int(self.rounds.counts[self.flown.operator])


class Turn(NamedTuple):
    """A run among several.

    Attributes:
        operator: number of its operator in the record of runs.
        executable: what runs.
        bindings: a tensor or an integer for each of its placeholders that is not fixed.
        begins: whether a run of the operator begins with it.
        ends: whether one is over with it.
    """

    operator: int
    executable: Executable
    bindings: Bindings
    begins: bool
    ends: bool


class CallSetting(NamedTuple):
    """State of a buffer that native calls share with the calls that Python runs.

    Attributes:
        owner: which buffer it is.
        rounds: the record of its `Rounds`.
        last: each operator's last executable.
        lock: held while an operator runs.
        handle_type: of dispatch's handle.
        waits: of its calls.
        failed: raises the error of a failed run. Called with the operator, the executable, a function that
            returns the report code or raises why there is none, and the contents of placeholders.
    """

    owner: int
    rounds: ctypes.Structure
    last: dict[str, Executable]
    lock: threading.Lock
    handle_type: type
    waits: Waits
    failed: Callable[[Any, Executable, Callable[[], int], Bindings, Bindings], bool]


# Plans prepared for native calls, by the name of the operator.
PreparedCalls = dict[str, list[object]]


class Calls(Protocol):
    """Native calls: they check, allocate and run the common calls of operators without Python."""

    def operator(self, program: CallProgram) -> Callable[..., Any]:
        """One operator.

        Returns:
            A function of the operator's arguments that returns its outputs, or None for a call that native
            code does not handle; nothing has happened then.
        """

    def add(self, plan: PlanProgram, *executables: Executable) -> None:
        """Registers a plan: from now on calls that need it take the native path.

        Args:
            plan: how calls run it.
            executables: itself, and those that it goes on with.
        """

    def remove(self, label: str) -> None:
        """Forgets a program and its plans, if there is one of this label."""

    def swap(self, prepared: PreparedCalls) -> PreparedCalls:
        """Replaces the registered plans, ``{}`` for none, and returns the previous ones."""


class Host(Protocol):
    """What calls need before there is a back end: where tensors are, and what the host may read."""

    is_asynchronous: bool
    """Tells whether runs end later than the calls that start them: the host reads no ids then."""
    posts_from_one: bool
    """Whether kernels post from one window of a process at a time."""

    @property
    def device(self) -> torch.device:
        """The device that tensors must be on."""

    def describe(self, *tensors: object) -> Hashable | None:
        """A key of the dtypes, sizes, contiguity and devices of a call's tensors.

        Args:
            tensors: each may be None.

        Returns:
            The key, or None if one of them may not be a plain tensor (`moe_triton.core.plain_tensors`).
        """

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's contents in host memory; waits for the device. Not allowed while `is_capturing`."""


class Backend(Protocol):
    """Chosen once, when a buffer is constructed."""

    name: str
    device: torch.device
    capabilities: Capabilities
    is_asynchronous: bool
    """Tells whether runs end later than the calls that start them: the host reads no ids then."""
    overlaps: bool
    """Whether launches can run beside each other."""
    keeps_order: bool
    """Whether a queue keeps the order of bytes inside a message; the same on every rank."""
    tuning: Tuning
    """What it was made with; construction fills in what tables say, before anything is compiled."""

    @property
    def waits(self) -> Waits:
        """The waits of its runs: a back end serves one communicator."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def measure(self, on: bool) -> None:
        """Whether runs measure each step, if that costs something."""

    def window_limit(self, environment: Mapping[str, str]) -> int | None:
        """The default limit of a data window in bytes, by HCCL's variables; None for none."""

    def identity(self) -> dict[str, str]:
        """Versions and settings that must be the same on every rank."""

    def synchronize(self) -> None:
        """Waits until all runs have ended: a run may return before it has ended.

        Reads through torch's own operators are ordered without it; timings on the host are not.
        """

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor on the device, from recycled memory."""

    def empty_all(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """`empty` for each, cheaper than one by one."""

    def close(self) -> None:
        """Gives back memory that is kept for more outputs; there will be none. May be called twice."""

    def watch_signal(self, number: int, write_end: int) -> int:
        """Has a byte written to a pipe whenever a signal comes, whatever the main thread does.

        Returns:
            0 from now on; 1: the signal has a handler already, or is ignored; -1: it cannot be taken.
        """

    def why_no_posts(self) -> str:
        """Why kernels cannot post to queues, and what to do; empty where they can."""

    def make_window(
        self,
        num_bytes: int,
        meeting: Meeting,
        queues: Queues | None = None,
        log: TraceLog | None = None,
        private_bytes: int = 0,
        spare_bytes: int = 0,
    ) -> Window:
        """Makes this rank's window and maps every peer's, or a queue to it.

        Args:
            num_bytes: of the window.
            meeting: of the ranks that reach it.
            queues: to peers that are not written to directly; None for none.
            log: of `make_trace_log`, to trace what an emulated link carries.
            private_bytes: that this rank's calls will take besides.
            spare_bytes: of other memory that parts of it may need one day, where they can have any
                (`RenewedWindow`).
        """

    def make_side_window(
        self, num_bytes: int, meeting: Meeting, queues: Queues | None = None
    ) -> tuple[Window, HostPosts | None]:
        """Makes memory that kernels do not know, and where queues are what posts from it.

        Args:
            num_bytes: of it.
            meeting: of the ranks that reach it.
            queues: to peers that are not written to directly; None for none.

        Raises:
            WindowError: there is no memory for it, or a peer cannot be reached.
        """

    def make_side_copies(self) -> SideCopies:
        """Makes what copies in memory of ranks beside their own work."""

    def make_trace_log(self, max_events: int, last_entry: int) -> TraceLog:
        """Allocates a trace log.

        Args:
            max_events: number of events that it keeps, and of messages on an emulated link.
            last_entry: index of the total number of rows in ``recv_offsets``.
        """

    def compile(
        self,
        plan: Plan,
        report: torch.Tensor,
        fixed: Bindings,
        log: TraceLog | None = None,
        recording: Recording | None = None,
    ) -> Executable:
        """Compiles a plan.

        Args:
            plan: what to run.
            report: the tensor that its kernels report to, shared by all plans.
            fixed: contents of the placeholders that are the same in every call.
            log: of `make_trace_log`, to trace its runs.
            recording: how the flight recorder has its runs; None for not at all.
        """

    def make_calls(self, setting: CallSetting) -> Calls | None:
        """The native calls of a buffer, or None if this machine has none."""

    def run_turns(
        self, turns: Sequence[Turn], rounds: ctypes.Structure
    ) -> tuple[int, Callable[[], int]] | None:
        """Runs one behind the other without Python in between, up to the first that is not good.

        Args:
            turns: one at least.
            rounds: the record of the operators' `Rounds`, which it keeps.

        Returns:
            The number of the last one that ran, and a function that returns its report code or raises why
            there is none. None where Python has to run each: nothing has happened then.
        """

    def cores(self) -> int:
        """Cores that the ranks of this machine share; where each has a device, those of its own."""

    def num_blocks(self, num_ranks: int) -> int:
        """Blocks per kernel that suit this machine when ``num_ranks`` ranks share it."""

    def read_int32(self, tensor: torch.Tensor, index: int) -> int:
        """An element of a contiguous int32 tensor, as the host sees it. The index is within the tensor."""

    def take_ids(
        self, topk_idx: torch.Tensor, num_experts: int
    ) -> tuple[torch.Tensor, tuple[int, str] | None]:
        """Copies contiguous ids, (T, K) int32 or int64, to int32; and returns `first_bad_id` of the copy.

        Ids that do not fit 32 bits become other invalid ids.
        """

    def fence(self) -> None:
        """Orders what this thread has written to memory that kernels read before what it writes next."""

    def exchange_word(self, address: int, expected: int, desired: int) -> int:
        """Replaces 64 bits that all ranks of the server see, if they are what was expected.

        Returns:
            What was there.

        Raises:
            BufferStateError: hosts do not reach such memory.
        """

    def digest_ids(self, topk_idx: torch.Tensor, mask: torch.Tensor | None) -> int | None:
        """What stands for the entries of ids that take part; None where the host does not read them.

        Args:
            topk_idx: (T, K) int32, contiguous. Those of -1 count as left out.
            mask: (T,) or (T, K) bool, contiguous; or None.
        """

    def first_bad_id(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[int, str] | None:
        """Index in the flattened ids of the first one that breaks a rule, and the rule."""
