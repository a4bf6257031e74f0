"""Edits of buffers: what each changes, what it must leave alone, and that the result parses."""

from __future__ import annotations

import re

import pytest

from moe_triton.backends.cpu.triton import rewrite_buffers as rewrites
from tests.backends.ir_text import INPUT, MAP, OUTPUT, STRIDED, function, is_left, rewritten


def _stored(kind: str = OUTPUT, between: str = "", copy_indent: str = "    ") -> str:
    view = STRIDED.format("i8")
    return (
        f"{MAP}module {{\n"
        f"  func.func @f(%arg0: memref<64xi8> {INPUT}, %arg1: memref<?xi8> {kind}, %arg2: i1) {{\n"
        "    %c0 = arith.constant 0 : index\n"
        "    %alloca = memref.alloca() : memref<64xi8>\n"
        "    %reinterpret_cast = memref.reinterpret_cast %arg1 to offset: [%c0], sizes: [64], strides: [1]"
        f" : memref<?xi8> to {view}\n"
        '    linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel"]} '
        "ins(%arg0 : memref<64xi8>) outs(%alloca : memref<64xi8>) {\n"
        "    ^bb0(%in: i8, %out: i8):\n"
        "      linalg.yield %in : i8\n"
        "    }\n"
        f"{between}{copy_indent}memref.copy %alloca, %reinterpret_cast : memref<64xi8> to {view}\n"
        + ("    }\n" if len(copy_indent) > 4 else "")
        + "    return\n  }\n}\n"
    )


def test_store_in_place() -> None:
    text = rewritten(rewrites.store_in_place, _stored())
    assert "memref.copy" not in text
    assert "alloca" not in text
    assert "outs(%reinterpret_cast : memref<64xi8, strided" in text


def _stored_twice(last: str) -> str:
    """Two rows that take turns in a buffer, and a line in between."""
    view = STRIDED.format("i8")
    writer = (
        '    linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel"]} '
        "ins(%arg0 : memref<64xi8>) outs(%alloca : memref<64xi8>) {\n"
        "    ^bb0(%in: i8, %out: i8):\n"
        "      linalg.yield %in : i8\n"
        "    }\n"
    )
    addresses = "".join(
        f"    %{name} = memref.reinterpret_cast %arg1 to offset: [%{start}], sizes: [64], strides: [1]"
        f" : memref<?xi8> to {view}\n"
        for name, start in (("first", "c0"), ("second", "c64"))
    )
    copies = [f"    memref.copy %alloca, %{name} : memref<64xi8> to {view}\n" for name in ("first", "second")]
    return (
        f"{MAP}module {{\n"
        f"  func.func @f(%arg0: memref<64xi8> {INPUT}, %arg1: memref<?xi8> {OUTPUT}) {{\n"
        "    %c0 = arith.constant 0 : index\n"
        "    %c64 = arith.constant 64 : index\n"
        "    %alloca = memref.alloca() : memref<64xi8>\n"
        f"{addresses}{writer}{copies[0]}{last.format(writer=writer)}{copies[1]}"
        "    return\n  }\n}\n"
    )


def test_store_in_place_of_rows_that_take_turns_in_a_buffer() -> None:
    text = rewritten(rewrites.store_in_place, _stored_twice("{writer}"))
    assert "memref.copy" not in text
    assert "alloca" not in text
    assert "outs(%reinterpret_cast : memref<64xi8, strided" in text
    assert "outs(%reinterpret_cast_0 : memref<64xi8, strided" in text


def test_store_in_place_leaves_a_row_that_is_stored_twice() -> None:
    text = _stored_twice("")
    assert is_left(rewrites.store_in_place, text)


def test_store_in_place_leaves_what_is_read_back_or_conditional() -> None:
    read_too = _stored(kind="{tt.tensor_kind = 2 : i32}")
    assert is_left(rewrites.store_in_place, read_too)
    conditional = _stored(between="    scf.if %arg2 {\n", copy_indent="      ")
    assert is_left(rewrites.store_in_place, conditional)


