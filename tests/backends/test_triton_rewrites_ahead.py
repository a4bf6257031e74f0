"""Edits that ask for memory ahead: where they apply, what they leave alone, and that nothing else changes."""

from __future__ import annotations

import re
from functools import partial

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
    MOST_ROWS,
    PIECE_BYTES,
    STRIP_ITERATIONS,
    TURNS_AHEAD_BYTES,
    copy_ahead,
    copy_past_caches,
    read_ahead,
)
from moe_triton.backends.cpu.triton.rewrite_llvm import set_target_triple
from moe_triton.backends.cpu.triton.targets import this_target
from moe_triton.kernels.arrange import arrange_kernel
from moe_triton.kernels.pack import pack_kernel
from moe_triton.kernels.rms_norm import rms_norm_kernel
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
    set_target_triple(tree, this_target().triple)
    assert compile_object(str(tree), this_target())


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


# What loop number n does at %at_n.
NUMBERS = """
    %loaded_{n} = llvm.load %at_{n} : !llvm.ptr -> i16
    llvm.store %loaded_{n}, %stack : i16, !llvm.ptr
"""
VECTORS = NUMBERS.replace("i16", "vector<64xi16>")
REDUCTION = """
    %loaded_{n} = llvm.load %at_{n} : !llvm.ptr -> i16
    %old_{n} = llvm.load %stack : !llvm.ptr -> i16
    %new_{n} = llvm.intr.smax(%loaded_{n}, %old_{n}) : (i16, i16) -> i16
    llvm.store %new_{n}, %stack : i16, !llvm.ptr
"""


def _another(offset: str) -> str:
    """A vector of another row in loop number n."""
    n = "{n}_" + offset[1:]
    return f"""
    %row_{n} = llvm.getelementptr %arg0[{offset}] : (!llvm.ptr, i64) -> !llvm.ptr, i16
    %at_{n} = llvm.getelementptr %row_{n}[%index_{{n}}] : (!llvm.ptr, i64) -> !llvm.ptr, i16
    %loaded_{n} = llvm.load %at_{n} : !llvm.ptr -> vector<64xi16>
"""


def _pass(n: int, work: str = NUMBERS) -> str:
    """Loop number n over a row of %arg0, and the block that comes after it."""
    stop, lanes = ("%turns", "%lanes") if "vector" in work else ("%size", "")
    index = f"%index_{n}" if lanes else f"%i_{n}"
    multiply = f"{index} = llvm.mul %i_{n}, {lanes} : i64" if lanes else ""
    return f"""
  ^head_{n}(%i_{n}: i64):
    %test_{n} = llvm.icmp "slt" %i_{n}, {stop} : i64
    llvm.cond_br %test_{n}, ^body_{n}, ^after_{n}
  ^body_{n}:
    %row_{n} = llvm.getelementptr %arg0[%offset] : (!llvm.ptr, i64) -> !llvm.ptr, i16
    {multiply}
    %at_{n} = llvm.getelementptr %row_{n}[{index}] : (!llvm.ptr, i64) -> !llvm.ptr, i16
    {work.format(n=n).strip()}
    %next_{n} = llvm.add %i_{n}, %one : i64
    llvm.br ^head_{n}(%next_{n} : i64)
  ^after_{n}:
"""


def _rows(*loops: str, outer: str = "%row_number", either: bool = False) -> str:
    """For each of %arg2 rows two loops one after the other, or either of them."""
    starts = [f"llvm.br ^head_{n + 1}(%zero : i64)" for n in range(len(loops))]
    if either:
        starts[0] = f"llvm.cond_br %arg1, ^one, ^other\n  ^one:\n    {starts[0]}"
        starts[1] = f"llvm.br ^done\n  ^other:\n    {starts[1]}"
    work = "".join(map("".join, zip(starts, loops, strict=True)))
    return f"""module {{
  llvm.func @f(%arg0: !llvm.ptr, %arg1: i1, %arg2: i64) {{
    %zero = llvm.mlir.constant(0 : index) : i64
    %one = llvm.mlir.constant(1 : index) : i64
    %size = llvm.mlir.constant({ITERATIONS * 2} : index) : i64
    %turns = llvm.mlir.constant({ITERATIONS // 32} : index) : i64
    %lanes = llvm.mlir.constant(64 : index) : i64
    %count = llvm.mlir.constant(1 : i32) : i32
    %stack = llvm.alloca %count x !llvm.array<64 x i16> : (i32) -> !llvm.ptr
    llvm.br ^rows(%zero : i64)
  ^rows(%row_number: i64):
    %more = llvm.icmp "slt" %row_number, %arg2 : i64
    llvm.cond_br %more, ^row, ^end
  ^row:
    %first = llvm.add %arg2, {outer} : i64
    %offset = llvm.mul %first, %size : i64
    {work}
    llvm.br ^done
  ^done:
    %next = llvm.add %row_number, %one : i64
    llvm.br ^rows(%next : i64)
  ^end:
    llvm.return
  }}
}}
"""


