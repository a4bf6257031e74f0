"""Control flow of kernels by hand, on real numbers; what the model does not know is refused."""

from __future__ import annotations

import pytest

from autotune.model.kernel_costs.replay.instructions import Stream
from autotune.model.kernel_costs.replay.kernel_cost import ReplayError
from autotune.model.kernel_costs.replay.operations import affine_of, integers_of, memref_of, pipe_of
from moe_triton.core.errors import ToolchainError
from tests.autotune.model.replay_ir import (
    GM,
    TILE_BYTES,
    UB,
    add,
    barrier,
    call,
    constant,
    element,
    flag,
    load,
    loop,
    replay,
    streams,
    tile,
)


def count_of(stream: Stream, kind: str) -> int:
    """Instructions of a kind that a program issues."""
    return sum(stream.instructions[code].kind == kind for code in stream.codes)


def test_a_loop_turns_as_often_as_its_argument_says() -> None:
    kernel_cost = [tile("x"), *loop("none", "a", load())]
    assert [count_of(streams(*kernel_cost, arguments={"a": n})[0], "copy") for n in (0, 1, 7)] == [0, 1, 7]
    found = replay(*kernel_cost, arguments={"a": 7})
    assert (found.turns, found.cycles_per_turn) == (7, 512)


def test_lengths_of_loops_may_stand_in_tables() -> None:
    """Each turn reads its own number of copies, as `arrange` reads how many rows a peer has sent."""
    inner = loop("none", "n", load(), index="j")
    kernel_cost = [tile("x"), *loop("none", "b", *element("n", "a", "i"), *inner)]
    (stream,) = streams(*kernel_cost, arguments={"a": [2, 0, 3], "b": 3})
    assert count_of(stream, "copy") == 5
    assert count_of(stream, "element") == 3
    assert stream.bytes_of("MTE2") == 5 * TILE_BYTES
    assert stream.bytes_of("S") == 3 * 4
    # the turns of the loop inside count, over all turns of the one around it
    assert replay(*kernel_cost, arguments={"a": [2, 0, 3], "b": 3}).turns == 5


def test_programs_share_rows_by_their_index() -> None:
    first = [
        '%p = "hivm.hir.get_block_idx"() : () -> i64',
        '%index = "arith.trunci"(%p) : (i64) -> i32',
        '%low = "arith.muli"(%index, %a) : (i32, i32) -> i32',
        '%end = "arith.addi"(%low, %a) : (i32, i32) -> i32',
        '%high = "arith.minsi"(%end, %b) : (i32, i32) -> i32',
    ]
    found = streams(tile("x"), *first, *loop("low", "high", load()), arguments={"a": 4, "b": 10}, programs=3)
    assert [count_of(stream, "copy") for stream in found] == [4, 4, 2]


def test_values_are_carried_from_turn_to_turn() -> None:
    kernel_cost = [
        '%n:2 = "scf.for"(%none, %a, %one, %one, %none) ({',
        "^bb0(%i: i32, %last: i32, %before: i32):",
        '%next = "arith.addi"(%last, %before) : (i32, i32) -> i32',
        '"scf.yield"(%next, %last) : (i32, i32) -> ()',
        "}) : (i32, i32, i32, i32, i32) -> (i32, i32)",
    ]
    (stream,) = streams(tile("x"), *kernel_cost, *loop("none", "n#1", load()), arguments={"a": 6})
    assert count_of(stream, "copy") == 8  # 1 1 2 3 5 8


def branch(condition: str) -> list[str]:
    """Two copies or one, and a number for each."""
    return [
        f'%n = "scf.if"(%{condition}) ({{',
        load(),
        load(),
        '"scf.yield"(%one) : (i32) -> ()',
        "}, {",
        load(),
        '"scf.yield"(%none) : (i32) -> ()',
        "}) : (i1) -> i32",
    ]


def test_of_two_branches_one_is_taken() -> None:
    for number, copies in ((3, 2 + 1), (2, 1 + 0)):
        compared = '%is = "arith.cmpi"(%a, %b) <{predicate = 4 : i64}> : (i32, i32) -> i1'
        kernel_cost = [tile("x"), compared, *branch("is"), *loop("none", "n", load())]
        (stream,) = streams(*kernel_cost, arguments={"a": number, "b": 2})
        assert count_of(stream, "copy") == copies


