"""Reading IR in the generic form and writing it: the same module comes back, and anything else is refused."""

from __future__ import annotations

import pytest

from moe_triton.backends.cpu.triton import ir
from moe_triton.backends.cpu.triton.frontend import tensor_ir
from moe_triton.core.errors import ToolchainError
from moe_triton.kernels.route import route_kernel
from tests.backends.ir_text import MAP, function, module, opt

LOOP = """
%c = arith.constant 1 : index
%0:2 = scf.for %i = %c to %c step %c iter_args(%a = %arg0, %b = %arg0) -> (f32, f32) {
  %1 = scf.if %arg1 -> f32 {
    %2 = arith.addf %a, %b : f32
    scf.yield %2 : f32
  } else {
    scf.yield %a : f32
  }
  scf.yield %1, %b : f32, f32
}
%2 = arith.mulf %0#0, %0#1 : f32
memref.store %2, %arg2[%c] : memref<4xf32, strided<[1], offset: ?>>
"""
TEXT = function(
    "%arg0: f32, %arg1: i1, %arg2: memref<4xf32, strided<[1], offset: ?>> {tt.tensor_kind = 1 : i32}", LOOP
)


def test_what_is_read_is_written() -> None:
    assert opt(str(module(TEXT))) == opt(TEXT)
    kernel = tensor_ir(route_kernel(), named_ops=False)
    assert opt(str(ir.read(kernel))) == opt(kernel)


def test_aliases_are_written_out() -> None:
    text = f'{MAP}module {{\n  func.func private @f() attributes {{map = #map, other = "#map"}}\n}}\n'
    (found,) = ir.read(opt(text, "--mlir-print-op-generic", "--allow-unregistered-dialect")).walk("func.func")
    assert found.attributes["map"] == "affine_map<(d0) -> (d0)>"


def test_makers_and_users_of_values() -> None:
    tree = module(TEXT)
    (loop,) = tree.walk("scf.for")
    (product,) = tree.walk("arith.mulf")
    assert loop.results == product.operands
    assert tree.makers()[loop.results[1]] is loop
    assert tree.users(loop.results[0]) == [product]
    total, carried = tree.walk("arith.addf")[0], list(loop.body.arguments)[1]
    assert tree.users(carried) == [total, tree.walk("scf.yield")[1]]


def test_operations_are_put_in_the_place_of_another() -> None:
    tree = module(TEXT)
    product = tree.walk("arith.mulf")[0]
    left, right = product.operands
    product.replace(f"""
        %first = "arith.addf"({left}, {right}) : (f32, f32) -> f32
        {product.result} = "arith.negf"(%first) : (f32) -> f32
    """)
    text = opt(str(tree))
    assert "arith.mulf" not in text
    assert text.index("arith.addf %0#0, %0#1") < text.index("arith.negf") < text.index("memref.store")


@pytest.mark.parametrize("line", ["%0 = arith.constant 1 : index", '%0 = "a.b"(%c) : i32', '"a.b"() ({'])
def test_another_form_is_refused(line: str) -> None:
    with pytest.raises(ToolchainError, match="not of the generic form"):
        ir.read(f'"builtin.module"() ({{\n  {line}\n}}) : () -> ()\n')