def _asked(text: str) -> list[set[int]]:
    """How far behind their addresses lines are asked for, by block, where there are any."""
    tree = module(text)
    read_ahead(tree)
    compiles(tree)
    makers, found = tree.makers(), []
    for block in tree.walk("llvm.func")[0].regions[0]:
        lines = [makers[each.operands[0]] for each in block.operations if each.name == PREFETCH]
        offsets = [line.attributes["rawConstantIndices"] for line in lines]
        found.append({int(offset.removeprefix("array<i32: ").removesuffix(">")) for offset in offsets})
    return [offsets for offsets in found if offsets]


ROW_BYTES = ITERATIONS * 4
NEXT_STRIP = set(range(2 * STRIP_ITERATIONS, 4 * STRIP_ITERATIONS, LINE_BYTES))
NEXT_ROW = set(range(ROW_BYTES, ROW_BYTES + 2 * STRIP_ITERATIONS, LINE_BYTES))
NEXT_TURNS = {TURNS_AHEAD_BYTES, TURNS_AHEAD_BYTES + LINE_BYTES}


def test_a_loop_over_vectors_asks_in_every_turn() -> None:
    assert _asked(_rows(_pass(1, VECTORS))) == [NEXT_TURNS]


@pytest.mark.parametrize(("num_rows", "asks"), [(MOST_ROWS, True), (MOST_ROWS + 1, False)])
def test_a_loop_over_vectors_of_many_rows_does_not_ask(num_rows: int, asks: bool) -> None:
    others = ("%first", "%size", "%turns", "%lanes")[: num_rows - 1]
    assert bool(_asked(_rows(_pass(1, VECTORS + "".join(map(_another, others)))))) == asks


def test_a_reduction_is_not_cut_into_strips() -> None:
    assert is_left(read_ahead, _rows(_pass(1, REDUCTION)))


@pytest.mark.parametrize(("first", "asked"), [(NUMBERS, [NEXT_STRIP]), (REDUCTION, [])])
def test_the_second_loop_over_a_row_asks_for_the_next_row(first: str, asked: list[set[int]]) -> None:
    assert _asked(_rows(_pass(1, first), _pass(2))) == [*asked, NEXT_ROW]


def test_the_second_loop_over_vectors_asks_for_the_next_row() -> None:
    vectors = [_pass(n, VECTORS) for n in (1, 2)]
    assert _asked(_rows(*vectors)) == [NEXT_TURNS, {ROW_BYTES, ROW_BYTES + LINE_BYTES}]


@pytest.mark.parametrize("outer", ["%arg2", "%loaded"])
def test_rows_that_do_not_follow_each_other_are_not_asked_for_twice(outer: str) -> None:
    text = _rows(_pass(1), _pass(2), outer=outer)
    load = "%loaded = llvm.load %arg0 : !llvm.ptr -> i64\n    %first ="
    assert _asked(text.replace("%first =", load)) == [NEXT_STRIP]


def test_only_a_loop_that_always_ran_before_has_read_a_row() -> None:
    assert _asked(_rows(_pass(1), _pass(2), either=True)) == [NEXT_STRIP, NEXT_STRIP]


def test_either_of_two_loops_may_go_through_a_row_of_one_address() -> None:
    row = "llvm.getelementptr %arg0[%offset] : (!llvm.ptr, i64) -> !llvm.ptr, i16\n"
    loops = [_pass(n).replace(f"%row_{n} = {row}", "").replace(f"%row_{n}[", "%row[") for n in (1, 2)]
    text = _rows(*loops, either=True)
    offset = "%offset = llvm.mul %first, %size : i64\n"
    assert _asked(text.replace(offset, f"{offset}    %row = {row}")) == [NEXT_STRIP, NEXT_STRIP]


