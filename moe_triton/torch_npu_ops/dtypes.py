"""The integers that stand for dtypes in torch_npu's arguments: torch's own numbers, and torch_npu's."""

from __future__ import annotations

import torch

from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError

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
    if dtype not in _NUMBERS:
        raise ArgumentError(
            argument,
            dtype,
            f"it is one of {[str(known) for known in _NUMBERS]}",
            "Pass one of these, or the number that torch_npu has for it.",
            code=INVALID_ARGUMENT,
        )
    return _NUMBERS[dtype]


def dtype_of(argument: str, number: int) -> torch.dtype:
    """The dtype that a number stands for.

    Raises:
        ArgumentError: none that we know (161002).
    """
    found = BY_NUMBER.get(number)
    if found is None:
        raise ArgumentError(
            argument,
            number,
            f"it is one of {sorted(BY_NUMBER)}",
            "Pass the number of a dtype, as torch_npu has them.",
            code=INVALID_ARGUMENT,
        )
    return found