def test_arithmetic_is_that_of_the_ir() -> None:
    operations = {
        "divsi": -2,
        "remsi": -1,
        "maxsi": 3,
        "minsi": -7,
        "addi": -4,
        "subi": -10,
        "muli": -21,
        "andi": 1,
        "ori": -5,
        "xori": -6,
        "shrsi": -1,
        "shli": -56,
    }
    for name, expected in operations.items():
        shown = f'%got = "arith.{name}"(%a, %b) : (i32, i32) -> i32'
        compared = '%is = "arith.cmpi"(%got, %c) <{predicate = 0 : i64}> : (i32, i32) -> i1'
        kernel_cost = [tile("x"), shown, compared, *branch("is")]
        (stream,) = streams(*kernel_cost, arguments={"a": -7, "b": 3, "c": expected})
        assert count_of(stream, "copy") == 2, name


def test_sizes_of_tiles_may_be_known_at_run_time_only() -> None:
    part = f"memref<?xf32, strided<[1]>, {UB}>"
    attributes = (
        "operandSegmentSizes = array<i32: 1, 0, 1, 0>, static_offsets = array<i64: 0>, "
        "static_sizes = array<i64: -9223372036854775808>, static_strides = array<i64: 1>"
    )
    whole = f"memref<1024xf32, {UB}>"
    rest = '"affine.min"(%b, %a) <{map = affine_map<()[s0, s1] -> (s1 + 4, s0)>}> : (i32, i32) -> index'
    kernel_cost = [
        tile("x"),
        f"%n = {rest}",
        f'%part = "memref.subview"(%x, %n) <{{{attributes}}}> : ({whole}, index) -> {part}',
        call("load_gm_to_ubuf_1d_float", "zero", "part"),
        call("vadd_1d_float", "part", "part", "x", "zero"),
    ]
    for number, size in ((10, 14), (50, 30)):
        (stream,) = streams(*kernel_cost, arguments={"a": number, "b": 30})
        sizes = [stream.instructions[code].num_bytes for code in stream.codes]
        assert [size for size in sizes if size] == [4 * size, TILE_BYTES]


def test_a_flags_number_may_be_known_at_run_time_only() -> None:
    kernel_cost = [
        tile("x"),
        '%e = "arith.extsi"(%a) : (i32) -> i64',
        flag("set", "MTE2", "V", "e"),
        flag("wait", "MTE2", "V", 3),
    ]
    assert replay(*kernel_cost, arguments={"a": 3}).cycles > 0
    with pytest.raises(ToolchainError, match=r"waited for before it is set"):
        replay(*kernel_cost, arguments={"a": 2})


def test_control_flow_that_depends_on_data_is_refused() -> None:
    kernel_cost = [tile("x"), *element("n", "a", "none"), *loop("none", "n", load())]
    assert count_of(streams(*kernel_cost, arguments={"a": [4]})[0], "copy") == 4
    with pytest.raises(ReplayError, match=r"hand_made.*depends on data.*scf\.for"):
        streams(*kernel_cost, arguments={"a": None})
    from_tile = [
        tile("x", f"memref<1xi32, {UB}>"),
        f'%v = "memref.load"(%x, %first) : (memref<1xi32, {UB}>, index) -> i32',
        '%is = "arith.cmpi"(%v, %one) <{predicate = 4 : i64}> : (i32, i32) -> i1',
        *branch("is"),
    ]
    with pytest.raises(ReplayError, match=r"hand_made.*depends on data.*scf\.if"):
        streams(*from_tile)


def test_data_that_decides_nothing_may_be_unknown() -> None:
    kernel_cost = [
        tile("x"),
        *element("v", "a", "none"),
        '%w = "arith.maxsi"(%v, %one) : (i32, i32) -> i32',
        '%d = "arith.divsi"(%w, %v) : (i32, i32) -> i32',
        '%is = "arith.cmpi"(%d, %one) <{predicate = 4 : i64}> : (i32, i32) -> i1',
        '%s = "arith.select"(%is, %d, %one) : (i1, i32, i32) -> i32',
        *element("other", "b", "s"),
        load(),
    ]
    (stream,) = streams(*kernel_cost, arguments={"a": None, "b": [1]})
    assert count_of(stream, "copy") == 1


