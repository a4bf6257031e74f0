"""Kernels that run by themselves: no peer takes part in them, and no window."""

from __future__ import annotations

import torch

from moe_triton.backends.base import Backend, Bindings, Executable
from moe_triton.core.ascendc import REPORT_WORDS
from moe_triton.core.errors import BufferStateError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import Placeholder, Plan, launch


class LocalLaunches:
    """Launches of Triton kernels, each compiled when it is first needed. One thread at a time may use them.

    Args:
        backend: compiles and runs them.
        blocks: programs of each launch.
    """

    def __init__(self, backend: Backend, blocks: int) -> None:
        self._backend, self._blocks = backend, blocks
        # By identity: to hash a kernel takes longer than to run a small one. Factories keep what they make.
        self._compiled: dict[int, tuple[TritonKernel, Executable]] = {}

    def run(self, kernel: TritonKernel, arguments: Bindings) -> None:
        """Runs a kernel, or on an asynchronous back end starts it, on the current stream.

        Args:
            kernel: that reports nothing.
            arguments: a tensor or an integer for each of its arguments, by name; others are not looked at.

        Raises:
            BufferStateError: a graph is being captured, and the kernel has not run before.
            ToolchainError: it cannot be compiled.
        """
        known = self._compiled.get(id(kernel))
        if known is None:
            known = self._compiled[id(kernel)] = kernel, self._compile(kernel)
        known[1].run(arguments)

    def _compile(self, kernel: TritonKernel) -> Executable:
        if self._backend.is_capturing():
            raise BufferStateError(
                f"{kernel.name} of this kind has not run before, and nothing can be prepared inside a graph. "
                "Run the same calls once before the capture."
            )
        values = {arg.name: Placeholder(arg.name) for arg in kernel.args}
        step = launch(kernel.name, kernel, "compute", self._blocks, **values)
        report = torch.zeros(1, self._blocks, REPORT_WORDS, dtype=torch.int32, device=self._backend.device)
        return self._backend.compile(Plan(kernel.name, 0, (step,)), report, {})

    def clear(self) -> None:
        """Forgets them."""
        self._compiled.clear()
