"""Operations of the IR as Python: attributes and types, views of memory, registers, and what is not known.

Attributes and types are text to the reader of MLIR's generic form. Integers are as wide as they need to be:
kernels compute with indices and addresses, which do not overflow. Floating-point numbers are data, hence
`UNKNOWN`, as is whatever else depends on data which the model does not have, such as a row's elements.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

from moe_triton.backends.cpu.triton.ir import Operation
from moe_triton.core.errors import ToolchainError

PIPES = ("S", "MTE2", "V", "MTE3")
EVERY_PIPE = "ALL"

DYNAMIC = -(1 << 63)
"""What an array of static sizes has in the place of a number that is an operand."""

ELEMENT_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32}
_TEMPLATES = {
    "arith.addi": "({0} + {1})",
    "arith.subi": "({0} - {1})",
    "arith.muli": "({0} * {1})",
    "arith.andi": "({0} & {1})",
    "arith.ori": "({0} | {1})",
    "arith.xori": "({0} ^ {1})",
    "arith.shli": "({0} << {1})",
    "arith.shrsi": "({0} >> {1})",
    "arith.divsi": "divide({0}, {1})",
    "arith.remsi": "remainder({0}, {1})",
    "arith.maxsi": "largest({0}, {1})",
    "arith.minsi": "smallest({0}, {1})",
    "arith.select": "select({0}, {1}, {2})",
}
_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
"""By MLIR's number of a predicate; those of unsigned numbers follow, which no kernel has."""

_CASTS = ("arith.extsi", "arith.extui", "arith.index_cast", "arith.trunci")
_FLOATS = (
    *("arith.addf", "arith.subf", "arith.mulf", "arith.divf", "arith.cmpf", "arith.bitcast", "arith.extf"),
    *("arith.sitofp", "arith.fptosi", "math.sqrt"),
)
"""Operations on data, whose results are unknown."""

FREE = ("arith.constant", *_CASTS)
"""They take no instruction: constants are immediate, and all registers have 64 bits."""

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.FloorDiv, ast.USub)
_AFFINE = (ast.Tuple, ast.BinOp, ast.UnaryOp, ast.expr_context, ast.Constant, *_OPERATORS)


class UndecidedError(Exception):
    """Control flow asks for a value that is not known."""


class Unknown:
    """Whatever is computed from it is unknown too; nothing can be decided by it."""

    def _itself(self, *_: Any) -> Unknown:
        return self

    def _undecided(self) -> NoReturn:
        raise UndecidedError

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _itself
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __neg__ = _itself
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _itself
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _itself
    __lt__ = __le__ = __gt__ = __ge__ = _itself
    __bool__ = __index__ = __int__ = _undecided
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return self

    def __ne__(self, other: object) -> Any:
        return self

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = Unknown()
Number = int | Unknown


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


@dataclass(frozen=True)
class View:
    """Part of an argument in global memory, or of the unified buffer. Numbers are Python text.

    Attributes:
        type: of the memory.
        count: number of its elements.
        argument: of the function, by its index; None in the unified buffer.
        offset: elements from the argument's address on; only of global memory.
    """

    type: MemRef
    count: str
    argument: int | None = None
    offset: str = "0"


Value = str | View
"""What a value of the IR is while it is translated: Python text of a number, or memory."""


def whole(type_: str, argument: int | None = None) -> View:
    """Memory of a type, from its begin; of an argument all that there is.

    Raises:
        ToolchainError: memory of the unified buffer whose size is only known at run time.
    """
    memory = memref_of(type_)
    if None in memory.sizes and argument is None:
        raise ToolchainError(f"the size of {type_} is only known at run time")
    known = [size for size in memory.sizes if size is not None]
    return View(memory, str(math.prod(known)) if len(known) == len(memory.sizes) else "UNKNOWN", argument)


def is_view(operation: Operation) -> bool:
    """Whether an operation only looks at memory otherwise."""
    return operation.name in _MAKERS


def view_of(operation: Operation, operands: Sequence[Value]) -> View:
    """The first result of an operation that makes a view of another one."""
    source = operands[0]
    if not isinstance(source, View):
        raise ToolchainError(f"the model does not know the operation {operation}")
    return _MAKERS[operation.name](operation, source, [str(number) for number in operands[1:]])


def _same(operation: Operation, source: View, _numbers: list[str]) -> View:
    """All elements in the same place. A cast to a type that says less keeps what is known."""
    if operation.name == "memref.cast":
        return source
    return replace(source, type=memref_of(operation.result_types[0]))


def _reinterpreted(operation: Operation, source: View, numbers: list[str]) -> View:
    offsets, sizes = _given(operation, numbers)
    place = offsets[0] if source.argument is not None else "0"
    return View(memref_of(operation.result_types[0]), _product(sizes), source.argument, place)


def _sub(operation: Operation, source: View, numbers: list[str]) -> View:
    offsets, sizes = _given(operation, numbers)
    terms = [source.offset]
    for offset, stride in zip(offsets, source.type.strides, strict=True):
        terms.append("UNKNOWN" if stride is None and offset != "0" else f"{offset} * {stride or 0}")
    result = memref_of(operation.result_types[0])
    return View(result, _product(sizes), source.argument, f"({' + '.join(terms)})")


