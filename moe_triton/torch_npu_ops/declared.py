"""The arguments of functions as their signatures declare them, and checks on those that are no tensors."""

from __future__ import annotations

import functools
import inspect
import marshal
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from moe_triton.core.checks import check_integer, check_text, shown
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError

# What attributes are called that the plans of two versions, or of both operators, have one name for.
NAMES = {"num_zero": "zero_expert_num", "num_copy": "copy_expert_num", "num_const": "const_expert_num"}
CHECKS: dict[str, Callable[[str, object], object]] = {"int": check_integer, "str": check_text}
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


def exactly(attributes: tuple[Any, ...]) -> bytes:
    """What stands for attributes in the key of a plan: other bytes for 16, 16.0 and True, which are equal.

    Raises:
        ValueError: there is an object among them of a type that is not one of Python's own.
    """
    # Half as long as a tuple of types. Marshal's later formats write the same string in several ways.
    return marshal.dumps(attributes, 2)


def check_group(argument: str, name: object) -> str:
    """Checks that a group is given by its name, and returns it.

    Raises:
        ArgumentError: it is not (161002).
    """
    if isinstance(name, str):
        return check_text(argument, name)
    rule, remedy = "it is the name of a group", "Pass group_name(group)."
    raise ArgumentError(argument, shown(name), rule, remedy, code=INVALID_ARGUMENT)


def check_attributes(attributes: Sequence[Any], kind: type) -> tuple[Any, ...]:
    """Checks the types of a call's attributes, and returns them as Python's own.

    Args:
        attributes: in the order of ``kind``'s fields from group_ep on.
        kind: a dataclass of what plans depend on.

    Raises:
        ArgumentError: one is of another type than its field (161002).
    """
    declared = fields(kind)
    names = [field.name for field in declared]
    begin = names.index("group_ep")
    checked = []
    for field, value in zip(declared[begin:], attributes, strict=False):
        check = check_group if field.name in GROUPS else CHECKS.get(str(field.type))
        checked.append(check(NAMES.get(field.name, field.name), value) if check else value)
    return tuple(checked)
