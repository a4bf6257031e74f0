"""Tokens, routing and answers of one rank. Every rank can tell what every other rank sends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.sizes import EXPERTS, HIDDEN, TOPK


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
    def random(rank: int, num_ranks: int, num_tokens: int, seed: int = 0) -> Inputs:
        """Normally distributed tokens, experts by the largest of random logits."""
        routing = [_routing(r, num_tokens, seed) for r in range(num_ranks)]
        weights, ids = routing[rank]
        local_experts = EXPERTS // num_ranks
        received = sum(int((other // local_experts == rank).sum()) for _, other in routing)
        x = torch.randn(num_tokens, HIDDEN, generator=_generator(seed, 1, rank)).bfloat16()
        answers = torch.randn(received, HIDDEN, generator=_generator(seed, 2, rank)).bfloat16()
        return Inputs(rank, num_ranks, x, ids, ids.int(), weights, answers)


def _generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(n * 1009**i for i, n in enumerate(numbers)))


def _routing(rank: int, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(num_tokens, EXPERTS, generator=_generator(seed, 3, rank))
    weights, ids = logits.softmax(1).topk(TOPK, dim=1)
    return weights, ids
