"""Pieces of MLIR text, and the program that parses it."""

from __future__ import annotations

from collections.abc import Callable

from moe_triton.backends.cpu.triton import ir
from moe_triton.backends.cpu.triton.toolchain import find_toolchain, run_tool

MAP = "#map = affine_map<(d0) -> (d0)>\n"
INPUT, OUTPUT = "{tt.tensor_kind = 0 : i32}", "{tt.tensor_kind = 1 : i32}"
STRIDED = "memref<64x{}, strided<[1], offset: ?>>"


def opt(text: str, *passes: str) -> str:
    return run_tool([find_toolchain().bishengir_opt, "--mlir-print-unique-ssa-ids", *passes, "-"], text)


def module(text: str) -> ir.Operation:
    """As rewrites are given it."""
    return ir.read(opt(text, "--mlir-print-op-generic"))


def rewritten(rewrite: Callable[..., None], text: str, *arguments: object) -> str:
    """What a rewrite makes of a module, in the short form. The compiler has to take it."""
    tree = module(text)
    rewrite(tree, *arguments)
    return opt(str(tree))


def is_left(rewrite: Callable[..., None], text: str, *arguments: object) -> bool:
    """Whether a rewrite leaves a module as it is."""
    tree = module(text)
    before = str(tree)
    rewrite(tree, *arguments)
    return str(tree) == before


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
