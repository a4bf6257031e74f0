"""One small round of calls, the same for every test here: inputs by rank, and the group's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from moe_triton import torch_npu_ops as ops

HIDDEN, TOPK, TOKENS, LOCAL_EXPERTS = 64, 2, 4, 2


@dataclass(frozen=True)
class Round:
    """Inputs of one rank. `group` is what every function takes after its tensors."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    group: tuple[str, int, int, int]


@contextmanager
def fresh(timeout_s: float = 20.0) -> Iterator[None]:
    """Small sizes are allowed inside, and nothing of the group's is left behind."""
    ops.configure(relaxed=True, timeout_s=timeout_s)
    try:
        yield
    finally:
        ops.release(ops.group_name())
        ops.configure()


def make_round(
    rank: int, num_ranks: int, *, tokens: int = TOKENS, seed: int = 0, num_experts: int | None = None
) -> Round:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    experts = LOCAL_EXPERTS * num_ranks if num_experts is None else num_experts
    return Round(
        torch.randn(tokens, HIDDEN, generator=generator).bfloat16(),
        torch.rand(tokens, experts, generator=generator).topk(TOPK).indices.int(),
        torch.rand(tokens, TOPK, generator=generator),
        (ops.group_name(), num_ranks, rank, experts),
    )


def experts_of(expand_x: torch.Tensor, dynamic_scales: torch.Tensor | None = None) -> torch.Tensor:
    """Something to send back that depends on every received element."""
    rows = expand_x.float() if dynamic_scales is None else expand_x.float() * dynamic_scales[:, None]
    return (rows * 1.5 + 0.25).bfloat16()
