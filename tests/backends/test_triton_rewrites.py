"""Rewrites of tensors: what each changes, what it must leave alone, and that the result parses."""

from __future__ import annotations

import re

import pytest

from moe_triton.backends.cpu.triton import rewrite_tensors as rewrites
from moe_triton.core.errors import ToolchainError
from tests.backends.ir_text import INPUT, STRIDED, function, generic, is_left, opt, rewritten


def test_drop_annotations() -> None:
    text = function(
        "%arg0: tensor<4xi8>", 'annotation.mark %arg0 {overflow_mode = "saturate"} : tensor<4xi8>'
    )
    assert not is_left(rewrites.drop_annotations, text)
    assert "annotation.mark" not in rewritten(rewrites.drop_annotations, text)


LOAD = """
%c0 = arith.constant 0 : index
%reinterpret_cast = memref.reinterpret_cast %arg0 to offset: [%c0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1], offset: ?>>
%alloc = memref.alloc() : memref<64xf32>
memref.copy %reinterpret_cast, %alloc : memref<64xf32, strided<[1], offset: ?>> to memref<64xf32>
%0 = bufferization.to_tensor %alloc restrict writable : memref<64xf32>
"""  # noqa: E501


def test_forward_loads_reads_inputs_where_they_are() -> None:
    text = rewritten(rewrites.forward_loads, function(f"%arg0: memref<?xf32> {INPUT}", LOAD))
    assert "memref.alloc" not in text
    assert "memref.copy" not in text
    assert "bufferization.to_tensor %reinterpret_cast restrict : memref<64xf32, strided" in text


@pytest.mark.parametrize("kind", [1, 2])
def test_forward_loads_copies_what_the_kernel_writes(kind: int) -> None:
    text = function(f"%arg0: memref<?xf32> {{tt.tensor_kind = {kind} : i32}}", LOAD)
    assert is_left(rewrites.forward_loads, text)


def test_forward_loads_keeps_a_buffer_that_is_used_again() -> None:
    used = LOAD + "memref.copy %alloc, %reinterpret_cast : memref<64xf32> to " + STRIDED.format("f32")
    text = function(f"%arg0: memref<?xf32> {INPUT}", used)
    assert is_left(rewrites.forward_loads, text)


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
    cloned = rewritten(rewrites.clone_cheap_producers, text)
    assert opt(cloned, *fuse).count("linalg.generic") == 2
    assert opt(cloned, *fuse).count("arith.extf") == 2


def test_clone_cheap_producers_leaves_a_sole_reader() -> None:
    text = re.sub(r"ins\(%1 : tensor<64xf32>\)", "ins(%0 : tensor<64xf32>)", _two_readers(), count=1)
    assert is_left(rewrites.clone_cheap_producers, text)


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
    text = rewritten(rewrites.store_bfloat16_as_integers, text)
    assert "bf16" not in text
    assert "tensor<64xi16>" in text


def _narrowed(operation: str) -> str:
    body = generic(
        "%1", "%arg0, %arg1, %arg2", "tensor<64xbf16>, tensor<64xi8>, tensor<64xf32>", "%0 : tensor<64xbf16>",
        [
            "^bb0(%in: bf16, %in_0: i8, %in_1: f32, %out: bf16):",
            "  %2 = arith.extf %in : bf16 to f32",
            "  %3 = arith.sitofp %in_0 : i8 to f32",
            f"  %4 = {operation}",
            "  %5 = arith.truncf %4 : f32 to bf16",
            "%5 : bf16",
        ],
    )  # fmt: skip
    arguments = "%arg0: tensor<64xbf16>, %arg1: tensor<64xi8>, %arg2: tensor<64xf32>"
    return function(arguments, "%0 = tensor.empty() : tensor<64xbf16>\n" + body)


@pytest.mark.parametrize(
    ("operation", "needs_choice"),
    [
        ("arith.mulf %3, %2 : f32", False),
        ("arith.addf %2, %2 : f32", False),
        ("arith.mulf %2, %in_1 : f32", True),  # a NaN of all ones would round to a zero
        ("arith.negf %in_1 : f32", True),
    ],
)
def test_a_nan_is_looked_for_where_rounding_could_lose_it(operation: str, needs_choice: bool) -> None:
    text = rewritten(rewrites.store_bfloat16_as_integers, _narrowed(operation))
    assert ("arith.cmpf uno" in text) == needs_choice
    assert ("arith.select" in text) == needs_choice


@pytest.mark.parametrize(
    "line", ["%0 = arith.addf %arg0, %arg0 : bf16", "%0 = arith.constant 1.000000e+00 : bf16"]
)
def test_store_bfloat16_as_integers_refuses_bf16_arithmetic(line: str) -> None:
    with pytest.raises(ToolchainError, match="bf16"):
        rewritten(rewrites.store_bfloat16_as_integers, function("%arg0: bf16", line))


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
    text = rewritten(rewrites.round_through_bits, _rounding("0x4B400000"))
    assert "arith.fptosi" not in text
    assert "arith.subf" not in text
    assert "arith.trunci" in text


def test_round_through_bits_needs_the_one_constant() -> None:
    assert is_left(rewrites.round_through_bits, _rounding("1.000000e+00"))
