"""Every edit of IR text: what it changes, what it must leave alone, and that the result parses."""

from __future__ import annotations

import re

import pytest

from moe_triton.backends.cpu.triton import rewrites
from moe_triton.backends.cpu.triton.toolchain import find_toolchain, run_tool
from moe_triton.errors import ToolchainError

MAP = "#map = affine_map<(d0) -> (d0)>\n"
INPUT, OUTPUT = "{tt.tensor_kind = 0 : i32}", "{tt.tensor_kind = 1 : i32}"
STRIDED = "memref<64x{}, strided<[1], offset: ?>>"


def opt(text: str, *passes: str) -> str:
    return run_tool([find_toolchain().bishengir_opt, "--mlir-print-unique-ssa-ids", *passes, "-"], text)


def function(arguments: str, body: str) -> str:
    indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return f"{MAP}module {{\n  func.func @f({arguments}) {{\n{indented}    return\n  }}\n}}\n"


def generic(result: str, inputs: str, types: str, output: str, body: list[str], indent: str = "") -> str:
    """An elementwise linalg.generic over 64 elements; the body's last line is what it yields."""
    maps = ", ".join(["#map"] * (len(inputs.split(",")) + 1))
    lines = [
        f'{result} = linalg.generic {{indexing_maps = [{maps}], iterator_types = ["parallel"]}} '
        f"ins({inputs} : {types}) outs({output}) {{",
        *body[:-1],
        f"  linalg.yield {body[-1]}",
        "} -> " + output.split(" : ")[1],
    ]
    return "\n".join(indent + line for line in lines)


def test_drop_annotations() -> None:
    text = function(
        "%arg0: tensor<4xi8>", 'annotation.mark %arg0 {overflow_mode = "saturate"} : tensor<4xi8>'
    )
    assert "annotation.mark" not in opt(rewrites.drop_annotations(text))


LOAD = """
%c0 = arith.constant 0 : index
%reinterpret_cast = memref.reinterpret_cast %arg0 to offset: [%c0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1], offset: ?>>
%alloc = memref.alloc() : memref<64xf32>
memref.copy %reinterpret_cast, %alloc : memref<64xf32, strided<[1], offset: ?>> to memref<64xf32>
%0 = bufferization.to_tensor %alloc restrict writable : memref<64xf32>
"""  # noqa: E501


def test_forward_loads_reads_inputs_where_they_are() -> None:
    text = rewrites.forward_loads(function(f"%arg0: memref<?xf32> {INPUT}", LOAD))
    assert "memref.alloc" not in text
    assert "memref.copy" not in text
    assert "%0 = bufferization.to_tensor %reinterpret_cast restrict : memref<64xf32, strided" in text
    opt(text)


@pytest.mark.parametrize("kind", [1, 2])
def test_forward_loads_copies_what_the_kernel_writes(kind: int) -> None:
    text = function(f"%arg0: memref<?xf32> {{tt.tensor_kind = {kind} : i32}}", LOAD)
    assert rewrites.forward_loads(text) == text


def test_forward_loads_keeps_a_buffer_that_is_used_again() -> None:
    used = LOAD + "memref.copy %alloc, %reinterpret_cast : memref<64xf32> to " + STRIDED.format("f32")
    text = function(f"%arg0: memref<?xf32> {INPUT}", used)
    assert rewrites.forward_loads(text) == text


