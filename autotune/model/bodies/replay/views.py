"""`View`: what a value of a memory type stands for, and the operations that make one of another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autotune.model.bodies.replay.attributes import DYNAMIC, MemRef, attribute, integers_of, memref_of
from moe_triton.backends.cpu.triton.ir import Operation
from moe_triton.core.errors import ToolchainError


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
