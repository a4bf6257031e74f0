"""From a kernel to the NPU compiler's last module, on a machine without an NPU.

``bishengir-compile`` runs all of its own passes (HFusion, HIVM, memory planning, synchronisation) and only
then calls ``hivmc``, a program that comes with CANN. The module that it leaves just before that
is the criterion: it has the AI vector core's instruction stream with all UB offsets.

As a tree of operations the module is read in MLIR's generic form: ``bishengir-opt`` knows the compiler's own
dialects, and prints them so that every operation is spelled alike.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autotune.npu_compiler import cache
from autotune.npu_compiler.socs import Soc
from moe_triton.backends.cpu.triton.frontend import source_key, tensor_ir
from moe_triton.backends.cpu.triton.ir import AS_READ, Operation, read
from moe_triton.backends.cpu.triton.toolchain import (
    INSTALL,
    distribution_version,
    find_program,
    run_tool,
    versions,
)
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel

_MULTIBUFFER = "--enable-auto-multi-buffer=true"
OPTIONS = (
    _MULTIBUFFER,
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
    "--enable-memory-display",
)
MODULE, PLAN, LOG = "module.hivm.opt.mlir", "memory_info_aiv.json", "bishengir.log"
PRINTER = "bin/bishengir-opt"


@dataclass(frozen=True)
class Compiled:
    """The output of the compiler.

    Attributes:
        module: the final module, empty if the compiler failed before it.
        plan: the memory plan as JSON, empty if the compiler writes none (950).
        log: its messages.
    """

    module: str
    plan: str
    log: str


def npu_ir(kernel: TritonKernel) -> str:
    """A kernel as input of the NPU compiler: linalg on tensors, the same for every chip."""
    constants = sorted(kernel.constants.items(), key=str)
    key = ("ir", kernel.name, source_key(kernel), kernel.args, constants, versions())
    return str(cache.fetch(key, lambda: tensor_ir(kernel, named_ops=True).replace(', mix_mode = "aiv"', "")))


def compile_kernel(kernel: TritonKernel, soc: Soc) -> Compiled:
    """Compile a kernel with the NPU compiler, with the options that it is launched with.

    Raises:
        ToolchainError: Triton rejects it, or a tool is missing.
    """
    return compile_ir(npu_ir(kernel), compiled_for(kernel, soc))


def compiled_for(kernel: TritonKernel, soc: Soc) -> Soc:
    """A target with what a kernel asks of its compiler."""
    return soc if kernel.multibuffer else replace(soc, left_out=(*soc.left_out, _MULTIBUFFER))


def compile_ir(text: str, soc: Soc) -> Compiled:
    """Compile a kernel's IR with the NPU compiler, or read the result of an earlier run from disk."""
    return Compiled(**cache.fetch(("module", *content_of(text, soc)), lambda: asdict(_compile(text, soc))))


def content_of(text: str, soc: Soc) -> tuple[object, ...]:
    """Everything that determines the result of compiling a kernel's IR."""
    return text, soc.name, soc.compiler, soc.options, _options(soc), compiler_version()


def _options(soc: Soc) -> tuple[str, ...]:
    return tuple(option for option in OPTIONS if option not in soc.left_out)


@functools.cache
def compiler_version() -> str:
    """The version of the NPU compiler."""
    return distribution_version("ascendnpu-ir")


def _compile(text: str, soc: Soc) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="moe_triton_gate_") as name:
        folder = Path(name)
        compiled = run_compiler(text, soc, folder, soc.options)
        if not compiled.module and soc.options:
            # a single attempt does not log a reason; and several attempts may find a plan that fits
            compiled = run_compiler(text, soc, folder, ())
        return compiled


def run_compiler(text: str, soc: Soc, folder: Path, options: tuple[str, ...]) -> Compiled:
    """One run of the compiler in a folder, which keeps all of its files.

    Raises:
        ToolchainError: the compiler is missing.
    """
    compiler = find_program("ascendnpuir", soc.compiler)
    if compiler is None:
        raise ToolchainError(f"{Path(soc.compiler).name} is missing: {INSTALL}")
    source = folder / "kernel.mlir"
    source.write_text(text)
    command = [compiler, source, f"--target={soc.name}", *_options(soc), *options]
    command += [f"--save-temps={folder}", "-o", folder / "kernel"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=folder)
    files = (folder / MODULE, folder / PLAN)
    module, plan = (path.read_text() if path.is_file() else "" for path in files)
    return Compiled(module, plan, (done.stderr + done.stdout).replace(f"{folder}/", ""))


def reason_of(log: str) -> str:
    """Why a compiler failed: its last error, without the source location."""
    errors = re.findall(r"error: (.*)", log)
    specific = [error for error in errors if not error.startswith("Failed to run")]
    reasons = specific or errors or [line for line in log.splitlines() if line.strip()] or ["no message"]
    return str(reasons[-1]).split(" (possible reason")[0].strip()


def notes_of(log: str) -> tuple[str, ...]:
    """Options that the compiler switched off by itself to fit the unified buffer, in order."""
    return tuple(dict.fromkeys(re.findall(r"overflow detected; automatically set (\S+) to false", log)))


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
    entries = [function for function in module.walk("func.func") if "hacc.entry" in function.attributes]
    if len(entries) != 1:
        raise ToolchainError(f"the module of {name} has {len(entries)} entry functions, not one")
    return entries[0]
