"""Edits in the LLVM dialect: what each changes, what it must leave alone, and that the result parses."""

from __future__ import annotations

import re
from functools import partial

import pytest

from moe_triton.backends.cpu.triton import ir
from moe_triton.backends.cpu.triton import rewrite_llvm as rewrites
from tests.backends.ir_text import is_left, opt, rewritten

LLVM_FUNCTION = (
    "module {\n"
    "  llvm.func @f(%arg0: !llvm.ptr, %arg1: !llvm.ptr, %arg2: i64) attributes {a = 0 : i64} {\n"
    "    llvm.return\n  }\n}\n"
)


def test_mark_noalias_marks_every_pointer_of_the_kernel() -> None:
    assert rewritten(rewrites.mark_noalias, LLVM_FUNCTION).count("!llvm.ptr {llvm.noalias}") == 2


def test_set_target_triple_with_and_without_attributes() -> None:
    for head in ("module {", "module attributes {a.b = 1 : i64} {"):
        text = LLVM_FUNCTION.replace("module {", head)
        tree = ir.read(opt(text, "--mlir-print-op-generic", "--allow-unregistered-dialect"))
        rewrites.set_target_triple(tree, "x86_64-unknown-linux-gnu")
        text = opt(str(tree), "--allow-unregistered-dialect")
        assert 'llvm.target_triple = "x86_64-unknown-linux-gnu"' in text
        assert ("a.b = 1 : i64" in text) == ("a.b" in head)


def test_prefer_wide_vectors_marks_every_function() -> None:
    text = LLVM_FUNCTION.replace("}\n}\n", "}\n  llvm.func @g(%arg0: i64) {\n    llvm.return\n  }\n}\n")
    assert rewritten(rewrites.prefer_wide_vectors, text, 512).count('"prefer-vector-width", "512"') == 2
    assert is_left(partial(rewrites.prefer_wide_vectors, bits=0), text)


def test_append_packed_entry_loads_each_argument_from_its_word() -> None:
    kernel = "".join(
        f"%arg{i}: {t}, " for i, t in enumerate(["!llvm.ptr", "!llvm.ptr", "i64", "i64", "i64"] * 3)
    )
    programs = ", ".join(f"%p{i}: i32" for i in range(6))
    text = f"module {{\n  llvm.func @f({kernel}%s: i64, {programs}) {{\n    llvm.return\n  }}\n}}\n"
    text = rewritten(rewrites.append_packed_entry, text, "f", ["*fp32", "i64"])
    arguments = r"%arg\d+: !llvm\.ptr, %arg\d+: i32, %arg\d+: i32"
    assert re.search(rf"llvm\.func @{rewrites.ENTRY_SYMBOL}\({arguments}\)", text)
    assert text.count("llvm.load") == 2


def _loop(conversion: str) -> str:
    return (
        "module {\n"
        "  llvm.func @f(%arg0: !llvm.ptr, %arg1: i64, %arg2: f16, %arg3: f32) {\n"
        "    %0 = llvm.mlir.constant(0 : i64) : i64\n"
        "    llvm.br ^bb1(%0 : i64)\n"
        "  ^bb1(%1: i64):  // 2 preds: ^bb0, ^bb2\n"
        '    %2 = llvm.icmp "slt" %1, %arg1 : i64\n'
        "    llvm.cond_br %2, ^bb2, ^bb3\n"
        "  ^bb2:  // pred: ^bb1\n"
        f"    {conversion}\n"
        "    %4 = llvm.add %1, %1 : i64\n"
        "    llvm.br ^bb1(%4 : i64)\n"
        "  ^bb3:  // pred: ^bb1\n"
        "    llvm.return\n  }\n}\n"
    )


@pytest.mark.parametrize(
    "conversion", ["%3 = llvm.fpext %arg2 : f16 to f32", "%3 = llvm.fptrunc %arg3 : f32 to f16"]
)
def test_widen_fp16_loops(conversion: str) -> None:
    text = rewritten(rewrites.widen_fp16_loops, _loop(conversion), 16)
    assert is_left(partial(rewrites.widen_fp16_loops, lanes=0), _loop(conversion))
    assert text.count("width = 16") == 1
    assert re.search(r"llvm\.br \^bb1\(%\d+ : i64\) \{loop_annotation", text)


def test_widen_fp16_loops_leaves_other_loops() -> None:
    text = _loop("%3 = llvm.fadd %arg3, %arg3 : f32")
    assert is_left(partial(rewrites.widen_fp16_loops, lanes=16), text)
