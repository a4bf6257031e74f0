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


def test_the_interpreter_is_no_compiler(tmp_path: str) -> None:
    program = (
        "from moe_triton.backends.cpu.triton import load\n"
        "from moe_triton.kernels.route import route_kernel\n"
        "load(route_kernel())\n"
    )
    environment = {"TRITON_INTERPRET": "1", "MOE_TRITON_CACHE": f"{tmp_path}/cache", "PATH": "/usr/bin:/bin"}
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert "ToolchainError: TRITON_INTERPRET is set" in child.stderr
