"""`SideCopies`: copies in memory of ranks beside their own work, as each back end makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

View = Any
"""Of bytes: has a length, and parts by ``view[begin:end]``."""


class SideCopies(Protocol):
    """Copies bytes, in the order in which it is asked to.

    Attributes:
        is_asynchronous: whether copies end later than the calls that ask for them.
        fence: between words and what they are about. What this rank has read or written in shared memory
            before it is so for all ranks before what follows. None where no fence is needed for that.
    """

    is_asynchronous: bool
    fence: Callable[[], None] | None

    def view(self, data: torch.Tensor) -> View:
        """What `copy` takes of a flat uint8 tensor: parts of it cost less to make than the tensor's."""

    def copy(self, to: View, source: View) -> None:
        """Copies as many bytes beside the current stream's work, where there are streams; else at once."""

    def copy_in_turn(self, to: View, source: View) -> None:
        """Copies as many bytes in the current stream, in turn with its other work."""

    def copy_elements(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies a tensor in the current stream, in turn with its other work, whatever the strides."""

    def follow(self, stream: object = None) -> None:
        """Has copies from now on come after what the current stream was given so far, and another one."""

    def wait(self) -> None:
        """Waits until all copies beside the stream that were asked for are done."""

    def mark(self) -> Callable[[], bool]:
        """What tells, without waiting, whether all copies beside the stream that were asked for are done."""

    def mark_in_turn(self) -> Callable[[], bool]:
        """What tells, without waiting, whether all is done that the current stream was given so far."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