def _carried(extra_use: str = "") -> str:
    return (
        "module {\n"
        "  func.func @f(%arg0: memref<64xf32>, %arg1: index, %arg2: memref<64xf32>) {\n"
        "    %c0 = arith.constant 0 : index\n"
        "    %c1 = arith.constant 1 : index\n"
        "    %alloca = memref.alloca() : memref<64xf32>\n"
        "    %alloca_0 = memref.alloca() : memref<64xf32>\n"
        "    memref.copy %arg0, %alloca : memref<64xf32> to memref<64xf32>\n"
        "    %0 = scf.for %arg3 = %c0 to %arg1 step %c1 iter_args(%arg4 = %alloca) -> (memref<64xf32>) {\n"
        "      linalg.add ins(%arg4, %arg0 : memref<64xf32>, memref<64xf32>) "
        "outs(%alloca_0 : memref<64xf32>)\n"
        "      %alloc = memref.alloc() {alignment = 64 : i64} : memref<64xf32>\n"
        "      memref.copy %alloca_0, %alloc : memref<64xf32> to memref<64xf32>\n"
        "      scf.yield %alloc : memref<64xf32>\n"
        "    }\n"
        f"{extra_use}"
        "    memref.copy %0, %arg2 : memref<64xf32> to memref<64xf32>\n"
        "    return\n  }\n}\n"
    )


def test_carry_in_place() -> None:
    text = rewritten(rewrites.carry_in_place, _carried())
    assert "memref.alloc()" not in text
    assert "memref.copy %alloca_0, %arg4" in text
    assert "scf.yield %arg4" in text


def test_carry_in_place_keeps_an_initial_value_that_is_needed_later() -> None:
    text = _carried(extra_use="    memref.copy %alloca, %arg2 : memref<64xf32> to memref<64xf32>\n")
    assert is_left(rewrites.carry_in_place, text)


def _carried_in_another_shape(read: str = "(d0, d1, d2)", extra_use: str = "", rows: str = "rows") -> str:
    flat, whole = "memref<16x8xf32>", "memref<16x1x8xf32>"
    reshaped = f"[[0, 1], [2]] output_shape [16, 1, 8] : {flat} into {whole}"
    maps = f"affine_map<(d0, d1, d2) -> {read}>, affine_map<(d0, d1, d2) -> (d0, d1, d2)>"
    kinds = ", ".join(['"parallel"'] * 3)
    return (
        "module {\n"
        f"  func.func @f(%arg0: {flat}, %arg1: index, %arg2: {flat}) {{\n"
        "    %c0 = arith.constant 0 : index\n"
        "    %c1 = arith.constant 1 : index\n"
        f"    %alloca = memref.alloca() : {flat}\n"
        f"    memref.copy %arg0, %alloca : {flat} to {flat}\n"
        f"    %0 = scf.for %arg3 = %c0 to %arg1 step %c1 iter_args(%arg4 = %alloca) -> ({flat}) {{\n"
        f"      %rows = memref.expand_shape %arg4 {reshaped}\n"
        f"      %other = memref.expand_shape %arg0 {reshaped}\n"
        f"      %alloc = memref.alloc() {{alignment = 64 : i64}} : {whole}\n"
        f"      linalg.generic {{indexing_maps = [{maps}], iterator_types = [{kinds}]}} "
        f"ins(%{rows} : {whole}) outs(%alloc : {whole}) {{\n"
        "      ^bb0(%in: f32, %out: f32):\n"
        "        %1 = arith.addf %in, %in : f32\n"
        "        linalg.yield %1 : f32\n"
        "      }\n"
        f"{extra_use}"
        f"      %flat = memref.collapse_shape %alloc [[0, 1], [2]] : {whole} into {flat}\n"
        f"      scf.yield %flat : {flat}\n"
        "    }\n"
        f"    memref.copy %0, %arg2 : {flat} to {flat}\n"
        "    return\n  }\n}\n"
    )


