"""The compiler's last module as a tree of operations.

``bishengir-opt`` knows the compiler's own dialects and prints them in MLIR's generic form, in which every
operation is spelled alike.
"""

from __future__ import annotations

from autotune.npu_compiler import cache
from autotune.npu_compiler.compile import compile_kernel, compiler_version, reason_of
from autotune.npu_compiler.socs import Soc
from moe_triton.backends.cpu.triton.ir import AS_READ, Operation, read
from moe_triton.backends.cpu.triton.toolchain import INSTALL, find_program, run_tool
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel

PRINTER = "bin/bishengir-opt"


def kernel_function(kernel: TritonKernel, soc: Soc) -> Operation:
    """The function that the NPU would run, from the compiler's last module for this kernel.

    Args:
        kernel: built for the NPU.
        soc: that it is compiled for; no outlook, whose modules are of other dialects.

    Raises:
        ToolchainError: Triton or the compiler rejects it, a tool is missing, or the module has no such
            function.
    """
    if soc.is_outlook:
        raise ToolchainError(f"modules for {soc.name} are of dialects that are not read here")
    compiled = compile_kernel(kernel, soc)
    if not compiled.module:
        raise ToolchainError(
            f"the NPU compiler rejects {kernel.name} for {soc.name}: {reason_of(compiled.log)}"
        )
    return entry_of(read(generic_form(compiled.module)), kernel.name)


def generic_form(module: str) -> str:
    """A module in the generic form, printed now or in an earlier run."""
    return str(cache.fetch(("generic", module, AS_READ, compiler_version()), lambda: _printed(module)))


def _printed(module: str) -> str:
    printer = find_program("ascendnpuir", PRINTER)
    if printer is None:
        raise ToolchainError(f"{PRINTER} is missing: {INSTALL}")
    return run_tool((printer, *AS_READ), module)


def entry_of(module: Operation, name: str) -> Operation:
    """The function of a module that a launch calls.

    Args:
        name: of the kernel, for the error.

    Raises:
        ToolchainError: it has none, or several.
    """
    found = [function for function in module.walk("func.func") if "hacc.entry" in function.attributes]
    if len(found) != 1:
        raise ToolchainError(f"the module of {name} has {len(found)} entry functions, not one")
    return found[0]