def _two_readers() -> str:
    widened = generic(
        "%1", "%arg0", "tensor<64xf16>", "%0 : tensor<64xf32>",
        ["^bb0(%in: f16, %out: f32):", "  %5 = arith.extf %in : f16 to f32", "%5 : f32"],
    )  # fmt: skip
    readers = [
        generic(
            f"%{n}", "%1", "tensor<64xf32>", "%0 : tensor<64xf32>",
            [
                f"^bb0(%in_{n}: f32, %out_{n}: f32):",
                f"  %{n}0 = arith.{op} %in_{n}, %in_{n} : f32",
                f"%{n}0 : f32",
            ],
        )
        for n, op in ((2, "mulf"), (3, "addf"))
    ]  # fmt: skip
    return function(
        "%arg0: tensor<64xf16>, %arg1: memref<64xf32>, %arg2: memref<64xf32>",
        "\n".join(
            [
                "%0 = tensor.empty() : tensor<64xf32>",
                widened,
                *readers,
                *(
                    f"bufferization.materialize_in_destination %{n} in writable %arg{n - 1} : "
                    "(tensor<64xf32>, memref<64xf32>) -> ()"
                    for n in (2, 3)
                ),
            ]
        ),
    )


def test_clone_cheap_producers_lets_every_reader_fuse() -> None:
    text = _two_readers()
    fuse = ("--linalg-fuse-elementwise-ops", "--canonicalize")
    assert opt(text, *fuse).count("linalg.generic") == 3
    cloned = rewrites.clone_cheap_producers(text)
    assert opt(cloned, *fuse).count("linalg.generic") == 2
    assert opt(cloned, *fuse).count("arith.extf") == 2


def test_clone_cheap_producers_leaves_a_sole_reader() -> None:
    text = re.sub(r"ins\(%1 : tensor<64xf32>\)", "ins(%arg3 : tensor<64xf32>)", _two_readers(), count=1)
    assert rewrites.clone_cheap_producers(text) == text


def test_store_bfloat16_as_integers() -> None:
    body = generic(
        "%1", "%arg0", "tensor<64xbf16>", "%0 : tensor<64xbf16>",
        [
            "^bb0(%in: bf16, %out: bf16):",
            "  %2 = arith.extf %in : bf16 to f32",
            "  %3 = arith.addf %2, %2 : f32",
            "  %4 = arith.truncf %3 : f32 to bf16",
            "%4 : bf16",
        ],
    )  # fmt: skip
    text = function("%arg0: tensor<64xbf16>", "%0 = tensor.empty() : tensor<64xbf16>\n" + body)
    text = rewrites.store_bfloat16_as_integers(text)
    assert "bf16" not in text
    assert "tensor<64xi16>" in text
    opt(text)


@pytest.mark.parametrize(
    "line", ["%0 = arith.addf %arg0, %arg0 : bf16", "%0 = arith.constant 1.000000e+00 : bf16"]
)
def test_store_bfloat16_as_integers_refuses_bf16_arithmetic(line: str) -> None:
    with pytest.raises(ToolchainError, match="bf16"):
        rewrites.store_bfloat16_as_integers(function("%arg0: bf16", line))


def _rounding(magic: str) -> str:
    body = generic(
        "%1", "%arg0", "tensor<64xf32>", "%0 : tensor<64xi8>",
        [
            "^bb0(%in: f32, %out: i8):",
            "  %2 = arith.addf %in, %cst : f32",
            "  %3 = arith.subf %2, %cst : f32",
            "  %4 = arith.fptosi %3 : f32 to i8",
            "%4 : i8",
        ],
    )  # fmt: skip
    head = f"%cst = arith.constant {magic} : f32\n%0 = tensor.empty() : tensor<64xi8>\n"
    return function("%arg0: tensor<64xf32>", head + body)


def test_round_through_bits() -> None:
    text = rewrites.round_through_bits(_rounding("0x4B400000"))
    assert "arith.fptosi" not in text
    assert "arith.subf" not in text
    assert "arith.trunci" in opt(text)


def test_round_through_bits_needs_the_one_constant() -> None:
    text = _rounding("1.000000e+00")
    assert rewrites.round_through_bits(text) == text


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
    text = opt(rewrites.store_in_place(_stored()))
    assert "memref.copy" not in text
    assert "alloca" not in text
    assert "outs(%reinterpret_cast : memref<64xi8, strided" in text