def test_a_loop_that_counts_in_32_bits_stays_as_it_is() -> None:
    text = (
        function()
        .replace("%5: i64", "%5: i32")
        .replace("%11 : i64", "%11 : i32")
        .replace("%0 : i64", "%0 : i32")
    )
    for number in (0, 1, 2):
        text = re.sub(rf"(%{number} = .*) : index\) : i64", r"\1 : i32) : i32", text)
    text = text.replace("%5, %2 : i64", "%5, %2 : i32").replace("%5, %1 : i64", "%5, %1 : i32")
    text = text.replace("[%5] : (!llvm.ptr, i64)", "[%5] : (!llvm.ptr, i32)")
    assert is_left(read_ahead, text)


def test_a_row_that_is_the_same_for_all_is_not_asked_for() -> None:
    loop = _pass(1).replace("%row_1[", "%arg0[")
    assert is_left(read_ahead, _rows(loop))


COPY = """module {
  llvm.func @f(%arg0: !llvm.ptr, %arg1: !llvm.ptr, %arg2: i64) {
    "llvm.intr.memcpy"(%arg0, %arg1, %arg2) <{isVolatile = false}> : (!llvm.ptr, !llvm.ptr, i64) -> ()
    llvm.return
  }
}
"""


def test_a_copy_past_the_caches_stores_whole_lines() -> None:
    tree = module(COPY)
    copy_past_caches(tree)
    stores = tree.walk("llvm.store")
    assert len(stores) == PIECE_BYTES // LINE_BYTES
    assert all("nontemporal" in str(store) and f"alignment = {LINE_BYTES}" in str(store) for store in stores)
    compiles(tree)
    assert is_left(copy_past_caches, function())


@pytest.mark.parametrize("streams", [False, True])
def test_only_what_is_to_bypass_the_caches_does(streams: bool) -> None:
    kernel = arrange_kernel(SlotLayout(2048, 2), False)
    how = {"noalias": True, "target": this_target(), "streams": streams}
    assert ("nontemporal" in lower(tensor_ir(kernel, named_ops=False), kernel, **how)) == streams


def test_a_copy_asks_for_both_sides_of_each_piece() -> None:
    tree = module(COPY)
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
        pack_kernel(torch.bfloat16, 7168),
        rms_norm_kernel(7168),
        weighted_sum_kernel(torch.bfloat16, 7168, 8),
        weighted_sum_kernel(torch.float16, 7168, 2),
    ],
    ids=lambda kernel: kernel.name,
)
def test_kernels_over_rows_ask_ahead(kernel: object) -> None:
    text = lower(tensor_ir(kernel, named_ops=False), kernel, noalias=True, target=this_target())  # type: ignore[arg-type]
    assert PREFETCH in text


# Around the sizes where copies begin to be cut into pieces, and where the last piece is whole.
REACH_WORDS = (AHEAD_BYTES + PIECE_BYTES) // 4


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "row_words", [8, 64, REACH_WORDS - 8, REACH_WORDS, REACH_WORDS + 8, REACH_WORDS + PIECE_BYTES // 4, 3584]
)
def test_rows_of_any_length_are_copied_whole(row_words: int, streams: bool) -> None:
    """Rows that begin with a line of the caches and others."""
    slot_words = -(-(row_words + 12) // 128) * 128
    slots = torch.randint(-(2**31), 2**31, (6, slot_words), dtype=torch.int32)
    slot = SlotLayout(row_words * 2, 2)
    run = partial(launch, streams=streams)
    for got, want in zip(arrange(slots, slot, run), arrange(slots, slot, fallback), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [992, 1024, 1056, 4096, 4128, 7168])
def test_rows_of_any_length_are_summed_whole(dtype: torch.dtype, hidden: int) -> None:
    slots = torch.randn(3, 4, hidden).to(dtype)
    ids = torch.tensor([[0, 1, 2, -1]] * 3, dtype=torch.int32)
    weights = torch.rand(3, 4)
    assert_same_bits(weighted_sum(slots, ids, weights, launch), weighted_sum(slots, ids, weights, fallback))
