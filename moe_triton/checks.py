"""Checks on single arguments, for public calls and kernels alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_triton.errors import INVALID_ARGUMENT, NULL_ARGUMENT, ArgumentError

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
    if (
        isinstance(value, torch.Tensor)
        and value.dtype in dtypes
        # Asking for a device takes longer than all the rest.
        and (value.is_cpu if device is CPU else value.device.type == device.type)
        and _fits(value.shape, shape)
        and value.is_contiguous()
    ):
        return value
    raise _reason(name, value, shape, dtypes, device)


def _fits(sizes: Sequence[int], shape: Sequence[int | str]) -> bool:
    if len(sizes) != len(shape):
        return False
    for have, want in zip(sizes, shape, strict=True):  # a loop: this runs in every call
        if have != want and not isinstance(want, str):
            return False
    return True


def _reason(
    name: str,
    value: object,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> ArgumentError:
    """The first thing that is wrong with a tensor."""
    if value is None:
        return ArgumentError(name, None, "it is needed", "Pass a tensor.", code=NULL_ARGUMENT)
    if not isinstance(value, torch.Tensor):
        return ArgumentError(
            name,
            f"a {type(value).__name__}",
            "it must be a torch.Tensor",
            "Pass a tensor.",
            code=INVALID_ARGUMENT,
        )
    if value.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return ArgumentError(
            name,
            f"of dtype {value.dtype}",
            f"it must be {allowed}",
            f"Convert it: {name}.to(torch.{allowed.split()[0]}).",
            code=INVALID_ARGUMENT,
        )
    if value.device.type != device.type:
        return ArgumentError(
            name,
            f"on {value.device}",
            f"this buffer's back end works on {device.type}",
            f"Move it: {name}.to('{device.type}').",
            code=INVALID_ARGUMENT,
        )
    if not _fits(value.shape, shape):
        have, want = tuple(value.shape), ", ".join(str(size) for size in shape)
        return ArgumentError(
            name, f"of shape {have}", f"it must be ({want})", "Reshape it, or rebuild the buffer."
        )
    return ArgumentError(
        name, f"strided {value.stride()}", "it must be contiguous", f"Pass {name}.contiguous()."
    )


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
