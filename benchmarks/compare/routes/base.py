"""What a route is: a way for tokens to reach their experts and for answers to come back."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Delivered:
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


class Route:
    """One way, with its inputs. `dispatch` and `combine` are timed, the rest is not."""

    def dispatch(self) -> None:
        """Tokens to their experts' ranks."""
        raise NotImplementedError

    def combine(self) -> None:
        """Answers back to their tokens, and the weighted sum."""
        raise NotImplementedError

    def settle(self) -> None:
        """What has to be put in order after a run. Called on every rank, outside of the timed span."""

    def kernels_us(self) -> dict[str, float] | None:
        """Time inside the kernels of the last dispatch and combine, where the route knows it."""
        return None

    def delivered(self) -> Delivered | None:
        """What the last run delivered; None for a route that delivers nothing."""
        return None
