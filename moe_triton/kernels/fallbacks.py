"""Kernels in plain torch: how they get their arguments, and memory that is reached by its address."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class Arguments(SimpleNamespace):
    """A launch's arguments and constants, by the names that the kernel's ``args`` and ``constants`` have.

    Pointers are flat tensors that start at the address. What a variant does not have is None or 0.
    """


def fallback(run: Callable[[Arguments], None]) -> Callable[..., None]:
    """A function of `Arguments` as a kernel's ``fallback``. However many programs there are, it runs once."""

    @functools.wraps(run)
    def with_names(programs: int, **arguments: Any) -> None:
        run(Arguments(**arguments))

    return with_names


def elements_at(tensor: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    """A copy of ``count`` elements that lie ``offset`` elements after a tensor's first one.

    The memory may belong to another mapping, as that of a peer's window does: the caller vouches for it.
    """
    address = tensor.data_ptr() + offset * tensor.element_size()
    view = (ctypes.c_uint8 * (count * tensor.element_size())).from_address(address)
    return torch.frombuffer(view, dtype=tensor.dtype).clone()
