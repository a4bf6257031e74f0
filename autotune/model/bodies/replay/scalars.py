"""Operations on registers, as Python; and what Python has no operator for.

Integers are as wide as they need to be: kernels compute with indices and addresses, which do not overflow.
Floating-point numbers are data, hence unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.model.bodies.replay.attributes import affine_of, attribute, integer_of
from autotune.model.bodies.replay.unknown import UNKNOWN, Number
from moe_triton.backends.cpu.triton.ir import Operation
from moe_triton.core.errors import ToolchainError

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
