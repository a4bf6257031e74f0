"""Edits that ask for memory ahead: where they apply, what they leave alone, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch

from moe_triton.backends.cpu.triton import ir, launch
from moe_triton.backends.cpu.triton import launch_fallback as fallback
from moe_triton.backends.cpu.triton.codegen import compile_object
from moe_triton.backends.cpu.triton.frontend import tensor_ir
from moe_triton.backends.cpu.triton.lowering import lower
from moe_triton.backends.cpu.triton.rewrite_ahead import (
    AHEAD_BYTES,
    COPY_SYMBOL,
    LINE_BYTES,
    PIECE_BYTES,
    STRIP_ITERATIONS,
    copy_ahead,
    read_ahead,
)
from moe_triton.backends.cpu.triton.rewrite_llvm import set_target_triple
from moe_triton.backends.cpu.triton.toolchain import TARGET_TRIPLE, cpu_level
from moe_triton.kernels.arrange import arrange_kernel
from moe_triton.kernels.weighted_sum import weighted_sum_kernel
from moe_triton.layout import SlotLayout
from tests.backends.ir_text import is_left, module
from tests.kernels.calls import arrange, weighted_sum
from tests.kernels.routes import DTYPES, assert_same_bits

PREFETCH = "llvm.intr.prefetch"
ITERATIONS = 1024

FUNCTION = """module {{
  llvm.func @f(%arg0: !llvm.ptr, %arg1: !llvm.ptr, %arg2: i64) {{
    %0 = llvm.mlir.constant({start} : index) : i64
    %1 = llvm.mlir.constant(1 : index) : i64
    %2 = llvm.mlir.constant({stop} : index) : i64
    %3 = llvm.mlir.constant(1 : i32) : i32
    %4 = llvm.alloca %3 x !llvm.array<4096 x i16> : (i32) -> !llvm.ptr
    llvm.br ^bb1(%0 : i64)
  ^bb1(%5: i64):  // 2 preds: ^bb0, ^bb2
    %6 = llvm.icmp "slt" %5, %2 : i64
    llvm.cond_br %6, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %7 = llvm.getelementptr {base} : (!llvm.ptr, i64) -> !llvm.ptr, i16
    %8 = llvm.getelementptr %7[{index}] : (!llvm.ptr, i64) -> !llvm.ptr, i16
    %9 = llvm.load %8 : !llvm.ptr -> i16
    %10 = llvm.getelementptr %4[%5] : (!llvm.ptr, i64) -> !llvm.ptr, i16
    llvm.store %9, %10 : i16, !llvm.ptr
    %11 = llvm.add %5, %1 : i64
    llvm.br ^bb1(%11 : i64)
  ^bb3:  // pred: ^bb1
    llvm.return
  }}
}}
"""


def compiles(tree: ir.Operation) -> None:
    set_target_triple(tree, TARGET_TRIPLE)
    assert compile_object(str(tree), cpu_level())


def function(start: int = 0, stop: int = ITERATIONS, base: str = "%arg0[%arg2]", index: str = "%5") -> str:
    return FUNCTION.format(start=start, stop=stop, base=base, index=index)


def test_a_loop_asks_for_the_next_strip_of_a_row_once_per_strip() -> None:
    tree = module(function())
    read_ahead(tree)
    asked = [ask.operands[0] for ask in tree.walk(PREFETCH)]
    makers = tree.makers()
    offsets = {makers[address].attributes["rawConstantIndices"] for address in asked}
    assert len(asked) == STRIP_ITERATIONS * 2 // LINE_BYTES
    assert offsets == {
        f"array<i32: {offset}>" for offset in range(2 * STRIP_ITERATIONS, 4 * STRIP_ITERATIONS, LINE_BYTES)
    }
    (strip,) = {makers[address].operands[0] for address in asked}
    row, _ = makers[strip].operands
    assert makers[row].operands == ["%arg0", "%arg2"]
    compiles(tree)


@pytest.mark.parametrize(
    "text",
    [
        function(start=1),
        function(stop=96 * 8 + 8),  # strips of 8 iterations
        function(stop=512),  # a row of 1 KB
        function(base="%4[%arg2]"),  # on the stack
        function(base="%arg0[%5]"),  # no row: it moves with the index
        function(index="%arg2"),  # the same element each time
        function().replace("    %9 =", "    llvm.br ^bb4\n  ^bb4:\n    %9 ="),  # not one block
        function().replace("(%11 : i64)", "(%1 : i64)"),  # not counted
    ],
)
def test_other_loops_stay_as_they_are(text: str) -> None:
    assert is_left(read_ahead, text)


def test_a_copy_asks_for_both_sides_of_each_piece() -> None:
    copy = (
        '"llvm.intr.memcpy"(%arg0, %arg1, %arg2) <{isVolatile = false}> : (!llvm.ptr, !llvm.ptr, i64) -> ()'
    )
    head = "module {\n  llvm.func @f(%arg0: !llvm.ptr, %arg1: !llvm.ptr, %arg2: i64) {\n"
    plain = f"{head}    {copy}\n    llvm.return\n  }}\n}}\n"
    tree = module(plain)
    copy_ahead(tree)
    (call,) = tree.walk("llvm.call")
    assert call.attributes["callee"] == f"@{COPY_SYMBOL}"
    assert call.operands == ["%arg0", "%arg1", "%arg2"]
    assert len(tree.walk(PREFETCH)) == 2 * (AHEAD_BYTES + PIECE_BYTES) // LINE_BYTES
    compiles(tree)
    assert is_left(copy_ahead, function())


@pytest.mark.parametrize(
    "kernel",
    [
        arrange_kernel(SlotLayout(7168, 2), False),
        weighted_sum_kernel(torch.bfloat16, 7168, 8),
        weighted_sum_kernel(torch.float16, 7168, 2),
    ],
    ids=lambda kernel: kernel.name,
)
def test_kernels_over_rows_ask_ahead(kernel: object) -> None:
    text = lower(tensor_ir(kernel, named_ops=False), kernel, noalias=True)  # type: ignore[arg-type]
    assert PREFETCH in text


# Around the sizes where copies begin to be cut into pieces, and where the last piece is whole.
REACH_WORDS = (AHEAD_BYTES + PIECE_BYTES) // 4


@pytest.mark.parametrize(
    "row_words", [8, 64, REACH_WORDS - 8, REACH_WORDS, REACH_WORDS + 8, REACH_WORDS + PIECE_BYTES // 4, 3584]
)
def test_rows_of_any_length_are_copied_whole(row_words: int) -> None:
    slot_words = -(-(row_words + 12) // 128) * 128
    slots = torch.randint(-(2**31), 2**31, (6, slot_words), dtype=torch.int32)
    slot = SlotLayout(row_words * 2, 2)
    for got, want in zip(arrange(slots, slot, launch), arrange(slots, slot, fallback), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [992, 1024, 1056, 4096, 4128, 7168])
def test_rows_of_any_length_are_summed_whole(dtype: torch.dtype, hidden: int) -> None:
    slots = torch.randn(3, 4, hidden).to(dtype)
    ids = torch.tensor([[0, 1, 2, -1]] * 3, dtype=torch.int32)
    weights = torch.rand(3, 4)
    assert_same_bits(weighted_sum(slots, ids, weights, launch), weighted_sum(slots, ids, weights, fallback))
