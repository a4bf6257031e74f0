"""Reading final modules."""

from __future__ import annotations

import pytest

from autotune.gate.report import Transfer, buffered_ub_bytes, report_of
from autotune.gate.stream import Branch, Buffer, Instruction, Loop, Sync, parse, walk
from moe_triton.core.errors import ToolchainError
from moe_triton.core.soc import UB_BYTES
from tests.autotune.gate.modules import (
    CONSTANTS,
    ELEMENT_FROM_GM,
    ELEMENT_TO_UB,
    GM,
    UB,
    buffer,
    load,
    module,
    store,
    two_buffers,
    vector,
)

TILE = f"memref<896x8xf32, {UB}>"
VIEWS = {
    "cast": f"%v = memref.cast %tile : {TILE} to memref<?x?xf32, strided<[?, ?]>, {UB}>",
    "collapse_shape": f"%v = memref.collapse_shape %tile [[0, 1]] : {TILE} into memref<7168xf32, {UB}>",
    "expand_shape": "%v = memref.expand_shape %tile [[0], [1, 2]] output_shape [896, 8, 1] : "
    f"{TILE} into memref<896x8x1xf32, {UB}>",
    "subview": "%v = memref.subview %tile[0, 0] [%n, 8] [1, 1] : "
    f"{TILE} to memref<?x8xf32, strided<[8, 1]>, {UB}>",
    "reinterpret_cast": "%v = memref.reinterpret_cast %tile to offset: [0], sizes: [7168], strides: [1] : "
    f"{TILE} to memref<7168xf32, {UB}>",
    "extract_strided_metadata": "%v, %offset, %sizes:2 = memref.extract_strided_metadata %tile : "
    f"{TILE} -> memref<f32, {UB}>, index, index, index",
}


def transfers(text: str) -> tuple[Transfer, ...]:
    return report_of("kernel", "Ascend910B3", text).transfers


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("twice", [False, True])
def test_a_copy_is_followed_through_a_view_to_its_buffer(view: str, twice: bool) -> None:
    tile = two_buffers("%tile", "896x8xf32") if twice else buffer("%tile", 0, "896x8xf32")
    assert transfers(module(*tile, view, load("%v"))) == (Transfer("load", "896x8xf32", twice),)


def test_a_copy_is_followed_through_views_of_views() -> None:
    cast = f"%w = memref.cast %v : memref<7168xf32, {UB}> to memref<?xf32, strided<[?], offset: ?>, {UB}>"
    text = module(*two_buffers("%tile", "896x8xf32"), VIEWS["collapse_shape"], cast, load("%w"), store("%w"))
    assert transfers(text) == (
        Transfer("load", "896x8xf32", True),
        Transfer("store", "896x8xf32", True),
    )


def test_a_choice_between_buffers_of_950_is_found() -> None:
    struct = "!llvm.struct<(ptr<6>, ptr<6>, i64, array<1 x i64>, array<1 x i64>)>"
    lines = [
        *buffer("%25", 0, "64xf32"),
        f"%26 = builtin.unrealized_conversion_cast %25 : memref<64xf32, {UB}> to {struct}",
        f"%60 = llvm.select %57, %26, %26 : i1, {struct}",
        f"%61 = builtin.unrealized_conversion_cast %60 : {struct} to memref<64xf32, {UB}>",
    ]
    assert transfers(module(*lines, load("%61"))) == (Transfer("load", "64xf32", True),)


def test_a_name_stands_for_its_latest_definition() -> None:
    lines = ["scf.if %a {", *buffer("%1", 0, "8xf32"), "}", "scf.if %b {", *buffer("%1", 64, "16xf32")]
    assert transfers(module(*lines, load("%1"), "}")) == (Transfer("load", "16xf32", False),)