def test_carry_in_place_in_another_shape() -> None:
    text = rewritten(rewrites.carry_in_place, _carried_in_another_shape())
    assert "memref.alloc()" not in text
    assert "outs(%expand_shape" in text
    assert "scf.yield %arg4" in text


@pytest.mark.parametrize(
    "changed",
    [
        {"read": "(15 - d0, d1, d2)"},  # it reads what it has written
        {"rows": "other"},  # it does not read the previous value at all
        {"extra_use": "      memref.copy %rows, %alloc : memref<16x1x8xf32> to memref<16x1x8xf32>\n"},
        {"extra_use": "      memref.copy %arg4, %arg2 : memref<16x8xf32> to memref<16x8xf32>\n"},
    ],
)
def test_carry_in_place_keeps_a_previous_value_that_is_needed(changed: dict[str, str]) -> None:
    assert is_left(rewrites.carry_in_place, _carried_in_another_shape(**changed))


@pytest.mark.parametrize(("shape", "strides"), [("?xi32", "[1]"), ("?xbf16", "[1]"), ("?x2xi32", "[2, 1]")])
def test_copy_partial_blocks_with_loops(shape: str, strides: str) -> None:
    types = f"memref<{shape}, strided<{strides}, offset: ?>>", f"memref<{shape}>"
    partial = f"memref.copy %arg0, %arg1 : {types[0]} to {types[1]}"
    text = function(f"%arg0: {types[0]}, %arg1: {types[1]}", partial)
    assert "linalg.copy" in rewritten(rewrites.copy_partial_blocks_with_loops, text)
    whole = function(
        "%arg0: memref<4xi32>, %arg1: memref<4xi32>",
        "memref.copy %arg0, %arg1 : memref<4xi32> to memref<4xi32>",
    )
    assert is_left(rewrites.copy_partial_blocks_with_loops, whole)


BRANCH_IN_A_LOOP = """
%c0 = arith.constant 0 : index
%c1 = arith.constant 1 : index
%alloca = memref.alloca() : memref<4xf32>
scf.for %arg3 = %c0 to %arg1 step %c1 {
  %alloca_0 = memref.alloca() {alignment = 64 : i64} : memref<4xf32>
  memref.copy %alloca, %alloca_0 : memref<4xf32> to memref<4xf32>
  scf.if %arg2 {
    %alloca_1 = memref.alloca() : memref<4xf32>
    memref.copy %alloca_0, %alloca_1 : memref<4xf32> to memref<4xf32>
    memref.copy %alloca_1, %arg0 : memref<4xf32> to memref<4xf32>
  }
}
"""


def test_hoist_buffers_moves_those_of_loops_and_branches_to_the_top() -> None:
    text = function("%arg0: memref<4xf32>, %arg1: index, %arg2: i1", BRANCH_IN_A_LOOP)
    text = rewritten(rewrites.hoist_buffers, text)
    assert len(re.findall(r"^    %[\w-]+ = memref\.alloca\(\)", text, flags=re.M)) == 3
    assert text.count("memref.alloca") == 3
    assert text.rindex("memref.alloca") < text.index("scf.for")
    assert "alignment = 64" in text


def test_hoist_buffers_leaves_what_need_not_or_cannot_move() -> None:
    text = function("%arg0: memref<4xf32>", "%alloca = memref.alloca() : memref<4xf32>")
    assert is_left(rewrites.hoist_buffers, text)
    of_run_time_size = """
scf.if %arg1 {
  %alloca = memref.alloca(%arg0) : memref<?xf32>
}
"""
    text = function("%arg0: index, %arg1: i1", of_run_time_size)
    assert is_left(rewrites.hoist_buffers, text)
    assert is_left(rewrites.hoist_buffers, "module {\n}\n")
