from __future__ import annotations

import subprocess
import sys

import pytest

from moe_triton.backends.cpu.triton import ir, lowering
from moe_triton.core.errors import ToolchainError
from moe_triton.kernels.route import route_kernel
from tests.backends.ir_text import function, module


def test_an_operation_outside_the_llvm_dialect_is_refused() -> None:
    text = (
        '"builtin.module"() ({\n  "llvm.func"() ({\n    %0:2 = "hivm.hir.sync_block"() : () -> (i32, i32)\n'
        '    "llvm.return"() : () -> ()\n  }) : () -> ()\n}) : () -> ()\n'
    )
    with pytest.raises(ToolchainError, match=r"hivm\.hir\.sync_block"):
        lowering._check_dialect(ir.read(text), route_kernel())
    lowering._check_dialect(ir.read(text.replace("hivm.hir", "llvm.x")), route_kernel())


def test_a_buffer_that_nothing_frees_is_refused() -> None:
    with pytest.raises(ToolchainError, match="never freed"):
        lowering._check_buffers(
            module(function("", "%alloc = memref.alloc() : memref<4xi8>")), route_kernel()
        )


def test_a_stack_buffer_inside_a_loop_is_refused() -> None:
    buffer = "%alloca = memref.alloca() : memref<4xi8>"
    lowering._check_buffers(module(function("", buffer)), route_kernel())
    in_a_loop = f"scf.for %i = %arg0 to %arg0 step %arg0 {{\n  {buffer}\n}}"
    with pytest.raises(ToolchainError, match="inside a loop"):
        lowering._check_buffers(module(function("%arg0: index", in_a_loop)), route_kernel())


def test_a_copy_to_a_view_stays_where_its_buffer_is_read_by_another_name() -> None:
    """As of a masked load whose tile is stored, masked, and used: bishengir-opt for aarch64 takes it away."""
    part = "memref<16xi32, strided<[1]>>"
    body = f"""
        %buffer = memref.alloc() : memref<32xi32>
        %part = memref.subview %buffer[0][16][1] : memref<32xi32> to {part}
        memref.copy %from, %part : memref<16xi32> to {part}
        memref.copy %part, %to : {part} to memref<16xi32>
        memref.copy %buffer, %all : memref<32xi32> to memref<32xi32>
    """
    arguments = "%from: memref<16xi32>, %to: memref<16xi32>, %all: memref<32xi32>"
    left = lowering._run((lowering._CANONICALIZE,), module(function(arguments, body)))
    (buffer,), (part,) = left.walk("memref.alloc"), left.walk("memref.subview")
    copies = [copy.operands for copy in left.walk("memref.copy")]
    assert [copy[1] == part.result for copy in copies] == [True, False, False]
    assert [copy[0] for copy in copies[1:]] == [part.result, buffer.result]


def test_the_interpreter_is_no_compiler(tmp_path: str) -> None:
    program = (
        "from moe_triton.backends.cpu.triton import load\n"
        "from moe_triton.kernels.route import route_kernel\n"
        "load(route_kernel())\n"
    )
    environment = {"TRITON_INTERPRET": "1", "MOE_TRITON_CACHE": f"{tmp_path}/cache", "PATH": "/usr/bin:/bin"}
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert "ToolchainError: TRITON_INTERPRET is set" in child.stderr
