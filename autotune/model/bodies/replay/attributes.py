"""Attributes and types, which the reader of MLIR's generic form keeps as text."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from moe_triton.core.errors import ToolchainError

PIPES = ("S", "MTE2", "V", "MTE3")
EVERY_PIPE = "ALL"

DYNAMIC = -(1 << 63)
"""What an array of static sizes has in the place of a number that is an operand."""

ELEMENT_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32}


@dataclass(frozen=True)
class MemRef:
    """A type ``memref<sizes x element, layout, space>``.

    Attributes:
        sizes: None where it is only known at run time.
        element: ``"bf16"``, ``"i32"`` and so on.
        strides: in elements; None where they are only known at run time.
        space: ``"gm"``, global memory, or ``"ub"``, the unified buffer.
    """

    sizes: tuple[int | None, ...]
    element: str
    strides: tuple[int | None, ...]
    space: str

    @property
    def element_bits(self) -> int:
        """The number of bits of one element."""
        return ELEMENT_BITS[self.element]


def attribute(attributes: Mapping[str, str], name: str) -> str:
    """An operation's attribute.

    Raises:
        ToolchainError: it has none of this name.
    """
    if name not in attributes:
        raise ToolchainError(f"there is no attribute {name!r} among {dict(attributes)}")
    return attributes[name]


def pipe_of(text: str) -> str:
    """``#hivm.pipe<PIPE_MTE3>`` is ``"MTE3"``; ``"ALL"`` stands for all.

    Raises:
        ToolchainError: it is none of a vector core's pipes.
    """
    name = _inside(text, "#hivm.pipe<PIPE_")
    if name not in (*PIPES, EVERY_PIPE):
        raise ToolchainError(f"{text} is no pipe of a vector core: {', '.join(PIPES)} or {EVERY_PIPE}")
    return name


def event_of(text: str) -> int:
    """``#hivm.event<EVENT_ID3>`` is 3."""
    return int(_inside(text, "#hivm.event<EVENT_ID"))


def _inside(text: str, prefix: str) -> str:
    if not (text.startswith(prefix) and text.endswith(">")):
        raise ToolchainError(f"{text} is not of the form {prefix}...>")
    return text[len(prefix) : -1]


def integer_of(text: str) -> int:
    """``4 : i64`` is 4; ``true`` is 1.

    Raises:
        ToolchainError: it is no integer.
    """
    number = text.partition(" : ")[0]
    if number in ("true", "false"):
        return int(number == "true")
    try:
        return int(number)
    except ValueError:
        raise ToolchainError(f"{text} is no integer") from None


def integers_of(text: str) -> tuple[int, ...]:
    """``array<i64: 1, -9223372036854775808>``; ``array<i64>`` has none."""
    numbers = _inside(text, "array<").partition(":")[2]
    return tuple(int(number) for number in numbers.split(",") if number.strip())


def memref_of(text: str) -> MemRef:
    """A type of memory.

    Raises:
        ToolchainError: it is of another form, or in another space.
    """
    head, _, rest = _inside(text, "memref<").partition(", ")
    *dims, element = head.split("x")
    space = rest.rpartition("#hivm.address_space<")[2].rstrip(">")
    if element not in ELEMENT_BITS or space not in ("gm", "ub"):
        raise ToolchainError(f"{text} is no memory of a known element type and space")
    sizes = tuple(_size(dim) for dim in dims)
    return MemRef(sizes, element, _strides(rest, sizes), space)


def _size(text: str) -> int | None:
    return None if text == "?" else int(text)


def _strides(layout: str, sizes: tuple[int | None, ...]) -> tuple[int | None, ...]:
    if layout.startswith("strided<["):
        return tuple(_size(stride) for stride in layout[len("strided<[") :].partition("]")[0].split(", "))
    inner = [sizes[i + 1 :] for i in range(len(sizes))]
    return tuple(None if None in part else math.prod(cast(tuple[int, ...], part)) for part in inner)


_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.FloorDiv, ast.USub)
_AFFINE = (ast.Tuple, ast.BinOp, ast.UnaryOp, ast.expr_context, ast.Constant, *_OPERATORS)


@functools.cache
def affine_of(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``affine_map<()[s0, s1] -> (s1 + 64, s0)>`` as Python: names of its operands, and its results.

    Raises:
        ToolchainError: it has something else than sums, products, ``mod`` and ``floordiv``.
    """
    operands, _, results = _inside(text, "affine_map<").partition(" -> ")
    names = operands.replace("()", "").strip("()[]").replace(")[", ", ").split(", ")
    python = results.replace(" mod ", " % ").replace(" floordiv ", " // ")
    try:
        tree = ast.parse(python if python.endswith(",)") else f"{python[:-1]},)", mode="eval").body
    except SyntaxError:
        raise ToolchainError(f"{text} is no affine map that is known") from None
    for node in ast.walk(tree):
        if not isinstance(node, _AFFINE) and not (isinstance(node, ast.Name) and node.id in names):
            raise ToolchainError(f"{text} is no affine map that is known")
    assert isinstance(tree, ast.Tuple)
    return tuple(filter(None, names)), tuple(f"({ast.unparse(each)})" for each in tree.elts)
