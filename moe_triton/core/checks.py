"""Checks on single arguments, for public calls and kernels alike."""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
import reprlib
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from moe_triton.core.errors import INVALID_ARGUMENT, NULL_ARGUMENT, ArgumentError
from moe_triton.core.plain_tensors import fault_of

Choice = TypeVar("Choice")
Record = TypeVar("Record")

CPU = torch.device("cpu")
# Kernels count microseconds and clock cycles in 64 bits; this is 31 years.
MIN_SECONDS, MAX_SECONDS = 1e-6, 1e9
# Types that report their own device correctly, unlike wrappers.
_OF_DEVICES = (torch.Tensor, torch.nn.Parameter)
_invalid = partial(ArgumentError, code=INVALID_ARGUMENT)
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def check_tensor(
    name: str,
    value: object,
    *,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device = CPU,
) -> torch.Tensor:
    """Checks type, memory, dtype, device, shape and contiguity.

    Args:
        name: of the argument, for the message.
        value: what the user passed.
        shape: expected sizes; a string stands for any size and names it.
        dtypes: allowed dtypes.
        device: where it must be.

    Returns:
        The tensor.

    Raises:
        ArgumentError: the first thing that is wrong.
    """
    if (
        isinstance(value, torch.Tensor)
        and fault_of(value) is None
        and value.dtype in dtypes
        # Asking for a device takes longer than all the rest.
        and (value.is_cpu if device is CPU else value.device.type == device.type)
        and _fits(value.shape, shape)
        and value.is_contiguous()
    ):
        return value
    raise _reason(name, value, shape, dtypes, device)


def contiguous(
    name: str,
    value: object,
    *,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device = CPU,
) -> torch.Tensor:
    """A tensor as `check_tensor` has it, of one that may be strided.

    Raises:
        ArgumentError: the first thing that is wrong.
    """
    is_usual = type(value) is torch.Tensor and value.layout is torch.strided
    if not is_usual or not value.is_contiguous():  # type: ignore[attr-defined]
        error = not_plain_error(name, value, device)  # before a subclass is asked, which may do anything
        if error is not None:
            raise error
        assert isinstance(value, torch.Tensor)
        if value.dtype in dtypes and _fits(value.shape, shape):  # a view may be larger than any memory
            value = value.contiguous()
    return check_tensor(name, value, shape=shape, dtypes=dtypes, device=device)


def _fits(sizes: Sequence[int], shape: Sequence[int | str]) -> bool:
    if len(sizes) != len(shape):
        return False
    for have, want in zip(sizes, shape, strict=True):  # a loop: this runs in every call
        if have != want and not isinstance(want, str):
            return False
    return True


def _reason(
    name: str, value: object, shape: Sequence[int | str], dtypes: Sequence[torch.dtype], device: torch.device
) -> ArgumentError:
    """The first thing that is wrong with a tensor."""
    if (error := not_plain_error(name, value, device)) is not None:
        return error
    assert isinstance(value, torch.Tensor)
    if value.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        remedy = f"Convert it: {name}.to(torch.{allowed.split()[0]})."
        return _invalid(name, f"of dtype {value.dtype}", f"it must be {allowed}", remedy)
    if not _fits(value.shape, shape):
        have, want = tuple(value.shape), ", ".join(str(size) for size in shape)
        return ArgumentError(
            name, f"of shape {have}", f"it must be ({want})", "Reshape it, or rebuild the buffer."
        )
    return ArgumentError(
        name, f"strided {value.stride()}", "it must be contiguous", f"Pass {name}.contiguous()."
    )


def not_plain_error(name: str, value: object, device: torch.device | None = None) -> ArgumentError | None:
    """The error of an argument that must be a tensor with memory, of any dtype and shape.

    Args:
        name: of the argument.
        value: what the user passed.
        device: of its memory; None for any.

    Returns:
        The error, or None.
    """
    if value is None:
        return ArgumentError(name, None, "it is needed", "Pass a tensor.", code=NULL_ARGUMENT)
    if not isinstance(value, torch.Tensor):
        return _invalid(name, f"a {type(value).__name__}", "it must be a torch.Tensor", "Pass a tensor.")
    fault = fault_of(value)
    if device is not None and type(value) in _OF_DEVICES and value.device.type != device.type:
        rule = f"this buffer's back end works on {device.type}"
        return _invalid(name, f"on {value.device}", rule, f"Move it: {name}.to('{device.type}').")
    return None if fault is None else _invalid(name, fault.value, fault.rule, fault.remedy.format(name=name))


