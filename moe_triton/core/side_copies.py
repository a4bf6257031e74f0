"""`SideCopies`: copies in memory of ranks beside their own work, as each back end makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class SideCopies(Protocol):
    """Copies bytes between flat uint8 tensors of as many elements, in the order in which it is asked to.

    Attributes:
        is_asynchronous: whether copies end later than the calls that ask for them.
    """

    is_asynchronous: bool

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies beside the current stream's work, where there are streams; else at once."""

    def copy_in_turn(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies in the current stream, in turn with its other work. Tensors of any one dtype."""

    def follow(self) -> None:
        """Has copies from now on come after what the current stream was given so far."""

    def mark(self) -> Callable[[], bool]:
        """What tells, without waiting, whether all copies beside the stream that were asked for are done."""

    def mark_in_turn(self) -> Callable[[], bool]:
        """What tells, without waiting, whether all is done that the current stream was given so far."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
