"""Marks on tensors that come back: by them a combine knows the ids of the dispatch that it belongs to.

A mark is an attribute of the tensor that dispatch returns and combine takes, so that it lives as long as the
tensor, and no table of calls has to be kept or cleared. A copy of the tensor's data alone has none.
"""

from __future__ import annotations

import torch

MARK = "_moe_triton_ids"


def mark(tensor: torch.Tensor, digest: int) -> None:
    """Marks a tensor with what stands for its dispatch's ids."""
    setattr(tensor, MARK, digest)


def mark_of(tensor: torch.Tensor) -> int | None:
    """What a tensor was marked with, or None."""
    digest: int | None = getattr(tensor, MARK, None)
    return digest
