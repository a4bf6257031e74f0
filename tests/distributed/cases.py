"""Cases of dispatch and combine: what a group is built for, and what every rank brings to each round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from hypothesis import strategies as st

from moe_triton.config import Config

Routing = Literal["uniform", "skewed", "one expert set", "sparse", "none"]
HIDDEN = (32, 64, 160, 512)


@dataclass(frozen=True)
class Case:
    """A group and its rounds. Everything that a rank brings follows from the seed."""

    config: Config
    seed: int
    routing: Routing
    tokens: tuple[int, ...]
    quantize: bool = False
    weights: bool = True
    smooth: bool = False
    dtype: torch.dtype = torch.bfloat16
    rounds: int = 2
    num_blocks: int | None = None
    kernels: str = "triton"


@dataclass(frozen=True)
class Inputs:
    """What one rank brings to one round."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def ids_of(case: Case, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """(T, K) int32 routing."""
    c = case.config
    if case.routing == "one expert set":
        # The same K experts for every token of every rank: all other experts get nothing.
        chosen = torch.randperm(c.num_experts, generator=torch.Generator().manual_seed(case.seed))[
            : c.num_topk
        ]
        return chosen.int().repeat(num_tokens, 1)
    popularity = torch.rand(num_tokens, c.num_experts, generator=generator)
    if case.routing == "skewed":
        popularity += torch.linspace(2, 0, c.num_experts) ** 3
    ids = popularity.topk(c.num_topk, dim=1).indices.int()
    if case.routing == "none":
        ids[:] = -1
    if case.routing == "sparse":
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    return ids


def inputs_of(case: Case, rank: int, round_number: int) -> Inputs:
    """A rank's tokens, routing and weights in one round."""
    generator = torch.Generator().manual_seed(case.seed * 1_000_003 + rank * 1_009 + round_number)
    num_tokens = case.tokens[(rank + round_number) % len(case.tokens)]
    c = case.config
    x = (torch.randn(num_tokens, c.hidden, generator=generator) * 3).to(case.dtype)
    weights = torch.rand(num_tokens, c.num_topk, generator=generator)
    return Inputs(x, ids_of(case, num_tokens, generator), weights)


def smooth_scales_of(case: Case) -> torch.Tensor | None:
    """(S + M, H) fp32, the same on every rank."""
    if not case.smooth:
        return None
    generator = torch.Generator().manual_seed(case.seed + 17)
    rows = case.config.num_shared_experts + case.config.num_experts
    return torch.rand(rows, case.config.hidden, generator=generator) + 0.5


def experts_of(case: Case, rank: int, tokens: torch.Tensor) -> torch.Tensor:
    """A stand-in for experts: different on every rank, and bit-exact wherever it is computed."""
    return (tokens.float() * (0.25 + rank) + rank).to(case.dtype)


@st.composite
def cases(draw: st.DrawFn, num_ranks: int) -> Case:
    """Groups of a given size over the whole of what a buffer takes."""
    num_shared = draw(st.sampled_from([0, 0, 0, 1])) if num_ranks > 2 else 0
    shared_ranks = num_shared * draw(st.integers(1, max(1, num_ranks // 2 - 1)))
    moe_ranks = num_ranks - shared_ranks
    num_experts = moe_ranks * draw(st.integers(1, 4))
    max_tokens = draw(st.integers(1, 9))
    config = Config(
        num_ranks=num_ranks,
        num_max_tokens_per_rank=max_tokens,
        hidden=draw(st.sampled_from(HIDDEN)),
        num_topk=draw(st.integers(1, min(num_experts, 8))),
        num_experts=num_experts,
        num_shared_experts=num_shared,
        num_shared_ranks=shared_ranks,
        scheme=draw(st.sampled_from(["fullmesh_v1", "fullmesh_v1", "fullmesh_v2", "direct"])),
        relaxed=True,
    )
    quantize = draw(st.booleans())
    return Case(
        config=config,
        seed=draw(st.integers(0, 2**20)),
        routing=draw(st.sampled_from(["uniform", "skewed", "one expert set", "sparse", "none"])),
        tokens=tuple(draw(st.lists(st.integers(0, max_tokens), min_size=num_ranks, max_size=num_ranks))),
        quantize=quantize,
        weights=draw(st.booleans()),
        smooth=quantize and draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        rounds=draw(st.integers(1, 3)),
        num_blocks=draw(st.sampled_from([None, 1, 2, 3])),
    )


def with_scheme(case: Case, scheme: str) -> Case:
    """The same case by another scheme."""
    return replace(case, config=replace(case.config, scheme=scheme))


def small_case(num_ranks: int, scheme: str = "fullmesh_v1", **changes: object) -> Case:
    """A plain case to vary."""
    config = Config(num_ranks, 4, 64, 2, 2 * num_ranks, scheme=scheme, relaxed=True)
    case = Case(config=config, seed=1, routing="uniform", tokens=(4,) * num_ranks)
    return replace(case, **changes)  # type: ignore[arg-type]