def test_what_a_loop_carries_is_followed_to_where_it_starts() -> None:
    lines = [
        *CONSTANTS,
        *buffer("%b", 0, "64xf32"),
        "%r = scf.for %i = %c0_i32 to %c8_i32 step %c1_i32 iter_args(%x = %b) -> "
        f"(memref<64xf32, {UB}>)  : i32 {{",
        vector("vadd_1d_float", "%x"),
        "}",
        store("%r"),
    ]
    found = [node for node in walk(parse(module(*lines))) if isinstance(node, Instruction)]
    assert [node.buffers for node in found] == [(Buffer("64xf32"),)] * 2


def test_every_pipe_is_counted() -> None:
    lines = [
        *CONSTANTS,
        *buffer("%b", 0, "64xf32"),
        load("%b"),
        "hivm.hir.set_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]",
        "hivm.hir.wait_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]",
        vector("vadd_1d_float", "%b", "%b"),
        "hivm.hir.pipe_barrier[<PIPE_V>]",
        vector("vmul_1d_float", "%b", "%b"),
        ELEMENT_FROM_GM,
        ELEMENT_TO_UB,
        "%stack = memref.alloca() : memref<1xi64>",
        "%s = memref.load %stack[%c0] : memref<1xi64>",
        store("%b"),
        "hivm.hir.pipe_barrier[<PIPE_ALL>]",
    ]
    report = report_of("kernel", "Ascend910B3", module(*lines))
    assert report.instructions == {"MTE2": 1, "MTE3": 1, "V": 2, "S": 2}
    assert (report.flags_set, report.flags_waited) == (1, 1)
    assert report.barriers == {"ALL": 1, "V": 1}


def test_a_flag_is_set_by_one_pipe_and_waited_for_by_the_other() -> None:
    lines = (f"hivm.hir.{kind}_flag[<PIPE_S>, <PIPE_MTE3>, %id]" for kind in ("set", "wait"))
    assert parse(module(*lines)) == [Sync("set", "S"), Sync("wait", "MTE3")]


def test_loops_and_branches_hold_what_stands_in_them() -> None:
    lines = [
        *CONSTANTS,
        "scf.for %i = %from to %to step %c1_i32  : i32 {",
        "scf.for %j = %c0_i32 to %c8_i32 step %c1_i32  : i32 {",
        ELEMENT_FROM_GM,
        "}",
        "scf.if %a {",
        ELEMENT_FROM_GM,
        "} else {",
        ELEMENT_TO_UB,
        "} {hivm.unlikely_condition}",
        "}",
    ]
    (outer,) = parse(module(*lines))
    assert isinstance(outer, Loop)
    inner, branch = outer.body
    assert isinstance(inner, Loop)
    assert isinstance(branch, Branch)
    assert (outer.trips, inner.trips) == (None, 8)
    assert branch.is_unlikely
    assert [len(body) for body in (inner.body, branch.then, branch.otherwise)] == [1, 1, 1]


def test_jumps_back_are_loops() -> None:
    lines = [
        "cf.br ^bb1(%49 : i32)",
        "^bb1(%53: i32):  // 2 preds: ^bb0, ^bb5",
        "cf.cond_br %54, ^bb2, ^bb6",
        "^bb2:  // pred: ^bb1",
        "cf.br ^bb3(%49 : i32)",
        "^bb3(%55: i32):  // 2 preds: ^bb2, ^bb4",
        "cf.cond_br %54, ^bb4, ^bb5",
        "^bb4:  // pred: ^bb3",
        ELEMENT_FROM_GM,
        "cf.br ^bb3(%95 : i32)",
        "^bb5:  // pred: ^bb3",
        ELEMENT_TO_UB,
        "cf.br ^bb1(%95 : i32)",
        "^bb6:  // pred: ^bb1",
    ]
    (outer,) = parse(module(*lines))
    assert isinstance(outer, Loop)
    assert [type(node) for node in outer.body] == [Loop, Instruction]


