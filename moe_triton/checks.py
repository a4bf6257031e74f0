"""Checks on single arguments, for public calls and kernels alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_triton.errors import ArgumentError

CPU = torch.device("cpu")


def check_tensor(
    name: str,
    value: object,
    *,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device = CPU,
) -> torch.Tensor:
    """Checks type, dtype, device, shape and contiguity.

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
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(name, f"a {type(value).__name__}", "it must be a torch.Tensor", "Pass a tensor.")
    if value.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ArgumentError(
            name,
            f"of dtype {value.dtype}",
            f"it must be {allowed}",
            f"Convert it: {name}.to(torch.{allowed.split()[0]}).",
        )
    if value.device.type != device.type:
        raise ArgumentError(
            name,
            f"on {value.device}",
            f"this buffer's back end works on {device.type}",
            f"Move it: {name}.to('{device.type}').",
        )
    sizes = tuple(value.shape)
    fits = len(sizes) == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(sizes, shape, strict=False)
    )
    if not fits:
        expected = "(" + ", ".join(str(want) for want in shape) + ")"
        raise ArgumentError(
            name, f"of shape {sizes}", f"it must be {expected}", "Reshape it, or rebuild the buffer."
        )
    if not value.is_contiguous():
        raise ArgumentError(
            name, f"strided {value.stride()}", "it must be contiguous", f"Pass {name}.contiguous()."
        )
    return value


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Checks that an option is one of those supported.

    Raises:
        ArgumentError: it is not.
    """
    if value not in choices:
        raise ArgumentError(
            name, repr(value), f"it must be one of {list(choices)}", "Other options are refused."
        )


def check_positive(name: str, value: float) -> None:
    """Checks that a number is positive.

    Raises:
        ArgumentError: it is not.
    """
    if not value > 0:
        raise ArgumentError(name, value, "it must be positive", "Pass a larger number.")
