"""Edits in the LLVM dialect: what its code generator is to know, and the entry that is called."""

from __future__ import annotations

import re
from collections.abc import Sequence

ENTRY_SYMBOL = "moe_triton_entry"

_PROGRAM_WORDS = 6  # programs x, y, z and program ids x, y, z, appended by the Triton adapter
_HIDDEN_POINTERS = 2  # lock and workspace, put first by the Triton adapter


def widen_fp16_loops(text: str) -> str:
    """Ask for 16 lanes in loops that convert fp16.

    LLVM's cost table charges a conversion of 16 lanes as if it were taken apart, and settles for 4 lanes,
    although F16C and AVX-512 convert 8 and 16 in one instruction.
    """
    annotation = "{loop_annotation = #llvm.loop_annotation<vectorize = <disable = false, width = 16 : i32>>}"
    seen: set[str] = set()
    converts = False
    lines = text.splitlines(keepends=True)
    for i, line in enumerate(lines):
        if label := re.match(r" *(\^bb\d+)", line):
            seen.add(label[1])
            converts = False
        elif re.search(r"llvm\.(fpext .* : f16 to f32|fptrunc .* : f32 to f16)", line):
            converts = True
        elif (jump := re.match(r" *llvm\.br (\^bb\d+).*[^}]$", line)) and converts and jump[1] in seen:
            lines[i] = f"{line.rstrip()} {annotation}\n"
    return "".join(lines)


def prefer_wide_vectors(text: str) -> str:
    """Ask for 512-bit vectors: LLVM's default for x86-64-v4 is 256 bits, half the lanes of these loops."""
    attribute = 'passthrough = [["prefer-vector-width", "512"]]'

    def replace(match: re.Match[str]) -> str:
        if match["given"]:
            return f"{match['head']} attributes {{{attribute}, "
        return f"{match['head']} attributes {{{attribute}}} {{"

    return re.sub(
        r"^(?P<head>\s*llvm\.func @\w+\(.*\))(?P<given> attributes \{)?(?(given)| \{)",
        replace,
        text,
        flags=re.M,
    )


def set_target_triple(text: str, triple: str) -> str:
    """Name the target: LLVM's data layout is looked up by it, and crashes without it."""
    return re.sub(
        r"^module( attributes \{)?",
        lambda m: f'module attributes {{llvm.target_triple = "{triple}"' + (", " if m[1] else "} "),
        text,
        count=1,
        flags=re.M,
    ).replace("}  {", "} {", 1)


def mark_noalias(text: str, kernel: str) -> str:
    """State that no two pointer arguments overlap; ``--convert-func-to-llvm`` drops such attributes.

    Without it every vector loop carries run-time overlap checks, or is not vectorised at all.
    """
    head = re.compile(rf"^(\s*llvm\.func @{kernel}\()(.*?)(\)(?: attributes| \{{|\s*->))", flags=re.M)
    return head.sub(lambda m: m[1] + m[2].replace(": !llvm.ptr", ": !llvm.ptr {llvm.noalias}") + m[3], text)


def append_packed_entry(text: str, kernel: str, types: Sequence[str]) -> str:
    """Add ``void entry(const uint64_t* words, int32_t programs, int32_t program)``, which calls the kernel.

    One signature for every kernel lets a native runner walk a plan. Written in the IR so that LLVM
    inlines the kernel into it and drops the memref descriptors' unused parts.

    Args:
        types: of the run-time arguments, in Triton's spelling.
    """
    lines = [
        f"  llvm.func @{ENTRY_SYMBOL}(%words: !llvm.ptr, %programs: i32, %program: i32) {{",
        "    %null = llvm.mlir.zero : !llvm.ptr",
        "    %zero = llvm.mlir.constant(0 : i64) : i64",
        "    %one = llvm.mlir.constant(1 : i64) : i64",
        "    %one_program = llvm.mlir.constant(1 : i32) : i32",
        "    %first_program = llvm.mlir.constant(0 : i32) : i32",
    ]
    memref = ("!llvm.ptr", "!llvm.ptr", "i64", "i64", "i64")
    arguments: list[tuple[str, str]] = []
    for _ in range(_HIDDEN_POINTERS):
        arguments += zip(("%null", "%null", "%zero", "%zero", "%one"), memref, strict=True)
    for i, type_ in enumerate(types):
        load = "!llvm.ptr" if type_.startswith("*") else type_
        lines.append(f"    %address{i} = llvm.getelementptr %words[{i}] : (!llvm.ptr) -> !llvm.ptr, i64")
        lines.append(f"    %word{i} = llvm.load %address{i} : !llvm.ptr -> {load}")
        if type_.startswith("*"):
            arguments += zip((f"%word{i}", f"%word{i}", "%zero", "%zero", "%one"), memref, strict=True)
        else:
            arguments.append((f"%word{i}", type_))
    program = ("%programs", "%one_program", "%one_program", "%program", "%first_program", "%first_program")
    assert len(program) == _PROGRAM_WORDS
    arguments += [(name, "i32") for name in program]
    names = ", ".join(name for name, _ in arguments)
    signature = ", ".join(type_ for _, type_ in arguments)
    lines += [f"    llvm.call @{kernel}({names}) : ({signature}) -> ()", "    llvm.return", "  }"]
    end = text.rstrip().rindex("}")
    return text[:end] + "\n".join(lines) + "\n}\n"
