"""The NPU back end: torch_npu's streams, triton-ascend's kernels, Ascend C kernels through ctypes."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Mapping, Sequence

import torch

from moe_triton.backends.base import (
    Bindings,
    CallSetting,
    Executable,
    Recording,
    TensorSpec,
    TraceLog,
    Turn,
)
from moe_triton.backends.npu import library, toolchain
from moe_triton.backends.npu.capabilities import CAPABILITIES
from moe_triton.backends.npu.executable import NpuExecutable
from moe_triton.backends.npu.runtime import Runtime
from moe_triton.backends.npu.side_copies import NpuSideCopies
from moe_triton.backends.npu.window import MEMFABRIC, NpuWindow, make_window, window_library
from moe_triton.backends.waits import Waits
from moe_triton.core.ascendc import MAX_BLOCKS
from moe_triton.core.errors import ArgumentError, BufferStateError, ToolchainError, WindowError
from moe_triton.core.hccl import BUFFSIZE, MEGABYTE, buffer_megabytes
from moe_triton.core.installing import check_triton
from moe_triton.core.plan import Plan, device_launches, num_blocks
from moe_triton.core.reach import Queues
from moe_triton.core.soc import check_blocks, soc_of
from moe_triton.core.tuning import Tuning
from moe_triton.rendezvous.meeting import Meeting


class NpuBackend:
    """Runs plans on the device that is current in this process.

    Runs are asynchronous: a call launches and returns, and what a kernel reports is raised by a later call,
    or by `EPBuffer.synchronize`.

    Args:
        kernels: "triton".
        tuning: how operators are cut into parts, and how many blocks communicate; None for the defaults. Its
            settings for copying and waiting are the CPU's.

    Raises:
        ArgumentError: an unknown ``kernels``.
        ToolchainError: torch_npu, a window library, CANN or the built kernels are missing, or their versions
            do not fit; it says what to do.
    """

    name = CAPABILITIES.target
    capabilities = CAPABILITIES
    is_asynchronous = CAPABILITIES.is_asynchronous
    keeps_order = False  # RoCE orders messages; of the bytes of one, no page says anything

    def __init__(self, kernels: str = "triton", tuning: Tuning | None = None) -> None:
        if kernels != "triton":
            raise ArgumentError(
                "kernels", repr(kernels), "the npu back end has Triton kernels only", "Use 'triton'."
            )
        self.kernels = kernels
        self.tuning = tuning or Tuning()
        self.runtime = Runtime()
        self.device = self.runtime.device
        self._versions = toolchain.check_versions()
        self.soc = soc_of(self.runtime.soc_name())
        self._windows_by = window_library()
        check_triton()
        library.library()  # at construction rather than in the first dispatch
        # Launches with SyncAll whose blocks do not start together would wait for each other's cores.
        self.overlaps = library.blocks_start_together()
        self._communication = self.runtime.make_stream()
        self._executables: list[NpuExecutable] = []
        self._measures = False
        self.waits = Waits()

    def identity(self) -> dict[str, str]:
        """Names what must be the same on every rank: back end, processor, CANN version and window library."""
        versions = self._versions
        cann = versions.cann.version.text if versions.cann.version else ""
        return {"backend": self.name, "soc": self.soc.name, "cann": cann, "windows": self._windows_by}

    def is_capturing(self) -> bool:
        """Tells whether the current stream is being captured into a graph."""
        return self.runtime.is_capturing()

    def window_limit(self, environment: Mapping[str, str]) -> int | None:
        """HCCL_BUFFSIZE in bytes if it is set: the limit that torch_npu's users set for a group's window."""
        return buffer_megabytes(environment) * MEGABYTE if BUFFSIZE in environment else None

    def synchronize(self) -> None:
        """Waits until all streams of the device have ended their work."""
        self.runtime.synchronize()

    def measure(self, on: bool) -> None:
        """Turns the measuring of steps on or off, for plans that are compiled already and for later ones."""
        self._measures = on
        for executable in self._executables:
            executable.measure(on)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Makes an uninitialised tensor on the device, from the memory of torch's own allocator."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def empty_all(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Makes an uninitialised tensor on the device for each shape and dtype."""
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in specs]

    def close(self) -> None:
        """Nothing: memory of outputs is torch's."""

    def watch_signal(self, number: int, write_end: int) -> int:
        """By a handler of Python's, whose calls do not wait for the device."""
        if signal.getsignal(number) is not signal.SIG_DFL:
            return 1
        if threading.current_thread() is not threading.main_thread():
            return -1
        signal.signal(number, lambda *_: os.write(write_end, b"\1"))
        return 0

    def why_no_posts(self) -> str:
        """Says what is missing for posts by memfabric, and what to do; empty where kernels can post."""
        otherwise = "or make a group of each server's ranks."
        if self._windows_by != MEMFABRIC:
            return (
                "windows come from CANN SHMEM here, and posts are memfabric's RoCE writes, which know "
                f"windows of memfabric's only. Run: pip install memfabric-hybrid==1.3.0; {otherwise}"
            )
        if not library.has_posts():
            return (
                f"{library.LIBRARY} was built without posts, which are memfabric's RoCE writes (AICPU's "
                "BatchWrite needs HCCL's operator package, which kernels that are launched by themselves do "
                f"not have). Build it anew: moe-triton build --memfabric installed; {otherwise}"
            )
        return ""

    def make_window(
        self,
        num_bytes: int,
        meeting: Meeting,
        queues: Queues | None = None,
        log: TraceLog | None = None,
        private_bytes: int = 0,
        spare_bytes: int = 0,
    ) -> NpuWindow:
        """Makes a window that peers can write to. A device without memory says so itself, and kills nobody.

        Raises:
            ToolchainError: queues are needed, and kernels do not post.
            WindowError: there is no memory for it, or a peer cannot be reached.
        """
        if queues is not None and (why := self.why_no_posts()):
            raise ToolchainError(f"rank(s) {sorted(queues.peers)} are reached by queues, but {why}")
        return make_window(num_bytes, meeting, self.runtime, self.soc, queues)

    def make_side_window(
        self, num_bytes: int, meeting: Meeting, queues: Queues | None = None
    ) -> tuple[NpuWindow, None]:
        """Makes memory that kernels do not know.

        Raises:
            WindowError: there is none, a peer cannot be reached, or only a queue leads to one.
        """
        if queues is not None:
            raise WindowError(
                f"rank(s) {sorted(queues.peers)} are reached by queues, and memfabric posts from one window "
                "alone, that of the kernels. Make a buffer of each server's ranks for it."
            )
        return make_window(num_bytes, meeting, self.runtime, self.soc, None), None

    def make_side_copies(self) -> NpuSideCopies:
        """Makes a stream for copies beside the others."""
        return NpuSideCopies(self.runtime)

    def make_trace_log(self, max_events: int, last_entry: int) -> TraceLog:
        """Refused: a profiler sees more of an NPU than this package could.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            "trace", "a file", "traces are of the CPU back end", "Use torch_npu.profiler or msprof."
        )

    def compile(
        self,
        plan: Plan,
        report: torch.Tensor,
        fixed: Bindings,
        log: TraceLog | None = None,
        recording: Recording | None = None,
    ) -> Executable:
        """Checks that a plan's blocks fit the processor, and compiles it for one stream or two."""
        assert log is None
        for phases in device_launches(plan.launches):
            check_blocks(num_blocks(phases), self.soc)
        two_streams = plan.two_streams and self.overlaps
        of_plan = plan, fixed, self.runtime, self._communication, two_streams
        made = NpuExecutable(*of_plan, recording)
        made.measure(self._measures)
        self._executables.append(made)
        return made

    def make_calls(self, setting: CallSetting) -> None:
        """None: calls are asynchronous, and the host's caches stay warm between them."""

    def run_turns(self, turns: Sequence[Turn], rounds: ctypes.Structure) -> None:
        """None: the host is ahead of the device anyway."""

    def cores(self) -> int:
        """Vector cores of the device."""
        return self.soc.vector_cores

    def num_blocks(self, num_ranks: int) -> int:
        """One block per vector core: each rank has a device to itself."""
        return min(self.soc.vector_cores, MAX_BLOCKS)

    def read_int32(self, tensor: torch.Tensor, index: int) -> int:
        """Waits for the device. See `moe_triton.backends.base.Backend`."""
        return int(self.runtime.on_host(tensor.view(-1)[index : index + 1])[0])

    def take_ids(
        self, topk_idx: torch.Tensor, num_experts: int
    ) -> tuple[torch.Tensor, tuple[int, str] | None]:
        """A copy, unchecked: the host does not wait for ids, and kernels do not send invalid ones."""
        taken = self.empty(topk_idx.shape, torch.int32)
        self.runtime.copy(taken, topk_idx)
        return taken, None

    def fence(self) -> None:
        """Does nothing: the host writes to the device in streams."""

    def exchange_word(self, address: int, expected: int, desired: int) -> int:
        """Refuses: the memory is the device's."""
        rule = "hosts cannot agree on a call of this device that is under way"
        raise BufferStateError(f"{rule}. Mask between calls.")

    def digest_ids(self, topk_idx: torch.Tensor, mask: torch.Tensor | None) -> int | None:
        """None: see `take_ids`."""
        return None

    def first_bad_id(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[int, str] | None:
        """None: see `take_ids`."""
        return None
