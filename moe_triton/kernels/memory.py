"""Memory that is reached by its address: where fallbacks follow an offset out of a tensor."""

from __future__ import annotations

import ctypes

import torch


def elements_at(tensor: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    """A copy of ``count`` elements that lie ``offset`` elements after a tensor's first one.

    The memory may belong to another mapping, as that of a peer's window does: the caller vouches for it.
    """
    address = tensor.data_ptr() + offset * tensor.element_size()
    view = (ctypes.c_uint8 * (count * tensor.element_size())).from_address(address)
    return torch.frombuffer(view, dtype=tensor.dtype).clone()
