"""From LLVM-dialect text to a shared library, with the LLVM inside libtriton and the system linker."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

from moe_triton.backends.cpu.triton.targets import Target
from moe_triton.backends.cpu.triton.toolchain import find_toolchain, run_tool
from moe_triton.core.errors import ToolchainError

# What LLVM makes of copies and fills. Anything else would be an operation without native code, such as
# a soft-float helper, found here rather than as an unresolved symbol at the first call.
_ALLOWED_EXTERNALS = frozenset({"memcpy", "memmove", "memset"})


def compile_object(text: str, target: Target) -> bytes:
    """Relocatable object code for a level of this machine, without contraction or other fast-math freedom."""
    from triton._C.libtriton import ir, llvm

    with tempfile.TemporaryDirectory(prefix="moe_triton_") as folder:
        source = Path(folder) / "kernel.llvm.mlir"
        source.write_text(text)
        context = ir.context()
        ir.load_dialects(context)
        module = ir.parse_mlir_module(str(source), context)
    module.context = context
    llvm.init_targets()
    llvm_context = llvm.context()
    llvm_module = llvm.to_module(module, llvm_context)
    triple, processor = target.triple, (target.processor, target.features)
    llvm.attach_datalayout(llvm_module, triple, *processor)
    llvm.optimize_module(llvm_module, llvm.OPTIMIZE_O3, *processor, [], False)
    code = llvm.translate_to_asm(str(llvm_module), triple, *processor, [], False, True)
    assert isinstance(code, bytes)
    return code


def link(code: bytes) -> bytes:
    """A shared library of one object."""
    if foreign := undefined_symbols(code) - _ALLOWED_EXTERNALS:
        raise ToolchainError(f"generated code calls {', '.join(sorted(foreign))}, which nothing provides")
    with tempfile.TemporaryDirectory(prefix="moe_triton_") as folder:
        source, target = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        source.write_bytes(code)
        linker = find_toolchain().linker
        command: list[str | Path] = [*linker, "-shared", "-o", target, source]
        if not linker[0].endswith(("cc", "clang")):
            command += ["-z", "noexecstack", "-z", "now"]
        run_tool(command)
        return target.read_bytes()


def undefined_symbols(code: bytes) -> set[str]:
    """Names that an ELF64 object expects from elsewhere."""
    (sections_at,) = struct.unpack_from("<Q", code, 0x28)
    entry_size, count = struct.unpack_from("<HH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, sections_at + i * entry_size) for i in range(count)]
    names: set[str] = set()
    for _, kind, _, _, at, size, strings, _, _, stride in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        strings_at = sections[strings][4]
        for symbol in range(at + stride, at + size, stride):  # the first symbol is the null symbol
            name, _, _, section = struct.unpack_from("<IBBH", code, symbol)
            if section == 0:  # SHN_UNDEF
                start = strings_at + name
                names.add(code[start : code.index(b"\0", start)].decode())
    return names
