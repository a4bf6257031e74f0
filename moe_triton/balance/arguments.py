"""Checks on what is passed to this package: loads of experts, their ids, and how many there are."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moe_triton.core.checks import check_integer, not_plain_error, shown
from moe_triton.core.config import Config
from moe_triton.core.errors import INVALID_ARGUMENT, NULL_ARGUMENT, ArgumentError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]

MOST_ELEMENTS = 1 << 26
"""Of a tensor of loads or ids: 61 layers of 1024 experts, counted by each of 1024 ranks, are as many."""

# Of torch's dtypes those of whole bytes whose values NumPy has, or fp32 (sub-byte ones can hardly be read).
_INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_FLOATS = ("float16", "float32", "float64")
_WIDENED = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)

_invalid = partial(ArgumentError, code=INVALID_ARGUMENT)


def check_at_least(name: str, value: object, least: int) -> int:
    """Checks that a value is an integer and not too small, and returns it as Python's.

    Raises:
        ArgumentError: it is something else.
    """
    number = value if type(value) is int else check_integer(name, value)  # in each step, from cold caches
    if number < least:
        raise ArgumentError(name, number, f"it must be at least {least}", f"Pass {least} or more.")
    return number


def check_even(config: Config) -> None:
    """Checks that all ranks of routed experts have as many: placements give each as many slots.

    Raises:
        ArgumentError: they have not.
    """
    if config.experts_per_rank is not None:
        given, rule = f"with experts_per_rank={list(config.experts_per_rank)}", "each rank has as many slots"
        remedy = "Construct it without experts_per_rank, with as many physical experts on each rank."
        raise ArgumentError("buffer", given, rule, remedy)


def check_at_most(name: str, value: int, most: int, what: str) -> None:
    """Checks that what a number asks for is not absurd: it would end in a lack of memory.

    Args:
        name: of the argument.
        value: that was passed.
        most: that it may be.
        what: takes as much memory as it is large.

    Raises:
        ArgumentError: it is larger.
    """
    if value > most:
        raise ArgumentError(name, shown(value), f"{what} may be {most} at most", "Pass a smaller number.")


def check_layer(value: object, num_layers: int) -> int:
    """Checks that a value is the number of a layer, and returns it as Python's.

    Raises:
        ArgumentError: it is something else.
    """
    number = check_at_least("layer", value, 0)
    if number >= num_layers:
        rule = f"layers are 0 to {num_layers - 1}"
        raise ArgumentError("layer", number, rule, "Count only layers with experts.")
    return number


def check_weight(name: str, value: object, dtype: type[np.floating[Any]], num_dims: int = 2) -> Floats:
    """Checks loads of experts, and returns them in another dtype, in memory of their own.

    Args:
        name: of the argument.
        value: a tensor on any device, or an array, of a real dtype. Its first dimension is the layer, its
            last the expert.
        dtype: of the result. Values are rounded to it once.
        num_dims: that it must have.

    Raises:
        ArgumentError: it is no such tensor, is empty or too large, or holds a load that is negative or not
            finite.
    """
    array = _array(name, value, num_dims)
    if array.dtype.kind not in "iuf":
        rule = "loads must be integers or floating-point numbers"
        raise _invalid(name, f"of dtype {array.dtype}", rule, "Convert it to int64 or float32.")
    with np.errstate(over="ignore"):  # it is infinite then, and refused
        loads = array.astype(dtype)
    wrong = ~(np.isfinite(loads) & (loads >= 0))
    if wrong.any():
        place = tuple(map(int, np.argwhere(wrong)[0]))
        found = f"{array[place]} for expert {place[-1]} in layer {place[0]}"
        rule = f"loads must be finite in {np.dtype(dtype).name}, and not negative"
        raise ArgumentError(name, found, rule, "Pass how many rows each expert got.")
    return loads


def check_ids(name: str, value: object, num_dims: int = 2) -> Ints:
    """Checks that a value is a tensor or an array of integers, and returns a copy of them.

    Raises:
        ArgumentError: it is something else, is empty or too large, or has other dimensions.
    """
    array = _array(name, value, num_dims)
    if array.dtype.kind not in "iu" or array.dtype == np.uint64:
        rule = "ids must be integers of at most 64 bits with a sign"
        raise _invalid(name, f"of dtype {array.dtype}", rule, "Convert it to int64.")
    return array.astype(np.int64)


def _array(name: str, value: object, num_dims: int) -> npt.NDArray[Any]:
    """A tensor or an array as an array, of the values that it had."""
    if value is None:
        raise ArgumentError(name, None, "it is needed", "Pass a tensor.", code=NULL_ARGUMENT)
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        rule = "it must be a torch.Tensor or a numpy.ndarray"
        raise _invalid(name, shown(value), rule, f"Pass torch.tensor({name}).")
    # A masked array has values that do not count, and a matrix operators of its own.
    if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
        rule = "it must be a numpy.ndarray, and of no other class"
        remedy = f"Pass numpy.array({name}), or {name}.filled(0) of a masked array."
        raise _invalid(name, f"a {type(value).__name__}", rule, remedy)
    if value.ndim != num_dims or not 0 < _num_elements(value) <= MOST_ELEMENTS:
        rule = f"it must have {num_dims} dimensions, none of them empty, and at most {MOST_ELEMENTS} elements"
        raise ArgumentError(name, f"of shape {tuple(value.shape)}", rule, "Pass a row for each layer.")
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    tensor = value.detach()
    if (error := not_plain_error(name, tensor)) is not None:
        raise error
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ("bool", *_INTEGERS, *_FLOATS, *_WIDENED):  # a bool has an error of its own
        rule = "it must be real, of one byte or more"
        raise _invalid(name, f"of dtype {tensor.dtype}", rule, "Convert it to float32.")
    return (tensor.float() if dtype in _WIDENED else tensor).cpu().numpy()


def _num_elements(value: Any) -> int:
    return int(value.numel() if isinstance(value, torch.Tensor) else value.size)
