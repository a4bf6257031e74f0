"""The arguments of functions as their signatures declare them, and checks on those that are no tensors."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
