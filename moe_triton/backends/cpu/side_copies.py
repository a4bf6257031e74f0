"""Copies of the CPU back end: the calling thread makes them, at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


class CpuSideCopies:
    """See `moe_triton.core.side_copies.SideCopies`."""

    is_asynchronous = False

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies by NumPy: torch brings in its threads, for a megabyte, and waits for them on busy cores."""
        np.copyto(to.numpy(), source.numpy())

    def copy_in_turn(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """The same."""
        self.copy(to, source)

    def follow(self) -> None:
        """Nothing: what was asked for is done."""

    def mark(self) -> Callable[[], bool]:
        """Always done."""
        return _is_done

    def mark_in_turn(self) -> Callable[[], bool]:
        """Always done."""
        return _is_done

    def is_capturing(self) -> bool:
        """Never."""
        return False


def _is_done() -> bool:
    return True
