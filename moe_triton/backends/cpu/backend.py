"""The CPU back end: ranks are processes, windows shared memory, kernels native code."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from moe_triton.backends.base import (
    Bindings,
    CallSetting,
    Executable,
    HostPosts,
    Recording,
    TensorSpec,
    TraceLog,
    Turn,
    Window,
)
from moe_triton.backends.cpu import native, nic, output_pool, paced_link, row_copies
from moe_triton.backends.cpu.calls import NativeCalls
from moe_triton.backends.cpu.capabilities import CAPABILITIES
from moe_triton.backends.cpu.executable import (
    CpuSettings,
    NativeExecutable,
    TorchExecutable,
    run_turns,
    settings_of,
)
from moe_triton.backends.cpu.extension import extension
from moe_triton.backends.cpu.output_pool import OutputPool
from moe_triton.backends.cpu.side_copies import CpuSideCopies
from moe_triton.backends.cpu.trace_log import NativeTraceLog
from moe_triton.backends.cpu.triton import cache
from moe_triton.backends.cpu.triton.toolchain import find_toolchain
from moe_triton.backends.cpu.waits import NativeWaits
from moe_triton.backends.cpu.window import QueuedWindow, SharedWindow, StandInWindow
from moe_triton.core.checks import CPU
from moe_triton.core.errors import ArgumentError
from moe_triton.core.plan import Plan
from moe_triton.core.reach import Queues, num_ranks_in
from moe_triton.core.tuning import Tuning, checked_tuning, usual_on_cpu
from moe_triton.rendezvous.meeting import Meeting

Kernels = Literal["triton", "torch"]
KERNELS: tuple[Kernels, ...] = ("triton", "torch")

_BAD_ID_RULES = {1: "range", 2: "duplicate"}


class CpuBackend:
    """Runs plans on the CPU.

    Args:
        kernels: ``"triton"`` compiles the Triton kernels to machine code; ``"torch"`` runs their torch
            fallbacks, for machines without the toolchain. The Ascend C kernels are native either way.
        tuning: how to copy and to wait; None for the defaults of machine and group.

    Raises:
        ArgumentError: an unknown ``kernels``.
        ToolchainError: the native library was not built, or ``"triton"`` lacks something; it says what to
            install.
    """

    name = CAPABILITIES.target
    capabilities = CAPABILITIES
    is_asynchronous = CAPABILITIES.is_asynchronous
    overlaps = True

    def __init__(self, kernels: str = "triton", tuning: Tuning | None = None) -> None:
        if kernels not in KERNELS:
            raise ArgumentError(
                "kernels", repr(kernels), f"it must be one of {list(KERNELS)}", "Use 'triton'."
            )
        self.kernels = kernels
        self.tuning = checked_tuning(tuning)
        self.device = CPU
        self._library = native.library()
        if kernels == "triton":
            # At construction rather than in the first dispatch.
            find_toolchain()
            cache.check_usable()
            extension()
        row_copies.chosen()
        self._outputs = OutputPool()
        self._link, self._device = paced_link.in_use(), nic.in_use()
        self._nic: nic.Nic | None = None
        self.keeps_order = self._device.keeps_order
        self.waits = NativeWaits()
        self._patience: tuple[float, str] | None = None
        self._num_beside: int | None = None  # ranks that share this machine's cores
        # Ids are nearly always valid, and then the rule is not read.
        self._unread_rule = ctypes.byref(ctypes.c_int32(0))

    def is_capturing(self) -> bool:
        """Returns False: there are no graphs on a CPU."""
        return False

    def measure(self, on: bool) -> None:
        """Nothing: every run measures, at no cost."""

    def window_limit(self, environment: Mapping[str, str]) -> int | None:
        """Returns None: on a CPU HCCL's variables give a window no default limit."""
        return None

    def identity(self) -> dict[str, str]:
        """Names what must be the same on every rank: back end, kind of kernels, machine and byte order."""
        return {
            "backend": self.name,
            "kernels": self.kernels,
            "machine": platform.machine(),
            "byteorder": sys.byteorder,
        }

    def synchronize(self) -> None:
        """Nothing to do: a run has ended when it returns."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Makes an uninitialised tensor from recycled memory."""
        return self._outputs.empty(shape, dtype)

    def empty_all(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Makes several uninitialised tensors from recycled memory, cheaper than one by one."""
        return self._outputs.empty_all(specs)

    def close(self) -> None:
        """Gives back the memory that is kept for more outputs; there will be none."""
        self._outputs.close()

    def watch_signal(self, number: int, write_end: int) -> int:
        """By a native handler, which Python need not get to."""
        outcome: int = self._library.moe_watch_signal(number, write_end)
        return outcome

    def why_no_posts(self) -> str:
        """Empty: a thread of the rank carries them out."""
        return ""

    def make_window(
        self,
        num_bytes: int,
        meeting: Meeting,
        queues: Queues | None = None,
        log: TraceLog | None = None,
        private_bytes: int = 0,
        spare_bytes: int = 0,
    ) -> SharedWindow:
        """Maps the windows of all ranks, files in shared memory; where there are queues it emulates a NIC."""
        # Who waits so long for a rank waits no longer for what that rank compiles.
        name = f"rank {meeting.rank} of {meeting.num_ranks}"
        self._patience = self._patience or (meeting.timeout_s, name)
        self._num_beside = self._num_beside or meeting.num_beside
        if queues is None:
            return SharedWindow(num_bytes, meeting, private_bytes, spare_bytes=spare_bytes)
        assert log is None or isinstance(log, NativeTraceLog)
        of_nic = queues, self._device, self._link, log
        window = QueuedWindow(num_bytes, meeting, private_bytes, *of_nic, spare_bytes=spare_bytes)
        self._nic = window.nic
        return window

    def stand_in(self, window: Window, rank: int, queues: Queues) -> tuple[CpuBackend, StandInWindow]:
        """See `moe_triton.backends.base.StandsIn`."""
        assert isinstance(window, SharedWindow)
        made = CpuBackend(self.kernels, self.tuning)
        made._patience, made._num_beside = self._patience, self._num_beside
        theirs = StandInWindow(window, rank, queues, self._device, self._link)
        made._nic = theirs.nic
        return made, theirs

    def make_side_window(
        self, num_bytes: int, meeting: Meeting, queues: Queues | None = None
    ) -> tuple[SharedWindow, HostPosts | None]:
        """Maps memory that kernels do not know; where there are queues it has an emulated NIC of its own."""
        if queues is None:
            return SharedWindow(num_bytes, meeting, has_pages=True), None
        device, link = self._device, self._link
        window = QueuedWindow(num_bytes, meeting, 0, queues, device, link, has_pages=True)
        return window, window

    def make_side_copies(self) -> CpuSideCopies:
        """Copies of the calling thread."""
        return CpuSideCopies()

    def make_trace_log(self, max_events: int, last_entry: int) -> NativeTraceLog:
        """Allocates the rings of memory that native code writes traces to."""
        return NativeTraceLog(max_events, last_entry)

    def compile(
        self,
        plan: Plan,
        report: torch.Tensor,
        fixed: Bindings,
        log: TraceLog | None = None,
        recording: Recording | None = None,
    ) -> Executable:
        """Compiles a plan to native code, or has it run with the torch fallbacks of its Triton kernels."""
        assert log is None or isinstance(log, NativeTraceLog)
        if self.kernels == "torch":
            return TorchExecutable(plan, report, fixed, self._settings(fixed), self.waits, log, recording)
        with cache.waiting(*(self._patience or (cache.LOCK_WAIT_S, ""))):
            return NativeExecutable(plan, report, fixed, self._settings(fixed), self.waits, log, recording)

    def _settings(self, fixed: Bindings) -> CpuSettings:
        peers = fixed.get("peers")
        num_ranks = self._num_beside or num_ranks_in(peers) if isinstance(peers, torch.Tensor) else 1
        # Inside a server nothing is paced where there are several.
        return settings_of(self.tuning, num_ranks, None if self._nic else self._link, self._nic)

    def make_calls(self, setting: CallSetting) -> NativeCalls | None:
        """Returns the buffer's native calls, or None without Triton kernels, extension or output pool."""
        # Native calls always take their outputs from the pool.
        module = extension() if self.kernels == "triton" and output_pool.ENABLED else None
        return NativeCalls(setting, self._outputs, module) if module else None

    def run_turns(
        self, turns: Sequence[Turn], rounds: ctypes.Structure
    ) -> tuple[int, Callable[[], int]] | None:
        """Runs one behind the other in one native call, where all are plans in native code."""
        return run_turns(turns, rounds)

    def num_blocks(self, num_ranks: int) -> int:
        """One block per core that this rank can have to itself, at least one."""
        return usual_on_cpu(num_ranks, self.cores())["num_blocks"]

    def cores(self) -> int:
        """Counts the cores that this process may run on, which the ranks of this machine share."""
        return len(os.sched_getaffinity(0))

    def read_int32(self, tensor: torch.Tensor, index: int) -> int:
        """Reads an element of a contiguous int32 tensor straight from its memory."""
        if not 0 <= index < tensor.numel():
            raise IndexError(f"{index} is outside a tensor of {tensor.numel()} elements")
        return ctypes.c_int32.from_address(tensor.data_ptr() + 4 * index).value

    def take_ids(
        self, topk_idx: torch.Tensor, num_experts: int
    ) -> tuple[torch.Tensor, tuple[int, str] | None]:
        """Copies ids to int32 in native code, and returns the copy, and its first bad id if there is one."""
        num_tokens, topk = topk_idx.shape
        taken = self._outputs.empty((num_tokens, topk), torch.int32)
        source, width = topk_idx.data_ptr(), topk_idx.dtype.itemsize
        good = self._library.moe_take_ids(
            source, width, taken.data_ptr(), num_tokens, topk, num_experts, None, 0, self._unread_rule
        )
        return taken, (None if good < 0 else self.first_bad_id(taken, num_experts))

    def fence(self) -> None:
        """Orders writes of this thread."""
        self._library.moe_fence()

    def exchange_word(self, address: int, expected: int, desired: int) -> int:
        """Replaces a word if it is what was expected, and returns what was there."""
        found: int = self._library.moe_exchange_word(address, expected, desired)
        return found

    def digest_ids(self, topk_idx: torch.Tensor, mask: torch.Tensor | None) -> int | None:
        """Computes what stands for the entries of ids that take part, in native code."""
        flags, per_flag = None, 1
        if mask is not None:
            flags, per_flag = mask.data_ptr(), topk_idx.shape[1] if mask.dim() == 1 else 1
        digest: int = self._library.moe_digest_ids(topk_idx.data_ptr(), topk_idx.numel(), flags, per_flag)
        return digest

    def first_bad_id(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[int, str] | None:
        """Returns the index of the first id that breaks a rule, and the rule; None if all ids are good."""
        num_tokens, topk = topk_idx.shape
        find, address = self._library.moe_first_bad_id, topk_idx.data_ptr()
        position: int = find(address, num_tokens, topk, num_experts, self._unread_rule)
        if position < 0:
            return None
        rule = ctypes.c_int32(0)
        find(address, num_tokens, topk, num_experts, ctypes.byref(rule))
        return position, _BAD_ID_RULES[rule.value]
