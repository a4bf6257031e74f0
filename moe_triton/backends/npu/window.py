"""Windows on the NPU: the common part, and the choice of the window library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from importlib import util
from pathlib import Path
from typing import Protocol

import torch

from moe_triton.backends.npu.runtime import Runtime
from moe_triton.core.errors import CommunicationTimeoutError, ConfigMismatchError, ToolchainError, WindowError
from moe_triton.core.reach import Queues
from moe_triton.core.soc import Soc
from moe_triton.layout import BLOCK_BYTES
from moe_triton.rendezvous.meeting import Meeting, values_of

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MEMFABRIC = "memfabric_hybrid"
CLOSE_SECONDS = 5.0  # that peers get to give their windows up before ours goes


class Memory(Protocol):
    """Memory of all ranks, each of which has addresses for it."""

    peers: tuple[int, ...]
    """Address of each rank's part as seen from here, by rank."""

    def free(self) -> None:
        """Gives this rank's part back."""


class NpuWindow:
    """This rank's window and its view of every peer's.

    Args:
        memory: of all ranks.
        num_bytes: the window's size.
        meeting: the group.
        runtime: torch_npu.
        queues: to peers whose memory vector cores do not write to; None for none.

    Attributes:
        peers: each rank's word in the table of peers: its address and, with queues, how it is reached.

    Raises:
        WindowError: a window does not begin where blocks with flags in band may.
        CommunicationTimeoutError: a rank did not come.
    """

    def __init__(
        self, memory: Memory, num_bytes: int, meeting: Meeting, runtime: Runtime, queues: Queues | None = None
    ) -> None:
        self._memory, self._meeting, self._runtime = memory, meeting, runtime
        places = memory.peers
        if crooked := [rank for rank, place in enumerate(places) if place % BLOCK_BYTES]:
            raise WindowError(
                f"The windows of rank(s) {crooked} begin at {[hex(places[rank]) for rank in crooked]}, "
                f"but a window must begin at a multiple of {BLOCK_BYTES} bytes: a flag and its data travel "
                "in one such block. The window library chose the addresses: report it with its version."
            )
        self.base, self.peers = places[meeting.rank], places
        if queues:
            self.peers = tuple(queues.word(meeting.rank, peer, at) for peer, at in enumerate(places))
        self._tensor = runtime.tensor_at(self.base, num_bytes)
        # Flags left in this memory by an earlier owner would be taken for new ones.
        self._tensor.zero_()
        runtime.synchronize()
        self.barrier()
        self._closed = False

    def tensor(self) -> torch.Tensor:
        """This rank's window as a flat uint8 tensor."""
        return self._tensor

    def view(self, rank: int) -> torch.Tensor:
        """A rank's window as a flat uint8 tensor of this device, which copies reach."""
        if rank == self._meeting.rank:
            return self._tensor
        return self._runtime.tensor_at(self._memory.peers[rank], self._tensor.numel())

    def barrier(self) -> None:
        """Waits for every rank of the group."""
        self._meeting.exchange({}, "barrier")

    def queued(self) -> dict[int, int]:
        """Nothing: what queues of the device hold is not seen by the host."""
        return {}

    def close(self) -> None:
        """Gives the memory back once no peer uses it any more, or after `CLOSE_SECONDS`."""
        if self._closed:
            return
        self._closed = True
        self._runtime.synchronize()
        # A peer that has died never comes: there is nothing to wait for then.
        with contextlib.suppress(CommunicationTimeoutError, ConfigMismatchError):
            self._meeting.exchange({}, "windows are given up", CLOSE_SECONDS)
        self._tensor = self._tensor[:0]
        self._memory.free()


def check_same_server(meeting: Meeting, soc: Soc, queues: Queues | None = None) -> None:
    """On A2, checks that ranks are on this server, except those that queues lead to.

    Vector cores do not reach the memory of another one.

    Raises:
        WindowError: they are not; it names the ranks that are elsewhere.
    """
    if soc.product != "A2":
        return
    boots = values_of(meeting.exchange({"boot": _boot_id()}, "which server"), "boot", str)
    queued = queues.peers if queues else frozenset[int]()
    others = [rank for rank, boot in enumerate(boots) if boot != boots[meeting.rank] and rank not in queued]
    if others:
        raise WindowError(
            f"rank(s) {others} are on another server than rank {meeting.rank}: on A2 a vector core writes to "
            "the memory of its own server only. Pass ranks_per_server, so that queues lead there; make one "
            "group per server; or use A3, where the whole super node is in reach."
        )


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def make_window(
    num_bytes: int, meeting: Meeting, runtime: Runtime, soc: Soc, queues: Queues | None = None
) -> NpuWindow:
    """A window from memfabric-hybrid, or from CANN SHMEM if that is missing; queues take memfabric-hybrid.

    Raises:
        ToolchainError: both are missing.
        WindowError: there is no memory for it, or a peer cannot be reached.
        CommunicationTimeoutError: a rank did not come.
    """
    kind = window_library()
    check_same_server(meeting, soc, queues)
    allocate: Callable[[int, Meeting, Runtime], Memory]
    if kind == MEMFABRIC:
        from moe_triton.backends.npu import memfabric

        allocate = partial(memfabric.allocate, posts=queues is not None)
    else:
        from moe_triton.backends.npu.shmem import allocate
    memory = allocate(num_bytes, meeting, runtime)
    try:
        return NpuWindow(memory, num_bytes, meeting, runtime, queues)
    except BaseException:
        memory.free()
        raise


def window_library() -> str:
    """The first installed window library.

    Raises:
        ToolchainError: none is.
    """
    for module in (MEMFABRIC, "shmem"):
        if util.find_spec(module) is not None:
            return module
    raise ToolchainError(
        "the npu back end needs memory that peers can address, and neither memfabric_hybrid nor shmem is "
        "installed: pip install memfabric-hybrid==1.3.0, or install CANN SHMEM."
    )