def _given(operation: Operation, numbers: list[str]) -> tuple[list[str], list[str]]:
    """Offsets and sizes: static ones are attributes, the others operands, in order."""
    segments = integers_of(attribute(operation.attributes, "operandSegmentSizes"))
    offsets, sizes = numbers[: segments[1]], numbers[segments[1] : segments[1] + segments[2]]
    return _filled(operation, "static_offsets", offsets), _filled(operation, "static_sizes", sizes)


def _filled(operation: Operation, name: str, dynamic: list[str]) -> list[str]:
    given = iter(dynamic)
    static = integers_of(attribute(operation.attributes, name))
    return [next(given) if number == DYNAMIC else str(number) for number in static]


def _product(sizes: Sequence[str]) -> str:
    if all(size.isdigit() for size in sizes):
        return str(math.prod(map(int, sizes)))
    return f"({' * '.join(size for size in sizes if size != '1')})"


_MAKERS: dict[str, Callable[[Operation, View, list[str]], View]] = {
    "memref.cast": _same,
    "memref.collapse_shape": _same,
    "memref.expand_shape": _same,
    "memref.extract_strided_metadata": _same,
    "memref.reinterpret_cast": _reinterpreted,
    "memref.subview": _sub,
}


def divide(left: Number, right: Number) -> Number:
    """Rounds towards zero."""
    if left is UNKNOWN or right is UNKNOWN:
        return UNKNOWN
    quotient = abs(int(left)) // abs(int(right))
    return quotient if (left < 0) == (right < 0) else -quotient


def remainder(left: Number, right: Number) -> Number:
    """Has the sign of the left one."""
    return left - divide(left, right) * right


def largest(*values: Number) -> Number:
    """The largest of some integers; unknown if any of them is."""
    return UNKNOWN if any(value is UNKNOWN for value in values) else max(int(value) for value in values)


def smallest(*values: Number) -> Number:
    """The smallest of some integers; unknown if any of them is."""
    return UNKNOWN if any(value is UNKNOWN for value in values) else min(int(value) for value in values)


def select(condition: Number, first: Any, second: Any) -> Any:
    """The first one if the condition holds; unknown if the condition is."""
    if condition is UNKNOWN:
        return UNKNOWN
    return first if condition else second


def turns_if(condition: Number) -> int:
    """Turns of a loop that stands for a branch: one, if the condition is not known."""
    return 1 if condition is UNKNOWN else int(condition)


GLOBALS = {
    "UNKNOWN": UNKNOWN,
    "divide": divide,
    "remainder": remainder,
    "largest": largest,
    "smallest": smallest,
    "select": select,
    "turns_if": turns_if,
}
"""What generated code sees."""


def is_float(type_: str) -> bool:
    """Whether a type is one of floating-point numbers."""
    return type_ in ("f16", "bf16", "f32", "f64")


def expression(operation: Operation, operands: Sequence[str]) -> str:
    """The result of an operation on registers, as Python.

    Args:
        operands: as Python.

    Raises:
        ToolchainError: the operation is not known.
    """
    name, type_ = operation.name, operation.result_types[0] if operation.result_types else ""
    if name in _FLOATS or (name in ("arith.constant", "arith.select") and is_float(type_)):
        return "UNKNOWN"
    if name == "arith.constant":
        return f"{integer_of(attribute(operation.attributes, 'value'))}"
    if name == "arith.cmpi":
        predicate = integer_of(attribute(operation.attributes, "predicate"))
        if predicate < len(_COMPARISONS):
            return f"({operands[0]} {_COMPARISONS[predicate]} {operands[1]})"
    if name in _CASTS:
        return _cast(operation, operands[0])
    if name.startswith("affine."):
        return _affine(operation, operands)
    if name in _TEMPLATES:
        return _TEMPLATES[name].format(*operands)
    raise ToolchainError(f"the model does not know the operation {operation}")


def _cast(operation: Operation, operand: str) -> str:
    """Integers keep their value; i1 is 0 or 1, which only zero extension keeps."""
    (before,), (after,) = operation.operand_types, operation.result_types
    if after == "i1":
        return f"({operand} & 1)"
    if (before == "i1") != (operation.name == "arith.extui"):
        raise ToolchainError(f"the model does not know the operation {operation}")
    return operand


def _affine(operation: Operation, operands: Sequence[str]) -> str:
    names, results = affine_of(attribute(operation.attributes, "map"))
    joined = {"affine.apply": "{}", "affine.min": "smallest({})", "affine.max": "largest({})"}
    if operation.name not in joined or (operation.name == "affine.apply" and len(results) != 1):
        raise ToolchainError(f"the model does not know the operation {operation}")
    inner = joined[operation.name].format(", ".join(results))
    return f"(lambda {', '.join(names)}: {inner})({', '.join(operands)})" if names else inner
