"""Loops over short rows: what becomes of them, what must stay as it is, and that the result lowers."""

from __future__ import annotations

import re
from functools import partial

import pytest

from moe_triton.backends.cpu.triton.rewrite_vectors import narrow_by_shuffles, vectorize_rows
from tests.backends.ir_text import is_left, module, opt, rewritten

MAPS = {
    "tile": "(d0, d1) -> (d0, d1)",
    "row": "(d0, d1) -> (d0)",
    "column": "(d0, d1) -> (d1)",
    "number": "(d0, d1) -> ()",
}
TYPE = {
    "tile": "memref<{rows}x{n}x{t}>",
    "row": "memref<{rows}x{t}>",
    "column": "memref<{n}x{t}>",
    "number": "{t}",
}
TO_LLVM = (
    "--convert-scf-to-cf",
    "--expand-strided-metadata",
    "--convert-vector-to-llvm",
    "--convert-arith-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
)


def _generic(
    kinds: list[str],
    body: list[str],
    *,
    iterators: tuple[str, str] = ("parallel", "parallel"),
    rows: int = 16,
    row_elements: int = 8,
    element: str = "f32",
    tile: str = TYPE["tile"],
) -> str:
    """A function of one generic. Operands %arg0, ... are of ``kinds``, the last one being written.

    In ``body``, %in0, ... are their elements and %out the old value; the last line is what is yielded.
    """
    types = [{**TYPE, "tile": tile}[kind].format(rows=rows, n=row_elements, t=element) for kind in kinds]
    maps = "".join(f"#map{i} = affine_map<{MAPS[kind]}>\n" for i, kind in enumerate(kinds))
    names = [f"%arg{i}" for i in range(len(kinds))]
    arguments = [f"%in{i}: {element}" for i in range(len(kinds) - 1)] + [f"%out: {element}"]
    inputs = f"ins({', '.join(names[:-1])} : {', '.join(types[:-1])}) " if len(kinds) > 1 else ""
    operations = "".join(f"      {line}\n" for line in body[:-1])
    return (
        f"{maps}module {{\n"
        f"  func.func @f({', '.join(f'{n}: {t}' for n, t in zip(names, types, strict=True))}) {{\n"
        "    %cst = arith.constant 2.000000e+00 : f32\n"
        f"    linalg.generic {{indexing_maps = [{', '.join(f'#map{i}' for i in range(len(kinds)))}], "
        f'iterator_types = ["{iterators[0]}", "{iterators[1]}"]}} '
        f"{inputs}outs({names[-1]} : {types[-1]}) {{\n"
        f"    ^bb0({', '.join(arguments)}):\n{operations}      linalg.yield {body[-1]} : {element}\n    }}\n"
        "    return\n  }\n}\n"
    )


def _vectorized(text: str) -> str:
    """After the rewrite, in the short form; it must have done something that lowers to LLVM."""
    tree = module(text)
    vectorize_rows(tree, 64)
    text = str(tree)
    assert "linalg.generic" not in text
    assert "vector." not in opt(text, *TO_LLVM)
    return opt(text)


def test_a_row_takes_part_as_often_as_it_has_numbers() -> None:
    body = ["%1 = arith.mulf %in0, %in1 : f32", "%1"]
    text = _vectorized(_generic(["tile", "row", "tile"], body))
    assert re.search(r"vector\.load %arg1\[%arg3\] : memref<16xf32>, vector<8xf32>", text)
    each = re.search(r"(%\w+) = vector\.shuffle .*\[0, 0, 0, 0, 0, 0, 0, 0, 1, .* 7\] : vector<8xf32>", text)
    assert each is not None
    assert re.search(rf"arith\.mulf %\w+, {each[1]} : vector<64xf32>", text)
    assert "scf.for %arg3 = %c0 to %c16 step %c8 {" in text


def test_what_concerns_a_row_alone_is_computed_once_a_row() -> None:
    body = ["%1 = arith.divf %cst, %in1 : f32", "%2 = arith.mulf %in0, %1 : f32", "%2"]
    text = _vectorized(_generic(["tile", "row", "tile"], body))
    once = re.search(r"(%\w+) = arith\.divf %\w+, %\w+ : vector<8xf32>", text)
    assert once is not None
    assert f"vector.shuffle {once[1]}, {once[1]}" in text


def test_numbers_go_to_every_lane_before_the_loop() -> None:
    body = ["%1 = arith.mulf %in0, %in1 : f32", "%2 = arith.addf %1, %cst : f32", "%2"]
    text = _vectorized(_generic(["tile", "number", "tile"], body))
    before = text[: text.index("scf.for")]
    assert "vector.broadcast %arg1 : f32 to vector<64xf32>" in before
    assert "vector.broadcast %cst : f32 to vector<64xf32>" in before


def test_conditions_of_a_tile_and_of_a_call() -> None:
    body = [
        "%1 = arith.cmpf oeq, %in0, %in0 : f32",
        "%2 = arith.select %1, %in0, %cst : f32",
        "%2",
    ]
    text = _vectorized(_generic(["tile", "tile"], body))
    assert re.search(r"arith\.select %\w+, .* : vector<64xi1>, vector<64xf32>", text)
    given = _generic(["tile", "number", "tile"], ["%1 = arith.select %in1, %in0, %cst : f32", "%1"])
    given = given.replace("%arg1: f32", "%arg1: i1").replace(
        "memref<16x8xf32>, f32)", "memref<16x8xf32>, i1)"
    )
    text = _vectorized(given.replace("%in1: f32", "%in1: i1"))
    assert re.search(r"arith\.select %arg1, .* : vector<64xf32>", text)


