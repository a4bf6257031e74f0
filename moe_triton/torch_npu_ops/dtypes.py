"""The integers that stand for dtypes in torch_npu's arguments: torch's own numbers, and torch_npu's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from moe_triton.torch_npu_ops.declared import invalid

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