def check_choice(
    name: str, value: object, choices: Sequence[Choice], remedy: str = "Pass one of them."
) -> Choice:
    """Checks that an option is one of those supported, of the same type, and returns that one.

    Raises:
        ArgumentError: it is not.
    """
    for choice in choices:  # the common case: this runs in calls
        if value is choice:
            return choice
    given = str.__str__(value) if isinstance(value, str) else value
    kinds = [type(choice) for choice in choices]
    for choice in choices:
        # By type first: 1.0 and True are equal to 1, and tensors answer == with tensors.
        if type(given) is type(choice) and given == choice:
            return choice
    text = repr(value) if type(value) in kinds and type(value) is not str else shown(value)
    raise ArgumentError(name, text, f"it must be one of {list(choices)}", remedy)


def check_positive(name: str, value: float) -> None:
    """Checks that a number is positive.

    Raises:
        ArgumentError: it is not.
    """
    if not value > 0:
        raise ArgumentError(name, value, "it must be positive", "Pass a larger number.")


def check_integer(name: str, value: object, *, code: int = INVALID_ARGUMENT) -> int:
    """Checks that a value is an integer, Python's or numpy's, and no bool, and returns it as Python's.

    It comes before a value is compared or made a key: 16.0 and True are equal to integers.

    Args:
        name: of the argument.
        value: what the user passed.
        code: status code of the error.

    Raises:
        ArgumentError: it is something else.
    """
    if type(value) is int:
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    raise ArgumentError(name, shown(value), "it must be an integer", "Pass an int.", code=code)


def is_listed(value: object) -> bool:
    """Whether a value is a sequence other than a text, or an array or a tensor of one dimension."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value.ndim == 1
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def listed(name: str, value: Any, most: int, remedy: str) -> list[object]:
    """What such a value holds.

    Args:
        name: of the argument.
        value: what the user passed.
        most: that there may be.
        remedy: what to do about others.

    Raises:
        ArgumentError: it cannot be read, or holds more.
    """
    try:
        if isinstance(value, (np.ndarray, torch.Tensor)):
            value = value[: most + 1].tolist()
        found = list(itertools.islice(value, most + 1))
    except Exception:  # a caller's own class, or a tensor without memory
        raise ArgumentError(name, shown(value), "it cannot be read", remedy) from None
    if len(found) > most:
        raise ArgumentError(name, shown(value), f"it has at most {most} numbers", remedy)
    return found


def integers_of(name: str, value: object, most: int, remedy: str) -> tuple[int, ...]:
    """The integers that a value lists, as Python's own; see `listed`.

    Raises:
        ArgumentError: it lists none, or something else.
    """
    if not is_listed(value):
        raise ArgumentError(
            name, shown(value), "it must be a list of integers", remedy, code=INVALID_ARGUMENT
        )
    try:
        return tuple(check_integer(name, number) for number in listed(name, value, most, remedy))
    except ArgumentError as error:
        raise ArgumentError(name, error.value, error.rule, remedy, code=error.code) from None


def check_flag(name: str, value: object, *, code: int = INVALID_ARGUMENT) -> bool:
    """Checks that a value is True or False, Python's or numpy's, and returns it as Python's.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, bool):
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise ArgumentError(name, shown(value), "it must be True or False", "Pass a bool.", code=code)


def check_text(name: str, value: object, *, code: int = INVALID_ARGUMENT) -> str:
    """Checks that a value is a string, and returns it as Python's own.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, str):
        return str.__str__(value)  # a subclass may define its own comparison
    raise ArgumentError(name, shown(value), "it must be a string", "Pass a str.", code=code)


def check_number(name: str, value: object, *, code: int = INVALID_ARGUMENT) -> float:
    """Checks that a value is a finite number, no bool, and returns it as a float.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            if math.isfinite(number := float(value)):
                return number
    raise ArgumentError(name, shown(value), "it must be a finite number", "Pass a float.", code=code)


def check_record(name: str, value: object, kind: type[Record]) -> Record:
    """A record of ours that a caller may pass, or its defaults for None.

    Raises:
        ArgumentError: it is something else.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        given, rule = f"a {type(value).__name__}", f"it must be a moe_triton.{kind.__name__} or None"
        raise ArgumentError(name, given, rule, f"Pass {kind.__name__}(...).", code=INVALID_ARGUMENT)
    return value


def check_seconds(name: str, value: object) -> float:
    """Checks that a value is a time that can be waited for, and returns it as a float.

    Raises:
        ArgumentError: it is no number, not finite, not positive, or longer than `MAX_SECONDS`.
    """
    seconds = check_number(name, value)
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        rule = f"it must be a number of seconds from {MIN_SECONDS:g} to {MAX_SECONDS:g}"
        raise ArgumentError(name, seconds, rule, f"Pass {MAX_SECONDS:g} to wait for ever.")
    return seconds


def shown(value: object) -> str:
    """A value as errors show it, in a few characters; with its type unless it is a string or None."""
    if value is None or type(value) is str:
        return _repr.repr(value)
    try:
        return f"{_repr.repr(value)} (a {type(value).__name__})"
    except Exception:  # raised by its own repr, as by a wrapper without contents
        return f"a {type(value).__name__}"