def test_conversions_keep_the_number_of_lanes() -> None:
    body = ["%1 = arith.fptosi %in0 : f32 to i32", "%2 = arith.sitofp %1 : i32 to f32", "%2"]
    assert "vector<64xf32> to vector<64xi32>" in _vectorized(_generic(["tile", "tile"], body))


@pytest.mark.parametrize(("rows", "step"), [(16, 8), (12, 4), (4, 4)])
def test_vectors_are_as_long_as_the_number_of_rows_allows(rows: int, step: int) -> None:
    text = _vectorized(_generic(["tile", "tile"], ["%1 = arith.negf %in0 : f32", "%1"], rows=rows))
    assert re.search(rf" step %c{step}(_\d+)? {{", text)


def test_the_largest_of_a_row_is_found_by_exchanging_lanes() -> None:
    body = ["%1 = arith.maxsi %in0, %out : i32", "%1"]
    text = _vectorized(_generic(["tile", "row"], body, iterators=("parallel", "reduction"), element="i32"))
    assert text.count("vector.shuffle") == 4  # three exchanges, and one of each row
    assert text.count("arith.maxsi") == 4
    assert re.search(r"vector\.store %\w+, %arg1\[%arg2\] : memref<16xi32>, vector<8xi32>", text)


def test_sums_of_columns_stay_in_the_order_of_the_rows() -> None:
    body = ["%1 = arith.mulf %in0, %in0 : f32", "%2 = arith.addf %1, %out : f32", "%2"]
    iterators = ("reduction", "parallel")
    text = _vectorized(_generic(["tile", "column"], body, iterators=iterators, rows=7, row_elements=32))
    first = re.search(r"(%\w+) = vector\.load %arg1\[%c0\] : memref<32xf32>, vector<32xf32>", text)
    assert first is not None
    loop = rf"(%\w+) = scf\.for .* iter_args\((%\w+) = {first[1]}\) -> \(vector<32xf32>\)"
    total, old = re.search(loop, text).groups()  # type: ignore[union-attr]
    assert re.search(rf"arith\.addf %\w+, {old} : vector<32xf32>", text)
    assert f"vector.store {total}, %arg1[%c0] : memref<32xf32>, vector<32xf32>" in text


ADD = ["%1 = arith.addf %in0, %out : f32", "%1"]
NEGATE = ["%1 = arith.negf %in0 : f32", "%1"]
UNTOUCHED = {
    "a sum of a row, whose order counts": _generic(["tile", "row"], ADD, iterators=("parallel", "reduction")),
    "columns of several rows at once": _generic(["tile", "column"], ADD, iterators=("reduction", "parallel")),
    "a column beside several rows at once": _generic(
        ["tile", "column", "tile"], ["%1 = arith.mulf %in0, %in1 : f32", "%1"]
    ),
    "long rows": _generic(["tile", "tile"], NEGATE, row_elements=64),
    "rows that fill no vector": _generic(["tile", "tile"], NEGATE, rows=3),
    "rows apart from each other": _generic(
        ["tile", "tile"], NEGATE, tile="memref<{rows}x{n}x{t}, strided<[16, 1], offset: ?>>"
    ),
    "an output that is read": _generic(["tile", "tile"], ADD),
    "an old value in the middle": _generic(
        ["tile", "row"],
        ["%1 = arith.maxsi %in0, %out : i32", "%2 = arith.addi %1, %1 : i32", "%2"],
        iterators=("parallel", "reduction"),
        element="i32",
    ),
    "conditions in memory, a byte each": _generic(
        ["tile", "tile"], ["%1 = arith.xori %in0, %in0 : i1", "%1"], element="i1"
    ),
    "the place in the tile": _generic(
        ["tile", "tile"],
        ["%1 = linalg.index 1 : index", "%2 = arith.index_cast %1 : index to i32", "%2"],
        element="i32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", UNTOUCHED.values(), ids=UNTOUCHED.keys())
def test_what_is_left_as_it_is(text: str) -> None:
    assert is_left(partial(vectorize_rows, most_elements=64), text)


def _upper_halves(shift: int = 16, wide: str = "i32", narrow: str = "i16", store: str = "%3") -> str:
    many, few = f"vector<32x{wide}>", f"vector<32x{narrow}>"
    return f"""module {{
  func.func @f(%arg0: {many}, %arg1: memref<32x{narrow}>, %arg2: {few}) {{
    %c0 = arith.constant 0 : index
    %0 = arith.addi %arg0, %arg0 : {many}
    %cst = arith.constant {shift} : {wide}
    %1 = vector.broadcast %cst : {wide} to {many}
    %2 = arith.shrui %0, %1 : {many}
    %3 = arith.trunci %2 : {many} to {few}
    vector.store {store}, %arg1[%c0] : memref<32x{narrow}>, {few}
    return
  }}
}}
"""


def test_upper_halves_are_stored_by_one_shuffle() -> None:
    text = rewritten(narrow_by_shuffles, _upper_halves())
    words = re.search(r"(%\w+) = vector\.bitcast %\w+ : vector<32xi32> to vector<64xi16>", text)
    assert words is not None
    lanes = ", ".join(str(lane) for lane in range(1, 64, 2))
    halves = re.search(rf"(%\w+) = vector\.shuffle {words[1]}, {words[1]} \[{lanes}\]", text)
    assert halves is not None
    assert f"vector.store {halves[1]}, %arg1" in text
    assert "vector." not in opt(text, *TO_LLVM)


@pytest.mark.parametrize(
    "text",
    [
        _upper_halves(shift=8),
        _upper_halves(wide="i64"),
        _upper_halves(narrow="i8"),
        _upper_halves(store="%arg2"),
    ],
)
def test_other_vectors_are_stored_as_they_are(text: str) -> None:
    assert is_left(narrow_by_shuffles, text)
