"""Triton kernels compiled for the NPU by triton-ascend, launched with addresses and numbers.

They are compiled ahead of time with ``triton.compile``, and launched as triton-ascend's own
``JITFunction.run`` does it (triton-ascend 3.2.0: ``runtime/jit.py``, ``backends/ascend/driver.py``), but
without the search for the right variant that ``kernel[grid](...)`` does in every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from moe_triton.core.errors import ToolchainError
from moe_triton.core.installing import check_triton, install
from moe_triton.core.kernel import TritonKernel

# (programs, handle of the stream, arguments: addresses and numbers)
TritonLauncher = Callable[[int, int, Sequence[int]], None]


@functools.cache
def launcher(kernel: TritonKernel) -> TritonLauncher:
    """Compiles a kernel for the current device.

    Raises:
        ToolchainError: triton-ascend is missing or not whole, or rejects the kernel.
    """
    compiled = _compile(kernel)
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(programs: int, stream: int, arguments: Sequence[int]) -> None:
        # Neither launch metadata nor hooks: those are for profilers that hook into Triton.
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return launch


def _compile(kernel: TritonKernel) -> Any:
    check_triton()
    try:
        import triton
        from triton.compiler import ASTSource
    except ImportError as error:
        raise ToolchainError(
            f"the npu back end needs triton-ascend, which cannot be imported ({error}). Run: {install('npu')}"
        ) from error
    source = ASTSource(kernel.fn, {arg.name: arg.type for arg in kernel.args}, dict(kernel.constants))
    try:
        compiled = triton.compile(source, options=None if kernel.multibuffer else {"multibuffer": False})
        compiled._init_handles()
    except Exception as error:  # the compiler's errors have no common class
        raise ToolchainError(f"triton-ascend cannot compile kernel {kernel.name}: {error}") from error
    return compiled