def test_a_loop_over_elements_is_told_from_one_over_tiles() -> None:
    element = [*buffer("%b", 0, "1xf32"), ELEMENT_FROM_GM, ELEMENT_TO_UB, store("%b")]
    tile = [*buffer("%t", 64, "64xf32"), ELEMENT_FROM_GM, load("%t")]
    text = module(
        "scf.for %i = %a to %b step %c {", *element, "}", "scf.for %i = %a to %b step %c {", *tile, "}"
    )
    report = report_of("kernel", "Ascend910B3", text)
    assert (report.loops, report.scalar_loops) == (2, 1)
    assert report.double_buffered("store") == (0, 0)
    assert report.double_buffered("load") == (0, 1)


def test_other_functions_of_the_module_are_not_the_kernel() -> None:
    other = f"  func.func @vf(%arg0: {TILE}) attributes {{a}} {{\n    {ELEMENT_TO_UB}\n    return\n  }}\n"
    text = module(ELEMENT_FROM_GM).replace("  func.func @_kernel", f"{other}  func.func @_kernel")
    assert report_of("kernel", "Ascend910B3", text).instructions["S"] == 1


def test_the_unified_buffer_is_read_off_the_buffers_where_there_is_no_plan() -> None:
    text = module(*buffer("%a", 128, "100xi1"), *buffer("%b", 64, "8x4xbf16"), ub_bits=2031616)
    assert buffered_ub_bytes(text) == 141
    report = report_of("kernel", "Ascend950PR_9589", text)
    assert (report.ub_bytes, report.ub_capacity) == (141, 253952)
    assert report.estimate is None


def test_a_plan_above_the_capacity_does_not_fit() -> None:
    assert report_of("kernel", "Ascend910B3", module(*buffer("%a", UB_BYTES - 4, "1xf32"))).fits
    assert not report_of("kernel", "Ascend910B3", module(*buffer("%a", UB_BYTES, "1xf32"))).fits


@pytest.mark.parametrize(
    ("tile", "num_bytes", "is_element"),
    [
        ("7168xbf16", 14336, False),
        ("896x8xi8", 7168, False),
        ("12xi1", 2, False),
        ("1xf32", 4, True),
        ("1x1xi32", 4, True),
        ("?xf32", 0, False),
        ("?", 0, True),
    ],
)
def test_tiles_have_sizes(tile: str, num_bytes: int, is_element: bool) -> None:
    assert (Buffer(tile).num_bytes, Buffer(tile).is_element) == (num_bytes, is_element)


def test_global_memory_is_no_tile() -> None:
    kinds = f"memref<?xf32, {GM}> to memref<8xf32, {GM}>"
    view = f"%g = memref.reinterpret_cast %arg0 to offset: [%o], sizes: [8], strides: [1] : {kinds}"
    text = module(*buffer("%b", 0, "8xf32"), view, vector("vcopy", "%g", "%b"))
    (found,) = [node for node in parse(text) if isinstance(node, Instruction)]
    assert found.buffers == (Buffer("8xf32"),)


def test_of_a_row_of_a_tile_only_the_row_counts() -> None:
    row = f"%v = memref.subview %tile[%i, 0] [1, 8] [1, 1] : {TILE} to memref<1x8xf32, strided<[8, 1]>, {UB}>"
    cast = f"%w = memref.cast %v : memref<1x8xf32, strided<[8, 1]>, {UB}> to memref<?x?xf32, {UB}>"
    text = module(*two_buffers("%tile", "896x8xf32"), row, cast, vector("vadd", "%w", "%tile"))
    (found,) = [node for node in parse(text) if isinstance(node, Instruction)]
    assert found.buffers == (Buffer("896x8xf32", True, "1x8xf32"), Buffer("896x8xf32", True))
    assert [buffer.num_bytes for buffer in found.buffers] == [32, 28672]


def test_an_instruction_that_is_not_known_is_not_guessed() -> None:
    with pytest.raises(ToolchainError, match="does not know which pipe runs nd2nz"):
        parse(module(vector("nd2nz", "%b")))
    with pytest.raises(ToolchainError, match="which pipe runs copy_gm_to_l1"):
        parse(module(vector("copy_gm_to_l1", "%b")))
    (found,) = parse(module(vector("_pack_kernel_outlined_vf_0", "%b")))
    assert isinstance(found, Instruction)
    assert found.pipe == "V"
