"""Loops over the same row: when two become one, and when they must not."""

from __future__ import annotations

import re

import pytest

from moe_triton.backends.cpu.triton.rewrite_fusion import fuse_loops
from tests.backends.ir_text import is_left, rewritten

ROW = "memref<64x32xf32>"
VECTOR = "vector<32xf32>"


def _loop(read: str, written: str, stop: str = "%c64", second: str = "") -> str:
    """What writes the sums of two rows, or the double of one, to another one."""
    rows = [f"vector.load {row}[%i, %c0] : {ROW}, {VECTOR}" for row in (read, second or read)]
    return f"""
    scf.for %i = %c0 to {stop} step %c1 {{
      %1 = {rows[0]}
      %2 = {rows[1]}
      %3 = arith.addf %1, %2 : {VECTOR}
      vector.store %3, {written}[%i, %c0] : {ROW}, {VECTOR}
    }}
    """


def _function(*lines: str) -> str:
    arguments = ", ".join(f"%arg{i}: {ROW}" for i in range(4))
    return f"""module {{
  func.func private @unknown()
  func.func @f({arguments}, %number: index) {{
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c32 = arith.constant 32 : index
    %c64 = arith.constant 64 : index
    {"".join(lines)}
    return
  }}
}}
"""


def test_two_loops_over_a_row_become_one() -> None:
    text = rewritten(fuse_loops, _function(_loop("%arg0", "%arg1"), _loop("%arg0", "%arg2")))
    assert text.count("scf.for") == 1
    assert re.findall(r"vector\.store %\w+, (%\w+)", text) == ["%arg1", "%arg2"]
    (index,) = re.findall(r"scf\.for (%\w+)", text)
    assert set(re.findall(r"vector\.(?:load|store) .*?\[(%\w+), ", text)) == {index}


def test_three_loops_over_a_row_become_one() -> None:
    loops = [_loop("%arg0", f"%arg{i}") for i in (1, 2, 3)]
    text = rewritten(fuse_loops, _function(*loops))
    assert text.count("scf.for") == 1
    assert re.findall(r"vector\.store %\w+, (%\w+)", text) == ["%arg1", "%arg2", "%arg3"]


def test_equal_numbers_are_equal_bounds() -> None:
    again = "%end = arith.constant 64 : index\n"
    loops = _loop("%arg0", "%arg1"), again, _loop("%arg0", "%arg2", stop="%end")
    assert rewritten(fuse_loops, _function(*loops)).count("scf.for") == 1


def test_what_concerns_other_memory_may_stand_in_between() -> None:
    between = f"memref.copy %arg0, %arg3 : {ROW} to {ROW}\n"
    text = rewritten(fuse_loops, _function(_loop("%arg0", "%arg1"), between, _loop("%arg0", "%arg2")))
    assert text.count("scf.for") == 1
    assert text.index("memref.copy") < text.index("scf.for")


VIEW = (
    "%view = memref.reinterpret_cast %arg1 to offset: [0], sizes: [64, 32], strides: [32, 1] : "
    f"{ROW} to {ROW}\n"
)
FIRST, SECOND = _loop("%arg0", "%arg1"), _loop("%arg0", "%arg2")
CARRIED = f"""
    %init = vector.load %arg0[%c0, %c0] : {ROW}, {VECTOR}
    %sum = scf.for %i = %c0 to %c64 step %c1 iter_args(%old = %init) -> ({VECTOR}) {{
      %1 = vector.load %arg0[%i, %c0] : {ROW}, {VECTOR}
      %2 = arith.addf %1, %old : {VECTOR}
      scf.yield %2 : {VECTOR}
    }}
"""
AGAIN = f"memref.cast %arg1 : {ROW} to memref<?x32xf32>"
RECAST = f"%any = {AGAIN}\n%view = memref.cast %any : memref<?x32xf32> to {ROW}\n"
SAME = f"%view = memref.subview %arg1[0, 0] [64, 32] [1, 1] : {ROW} to {ROW}\n"
EITHER = f"""
    %is_first = arith.cmpi eq, %number, %c0 : index
    %view = arith.select %is_first, %arg1, %arg3 : {ROW}
"""
HANDED_ON = f"%all = scf.for %turn = %c0 to %number step %c1 iter_args(%view = %arg1) -> ({ROW}) {{\n"
END = f"scf.yield %view : {ROW}\n}}\n"
READING_VIEW = _loop("%arg0", "%arg2", second="%view")
UNTOUCHED = {
    "the second reads a part of what the first writes": (SAME, FIRST, READING_VIEW),
    "the second reads what the first writes, by another type": (RECAST, FIRST, READING_VIEW),
    "the second may read what the first writes": (EITHER, FIRST, READING_VIEW),
    "the second reads what is handed on, which the first writes": (HANDED_ON, FIRST, READING_VIEW, END),
    "a call in the first": (
        FIRST.replace("vector.store", "func.call @unknown() : () -> ()\n      vector.store"), SECOND,
    ),
    "the second reads what the first writes": (FIRST, _loop("%arg0", "%arg2", second="%arg1")),
    "the second writes what the first reads": (FIRST, _loop("%arg0", "%arg0")),
    "both write the same": (FIRST, _loop("%arg0", "%arg1")),
    "the second writes a view of what the first writes": (FIRST, VIEW, _loop("%arg0", "%view")),
    "no row in common": (FIRST, _loop("%arg2", "%arg3")),
    "other bounds": (FIRST, _loop("%arg0", "%arg2", stop="%c32")),
    "unknown bounds": (FIRST, _loop("%arg0", "%arg2", stop="%number")),
    "a value that is carried": (FIRST, CARRIED),
    "what was written is read in between": (FIRST, f"memref.copy %arg1, %arg3 : {ROW} to {ROW}\n", SECOND),
    "what was read is written in between": (FIRST, f"memref.copy %arg3, %arg0 : {ROW} to {ROW}\n", SECOND),
    "a call in between, that may do anything": (FIRST, "func.call @unknown() : () -> ()\n", SECOND),
    "an operation in between, of which is not known what it does to its memory": (
        FIRST, f"memref.assume_alignment %arg1, 64 : {ROW}\n", SECOND,
    ),
}  # fmt: skip


@pytest.mark.parametrize("lines", UNTOUCHED.values(), ids=UNTOUCHED.keys())
def test_loops_that_stay_apart(lines: tuple[str, ...]) -> None:
    assert is_left(fuse_loops, _function(*lines))
