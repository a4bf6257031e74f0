"""The arguments of functions as their signatures declare them, and checks on those that are no tensors.

Among them are the integers that stand for dtypes: torch's own numbers, and torch_npu's.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from moe_triton.core.checks import check_integer, check_number, check_text, shown
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError

CHECKS: dict[type, Callable[[str, object], object]] = {
    int: check_integer,
    str: check_text,
    float: check_number,
}
GROUPS = ("group_ep", "group_tp")


@dataclass(frozen=True)
class Argument:
    """An argument as a signature has it.

    Attributes:
        name: of it.
        kind: what it must be: `torch.Tensor`, int, str, float or another type.
        optional: whether None is one of its values.
        default: what it is if left out; `inspect.Parameter.empty` where it cannot be.
    """

    name: str
    kind: type
    optional: bool
    default: object


@functools.cache
def arguments_of(function: Callable[..., Any]) -> tuple[Argument, ...]:
    """The arguments of a function or a constructor, in order, from its signature and type hints."""
    plain = inspect.unwrap(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    hints = typing.get_type_hints(plain)
    return tuple(
        _argument(parameter, hints[parameter.name])
        for parameter in inspect.signature(plain).parameters.values()
        if parameter.name != "self"
    )


def _argument(parameter: inspect.Parameter, hint: Any) -> Argument:
    kinds = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = list(typing.get_args(hint))
    given = [kind for kind in kinds if kind is not type(None)]
    kind = given[0]
    if typing.get_origin(kind) is typing.Literal:
        kind = type(typing.get_args(kind)[0])
    return Argument(parameter.name, kind, len(given) < len(kinds), parameter.default)


def check_group(argument: str, name: object) -> str:
    """Checks that a group is given by its name, and returns it.

    Raises:
        ArgumentError: it is not (161002).
    """
    if isinstance(name, str):
        return check_text(argument, name)
    raise invalid(argument, shown(name), "it is the name of a group", "Pass group_name(group).")


def invalid(argument: str, value: object, rule: str, remedy: str) -> ArgumentError:
    """The error of a wrong type, dtype or group (161002)."""
    return ArgumentError(argument, value, rule, remedy, code=INVALID_ARGUMENT)


def check_attribute(argument: Argument, value: Any) -> Any:
    """Checks the type of an attribute of a call, and returns it as Python's own.

    Raises:
        ArgumentError: it is of another type than its signature says (161002).
    """
    if argument.name in GROUPS:
        return check_group(argument.name, value)
    # What may be left out is a text; or a dtype, or a number that stands for one: the rules refuse it.
    if argument.optional and (value is None or argument.kind is not str):
        return value
    return CHECKS[argument.kind](argument.name, value)


Given = TypeVar("Given")
Found = TypeVar("Found")

# torch's ScalarType numbers, then those that torch_npu adds; formats that torch lacks travel as bytes.
BY_NUMBER: dict[int, torch.dtype] = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    290: torch.uint8,  # hifloat8
    291: torch.float8_e5m2,
    292: torch.float8_e4m3fn,
    296: torch.uint8,  # float4_e2m1fn, two a byte
    297: torch.uint8,  # float4_e1m2fn, two a byte
}

# torch's own number where several stand for one dtype: the first.
_NUMBERS = {dtype: number for number, dtype in reversed(BY_NUMBER.items())}


def number_of(argument: str, dtype: torch.dtype) -> int:
    """The number that stands for a dtype, as the schemas of operators have it.

    Raises:
        ArgumentError: there is none (161002).
    """
    remedy = "Pass one of these, or the number that torch_npu has for it."
    return _found(argument, dtype, _NUMBERS, list(map(str, _NUMBERS)), remedy)


def dtype_of(argument: str, number: int) -> torch.dtype:
    """The dtype that a number stands for.

    Raises:
        ArgumentError: none that we know (161002).
    """
    remedy = "Pass the number of a dtype, as torch_npu has them."
    return _found(argument, number, BY_NUMBER, sorted(BY_NUMBER), remedy)


def _found(
    argument: str, given: Given, known: Mapping[Given, Found], shown: Sequence[object], remedy: str
) -> Found:
    if given not in known:
        raise invalid(argument, given, f"it is one of {shown}", remedy)
    return known[given]
