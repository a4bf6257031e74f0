"""From a Triton function to MLIR on tensors: Triton's own front end, then the Ascend adapter."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

from moe_triton.backends.cpu.triton.ir import AS_READ
from moe_triton.backends.cpu.triton.toolchain import INSTALL, find_program, run_tool
from moe_triton.core.errors import ToolchainError
from moe_triton.core.installing import check_triton
from moe_triton.core.kernel import TritonKernel

# The architecture decides nothing before the adapter's output; it must be one that the front end knows.
_FRONTEND_ARCH = "Ascend910B3"

# Order and options as triton-ascend's ttir_to_linalg passes them.
_ADAPTER_PASSES = (
    "--discrete-mask-access-conversion=compile-on-910-95=False force-simt-template=False",
    "--triton-to-annotation",
    "--triton-to-unstructure=compile-on-910-95=False force-simt-template=False",
    "--triton-to-hivm",
    "--triton-to-hfusion",
    "--triton-to-llvm",
    "--bubble-up-operation",
)


# Triton's front end keeps global state, and so does ast.parse before Python 3.11.8: with two threads in it,
# one raises "AST constructor recursion depth mismatch" (CPython's issue 106905).
_one_thread = threading.Lock()


def source_key(kernel: TritonKernel) -> str | None:
    """Changes with the source of a kernel and of what it calls; None under TRITON_INTERPRET."""
    with _one_thread:
        return getattr(kernel.fn, "cache_key", None)  # parsed when first asked for


def triton_ir(kernel: TritonKernel) -> str:
    """Triton IR of a kernel, after the passes common to all of Triton's back ends."""
    check_triton()
    with _one_thread:
        return _triton_ir(kernel)


def _triton_ir(kernel: TritonKernel) -> str:
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import AscendBackend, make_ttir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.errors import CompilationError

    if not hasattr(kernel.fn, "cache_key"):
        raise ToolchainError("TRITON_INTERPRET is set, which replaces the compiler. Unset it.")
    backend = AscendBackend(GPUTarget("npu", _FRONTEND_ARCH, 0))
    options: Any = backend.parse_options({})
    source = ASTSource(kernel.fn, {arg.name: arg.type for arg in kernel.args}, dict(kernel.constants))
    context = ir.context()
    ir.load_dialects(context)
    try:
        module = source.make_ir(
            options, backend.get_codegen_implementation(), backend.get_module_map(), context
        )
        return str(make_ttir(module, {"hash": kernel.name}, options))
    except CompilationError as error:
        raise ToolchainError(f"Triton rejects kernel {kernel.name}: {error}") from error


def tensor_ir(kernel: TritonKernel, *, named_ops: bool) -> str:
    """Linalg on tensors, as the Ascend adapter makes it.

    Args:
        named_ops: keep named linalg operations, as the NPU compiler wants; otherwise in the generic form, as
            the CPU path reads it.
    """
    adapter = find_program("triton", "backends/ascend/triton-adapter-opt")
    if adapter is None:
        raise ToolchainError(f"triton-adapter-opt is missing: {INSTALL}")
    final = (
        f"--triton-to-linalg=global-kernel=false named-ops={named_ops} enable-nd2nz-on-vector=False "
        "enable-select-analysis=False compile-on-910-95=False"
    )
    with tempfile.TemporaryDirectory(prefix="moe_triton_") as folder:
        source = Path(folder) / "kernel.ttir.mlir"
        source.write_text(triton_ir(kernel))
        form = ["--mlir-print-unique-ssa-ids"] if named_ops else AS_READ
        return run_tool([adapter, source, *_ADAPTER_PASSES, final, *form])
