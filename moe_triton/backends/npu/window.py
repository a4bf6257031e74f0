"""Windows on the NPU: the common part, and the choice of the window library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Protocol

import torch

from moe_triton.backends.npu.runtime import Runtime
from moe_triton.core.errors import (
    CommunicationTimeoutError,
    ConfigMismatchError,
    ToolchainError,
    WindowError,
)
from moe_triton.core.soc import Soc
from moe_triton.layout import BLOCK_BYTES
from moe_triton.rendezvous.meeting import Meeting, values_of

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CLOSE_SECONDS = 5.0  # that peers get to give their windows up before ours goes


class Memory(Protocol):
    """Memory of all ranks that each of them can address."""

    peers: tuple[int, ...]
    """Address of each rank's part as seen from here, by rank."""

    def free(self) -> None:
        """Gives this rank's part back."""
        ...


class NpuWindow:
    """This rank's window and its view of every peer's.

    Args:
        memory: of all ranks.
        num_bytes: the window's size.
        meeting: the group.
        runtime: torch_npu.

    Raises:
        WindowError: a window does not begin where blocks with flags in band may.
        CommunicationTimeoutError: a rank did not come.
    """

    def __init__(self, memory: Memory, num_bytes: int, meeting: Meeting, runtime: Runtime) -> None:
        self._memory, self._meeting, self._runtime = memory, meeting, runtime
        self.peers = memory.peers
        if crooked := [rank for rank, peer in enumerate(self.peers) if peer % BLOCK_BYTES]:
            raise WindowError(
                f"The windows of rank(s) {crooked} begin at {[hex(self.peers[rank]) for rank in crooked]}, "
                f"but a window must begin at a multiple of {BLOCK_BYTES} bytes: a flag and its data travel "
                "in one such block. The window library chose the addresses: report it with its version."
            )
        self.base = self.peers[meeting.rank]
        self._tensor = runtime.tensor_at(self.base, num_bytes)
        # Flags left in this memory by an earlier owner would be taken for new ones.
        self._tensor.zero_()
        runtime.synchronize()
        self.barrier()
        self._closed = False

    def tensor(self) -> torch.Tensor:
        """This rank's window as a flat uint8 tensor."""
        return self._tensor

    def barrier(self) -> None:
        """Waits for every rank of the group."""
        self._meeting.exchange({}, "barrier")

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


def check_same_server(meeting: Meeting, soc: Soc) -> None:
    """On A2, checks that all ranks are on one server: vector cores do not reach another one's memory.

    Raises:
        WindowError: they are not; it names the ranks that are elsewhere.
    """
    if soc.product != "A2":
        return
    boots = values_of(meeting.exchange({"boot": _boot_id()}, "which server"), "boot", str)
    others = [rank for rank, boot in enumerate(boots) if boot != boots[meeting.rank]]
    if others:
        raise WindowError(
            f"rank(s) {others} are on another server than rank {meeting.rank}: on A2 a vector core writes to "
            f"the memory of its own server only. Make one group per server, or use A3, where the whole super "
            f"node is in reach."
        )


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def make_window(num_bytes: int, meeting: Meeting, runtime: Runtime, soc: Soc) -> NpuWindow:
    """A window from memfabric-hybrid, or from CANN SHMEM if that is missing.

    Raises:
        ToolchainError: both are missing.
        WindowError: there is no memory for it, or a peer cannot be reached.
        CommunicationTimeoutError: a rank did not come.
    """
    kind = window_library()
    check_same_server(meeting, soc)
    allocate: Callable[[int, Meeting, Runtime], Memory]
    if kind == "memfabric_hybrid":
        from moe_triton.backends.npu.memfabric import allocate
    else:
        from moe_triton.backends.npu.shmem import allocate
    memory = allocate(num_bytes, meeting, runtime)
    try:
        return NpuWindow(memory, num_bytes, meeting, runtime)
    except BaseException:
        memory.free()
        raise


def window_library() -> str:
    """The first installed window library.

    Raises:
        ToolchainError: none is.
    """
    for module in ("memfabric_hybrid", "shmem"):
        if util.find_spec(module) is not None:
            return module
    raise ToolchainError(
        "the npu back end needs memory that peers can address, and neither memfabric_hybrid nor shmem is "
        "installed: pip install memfabric-hybrid==1.3.0, or install CANN SHMEM."
    )
