"""What a route is: a way for tokens to reach their experts and for answers to come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch


class Delivered(NamedTuple):
    """What came of one dispatch and combine on this rank, for checks.

    Attributes:
        tokens: rows by local expert, then source rank, then the source's order; more may follow them.
        scales: one per row, or None if not quantised.
        counts: (E,) rows of each local expert.
        out: (T, H).
        exact: whether ``out`` is summed in the stated order, so that it has to be the same bits.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    out: torch.Tensor
    exact: bool = True


# By "dispatch" or "combine", and by the step's name.
Steps = dict[str, dict[str, float]]


class Route(ABC):
    """One way, with its inputs. `dispatch` and `combine` are timed, the rest is not.

    Attributes:
        delivered: by the last run, until it is settled; None for a route that delivers nothing.
    """

    delivered: Delivered | None = None

    @abstractmethod
    def dispatch(self) -> None:
        """Tokens to their experts' ranks."""

    @abstractmethod
    def combine(self) -> None:
        """Answers back to their tokens, and the weighted sum."""

    def settle(self) -> None:
        """Puts in order what a run has left, on every rank. What was delivered is let go, as users do."""
        self.delivered = None

    def steps_us(self) -> Steps | None:
        """Microseconds of each step of the last dispatch and combine, where the route knows them."""
        return None
