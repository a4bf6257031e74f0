"""What a route is: a way for tokens to reach their experts and for answers to come back.

Routes are given tokens, routing and answers of one rank; every rank can tell what every other rank sends.
They are compared only if they deliver the same: bit for bit, but for sums in another order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from benchmarks.sizes import EXPERTS, HIDDEN, TOPK

# Sums of the same fp32 products in two orders differ by a few units of fp32, and then at most by one unit of
# bf16, which has 8 bits.
RELATIVE, ABSOLUTE = 2.0**-7, 1e-5
# By "dispatch" or "combine", and by the step's name.
Steps = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Inputs:
    """What all routes are given.

    Attributes:
        rank: this rank.
        num_ranks: W.
        x: (T, H) bf16.
        ids: (T, K) int64, distinct in a row, none of them -1: every route then moves K rows per token.
        ids32: the same as int32.
        weights: (T, K) fp32.
        answers: (N, H) bf16, the rows that this rank's experts answer with. Experts are not what is measured:
            they answer at once, with rows that are the same in every route.
    """

    rank: int
    num_ranks: int
    x: torch.Tensor
    ids: torch.Tensor
    ids32: torch.Tensor
    weights: torch.Tensor
    answers: torch.Tensor

    @property
    def hidden(self) -> int:
        """Elements of a row, H."""
        return self.x.shape[1]

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank, T."""
        return self.x.shape[0]

    @property
    def num_sent(self) -> int:
        """Rows that this rank sends, T * K."""
        return self.ids.numel()

    @property
    def num_received(self) -> int:
        """Rows that this rank receives, N."""
        return self.answers.shape[0]

    @property
    def num_kept(self) -> int:
        """Rows that this rank sends to itself, O."""
        return int((self.ids // (EXPERTS // self.num_ranks) == self.rank).sum())

    @staticmethod
    def random(rank: int, num_ranks: int, num_tokens: int, seed: int = 0, hidden: int = HIDDEN) -> Inputs:
        """Normally distributed tokens, experts by the largest of random logits."""
        routing = [_routing(r, num_tokens, seed) for r in range(num_ranks)]
        weights, ids = routing[rank]
        local_experts = EXPERTS // num_ranks
        received = sum(int((other // local_experts == rank).sum()) for _, other in routing)
        x = torch.randn(num_tokens, hidden, generator=_generator(seed, 1, rank)).bfloat16()
        answers = torch.randn(received, hidden, generator=_generator(seed, 2, rank)).bfloat16()
        return Inputs(rank, num_ranks, x, ids, ids.int(), weights, answers)


def _generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(n * 1009**i for i, n in enumerate(numbers)))


def _routing(rank: int, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(num_tokens, EXPERTS, generator=_generator(seed, 3, rank))
    weights, ids = logits.softmax(1).topk(TOPK, dim=1)
    return weights, ids


class Delivered(NamedTuple):
    """What came of one dispatch and combine on this rank, for checks.

    Attributes:
        tokens: rows by local expert, then source rank, then the source's order; more may follow them.
        scales: one per row, or None if not quantised.
        counts: (E,) rows of each local expert.
        out: (T, H).
        exact: whether ``out`` is summed in the stated order, so that it has to be the same bits.
        absolute: otherwise, by how much an element may differ besides its own rounding.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    out: torch.Tensor
    exact: bool = True
    absolute: float = ABSOLUTE


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


def check_routes(routes: dict[str, Route], reference: str) -> None:
    """Runs every route, and compares what it delivered with what the reference did; collective.

    Raises:
        AssertionError: one differs; it names the route and what differs.
    """
    want = _run(routes[reference])
    assert want is not None
    for name, route in routes.items():
        if name != reference and (have := _run(route)) is not None:
            compare(name, have, want)


def _run(route: Route) -> Delivered | None:
    """What an untimed run delivers."""
    route.dispatch()
    route.combine()
    delivered = route.delivered
    route.settle()
    return delivered


def compare(name: str, have: Delivered, want: Delivered) -> None:
    """Checks one route's delivery against another's.

    Raises:
        AssertionError: they differ.
    """
    total = int(want.counts.sum())
    same = {
        "tokens": torch.equal(have.tokens[:total], want.tokens[:total]),
        "scales": _scales_equal(have.scales, want.scales, total),
        "counts": torch.equal(have.counts, want.counts),
        "output": _outputs_agree(have, want),
    }
    if wrong := [what for what, good in same.items() if not good]:
        raise AssertionError(f"{name} delivers other {', '.join(wrong)}: nothing to compare")


def _scales_equal(have: torch.Tensor | None, want: torch.Tensor | None, total: int) -> bool:
    return have is want if have is None or want is None else torch.equal(have[:total], want[:total])


def _outputs_agree(have: Delivered, want: Delivered) -> bool:
    if have.exact and want.exact:
        return torch.equal(have.out, want.out)
    absolute = max(have.absolute, want.absolute)
    return torch.allclose(have.out.float(), want.out.float(), rtol=RELATIVE, atol=absolute)