def test_a_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ReplayError, match=r"hand_made reads element 2 of a, of which 2 are known"):
        streams(*element("v", "a", "b"), arguments={"a": [1, 2], "b": 2})


def test_scalar_instructions_take_cycles_of_the_scalar_pipe() -> None:
    sums = [f'%v{i} = "arith.addi"(%a, %one) : (i32, i32) -> i32' for i in range(5)]
    assert replay(*sums, arguments={"a": 1}).cycles == 5
    assert replay(*element("v", "a", "none"), arguments={"a": [1]}).cycles == 300
    stored = f'"memref.store"(%none, %x, %first) : (i32, memref<1xi32, {UB}>, index) -> ()'
    assert replay(tile("x", f"memref<1xi32, {UB}>"), stored).cycles == 20
    # a turn: the next index, and the jump
    assert replay(*loop("none", "a"), arguments={"a": 10}).cycles == 10 * 2


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (call("vexotic_1d_float", "x", "x"), "vexotic_1d_float"),
        ('%v = "arith.exotic"(%one) : (i32) -> i32', r"arith\.exotic"),
        ('%v = "arith.cmpi"(%one, %one) <{predicate = 6 : i64}> : (i32, i32) -> i1', r"arith\.cmpi"),
        ('%v = "arith.extsi"(%is) : (i1) -> i32', r"arith\.extsi"),
        ('"hivm.hir.exotic"() : () -> ()', r"hivm\.hir\.exotic"),
        (barrier("M"), "PIPE_M"),
        (flag("set", "FIX", "V"), "PIPE_FIX"),
        ('"scf.while"(%one) ({\n}) : (i32) -> ()', r"scf\.while"),
        (
            f'"memref.store"(%one, %global, %first) : (i32, memref<1xi32, {GM}>, index) -> ()',
            "scalar store to global",
        ),
    ],
)
def test_what_the_model_does_not_know_is_an_error_that_names_it(line: str, named: str) -> None:
    before = [
        tile("x"),
        constant("is", 1, "i1"),
        f'%global = "memref.reinterpret_cast"(%s1) <{{operandSegmentSizes = array<i32: 1, 0, 0, 0>, '
        f"static_offsets = array<i64: 0>, static_sizes = array<i64: 1>, static_strides = array<i64: 1>}}> : "
        f"(memref<?xi8, {GM}>) -> memref<1xi32, {GM}>",
    ]
    streams(*before, add())
    with pytest.raises(ToolchainError, match=named):
        streams(*before, line)


def test_attributes_and_types_are_read() -> None:
    assert pipe_of("#hivm.pipe<PIPE_MTE3>") == "MTE3"
    assert integers_of("array<i64: 0, -9223372036854775808>") == (0, -(1 << 63))
    assert integers_of("array<i64>") == ()
    found = memref_of(f"memref<1x?xbf16, strided<[64, 1], offset: ?>, {GM}>")
    assert (found.sizes, found.element, found.strides, found.space) == ((1, None), "bf16", (64, 1), "gm")
    assert memref_of(f"memref<4x8x2xi1, {UB}>").strides == (16, 2, 1)
    assert memref_of(f"memref<i32, {UB}>").sizes == ()
    for text in ("memref<4xf32>", "memref<4xf99, #hivm.address_space<ub>>", "tensor<4xf32>"):
        with pytest.raises(ToolchainError):
            memref_of(text)


def test_affine_maps_are_read() -> None:
    names, (result,) = affine_of("affine_map<(d0)[s0, s1] -> ((d0 + s1 * 3 - s0 * 3) mod 2)>")
    assert names == ("d0", "s0", "s1")
    assert eval(result, {"d0": 4, "s0": 2, "s1": 1}) == 1
    assert len(affine_of("affine_map<()[s0] -> (32, s0)>")[1]) == 2
    for text in (
        "affine_map<()[s0] -> (s0 ceildiv 2)>",
        "affine_map<()[s0] -> (open(s0))>",
        "affine_map<() -> (s0)>",
    ):
        with pytest.raises(ToolchainError):
            affine_of(text)