def test_store_in_place_leaves_what_is_read_back_or_conditional() -> None:
    read_too = _stored(kind="{tt.tensor_kind = 2 : i32}")
    assert rewrites.store_in_place(read_too) == read_too
    conditional = _stored(between="    scf.if %arg2 {\n", copy_indent="      ")
    opt(conditional)
    assert rewrites.store_in_place(conditional) == conditional


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
    text = opt(rewrites.carry_in_place(_carried()))
    assert "memref.alloc()" not in text
    assert "memref.copy %alloca_0, %arg4" in text
    assert "scf.yield %arg4" in text


def test_carry_in_place_keeps_an_initial_value_that_is_needed_later() -> None:
    text = _carried(extra_use="    memref.copy %alloca, %arg2 : memref<64xf32> to memref<64xf32>\n")
    opt(text)
    assert rewrites.carry_in_place(text) == text


def test_copy_partial_blocks_with_loops() -> None:
    partial = "memref.copy %arg0, %arg1 : memref<?xi32, strided<[1], offset: ?>> to memref<?xi32>"
    text = function("%arg0: memref<?xi32, strided<[1], offset: ?>>, %arg1: memref<?xi32>", partial)
    assert "linalg.copy" in opt(rewrites.copy_partial_blocks_with_loops(text))
    whole = function(
        "%arg0: memref<4xi32>, %arg1: memref<4xi32>",
        "memref.copy %arg0, %arg1 : memref<4xi32> to memref<4xi32>",
    )
    assert rewrites.copy_partial_blocks_with_loops(whole) == whole


LLVM_FUNCTION = (
    "module {\n"
    "  llvm.func @f(%arg0: !llvm.ptr, %arg1: !llvm.ptr, %arg2: i64) attributes {a = 0 : i64} {\n"
    "    llvm.return\n  }\n}\n"
)


def test_mark_noalias_marks_every_pointer_of_the_kernel() -> None:
    text = rewrites.mark_noalias(LLVM_FUNCTION, "f")
    assert text.count("!llvm.ptr {llvm.noalias}") == 2
    opt(text)
    assert rewrites.mark_noalias(LLVM_FUNCTION, "other") == LLVM_FUNCTION


def test_set_target_triple_with_and_without_attributes() -> None:
    for head in ("module {", "module attributes {a.b = 1 : i64} {"):
        text = rewrites.set_target_triple(LLVM_FUNCTION.replace("module {", head), "x86_64-unknown-linux-gnu")
        assert 'llvm.target_triple = "x86_64-unknown-linux-gnu"' in opt(text, "--allow-unregistered-dialect")


def test_prefer_wide_vectors_marks_every_function() -> None:
    text = LLVM_FUNCTION.replace("}\n}\n", "}\n  llvm.func @g(%arg0: i64) {\n    llvm.return\n  }\n}\n")
    assert opt(rewrites.prefer_wide_vectors(text)).count("prefer-vector-width") == 2


def test_append_packed_entry_loads_each_argument_from_its_word() -> None:
    kernel = "".join(
        f"%arg{i}: {t}, " for i, t in enumerate(["!llvm.ptr", "!llvm.ptr", "i64", "i64", "i64"] * 3)
    )
    programs = ", ".join(f"%p{i}: i32" for i in range(6))
    text = f"module {{\n  llvm.func @f({kernel}%s: i64, {programs}) {{\n    llvm.return\n  }}\n}}\n"
    text = opt(rewrites.append_packed_entry(text, "f", ["*fp32", "i64"]))
    assert f"llvm.func @{rewrites.ENTRY_SYMBOL}(%arg0: !llvm.ptr, %arg1: i32, %arg2: i32)" in text
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
    text = opt(rewrites.widen_fp16_loops(_loop(conversion)))
    assert text.count("width = 16") == 1
    assert re.search(r"llvm\.br \^bb1\(%\d+ : i64\) \{loop_annotation", text)


def test_widen_fp16_loops_leaves_other_loops() -> None:
    text = _loop("%3 = llvm.fadd %arg3, %arg3 : f32")
    assert rewrites.widen_fp16_loops(text) == text
