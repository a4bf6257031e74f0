"""Dispatches with one row for each token and rank, in the npu back end's own Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moe_triton.core.tuning import Tuning
from moe_triton.processes import RankGroup
from tests.distributed.cases import Case
from tests.npu import per_rank_workers
from tests.npu.device import POLICIES
from tests.npu.test_dispatch_combine import config

Ranks = Callable[[int], RankGroup]
SIZES = {"num_topk": 4, "num_experts": 8, "hidden": 384}


def check(
    ranks: Ranks,
    case: Case,
    policy: str = "random",
    tuning: Tuning | None = None,
    dims: int = 0,
    dtype: torch.dtype = torch.int64,
) -> None:
    num_ranks = case.config.num_ranks
    found = ranks(num_ranks).run(per_rank_workers.compared, case, policy, tuning, dims, dtype)
    assert found == [[]] * num_ranks


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "fullmesh"])
def test_bits_are_the_references(ranks: Ranks, scheme: str, quantize: str | None, policy: str) -> None:
    sizes = config(scheme=scheme, **SIZES)
    check(ranks, Case(sizes, 3, "sparse", (5, 8), quantize, rounds=3, num_blocks=2), policy)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dims", [1, 2])
def test_masks(ranks: Ranks, dims: int, dtype: torch.dtype) -> None:
    case = Case(config(**SIZES), 3, "uniform", (5, 8), rounds=2, num_blocks=2)
    check(ranks, case, dims=dims, dtype=dtype)


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2"])
def test_blocks_that_receive_and_parts(ranks: Ranks, scheme: str) -> None:
    case = Case(config(scheme=scheme, **SIZES), 3, "sparse", (5, 8), "int8", rounds=2, num_blocks=3)
    check(ranks, case, tuning=Tuning(receiving_blocks=2))
    check(ranks, case, tuning=Tuning(dispatch_tokens=3, combine_tokens=3, communication_blocks=1))


def test_different_numbers_of_experts_and_padded_rows(ranks: Ranks) -> None:
    uneven = replace(config(3, hidden=45, num_topk=3, num_experts=7), experts_per_rank=(4, 0, 3))
    check(ranks, Case(uneven, 3, "sparse", (5, 8, 0), None, rounds=2, num_blocks=2))


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "fullmesh"])
def test_graphs(ranks: Ranks, scheme: str) -> None:
    case = Case(config(scheme=scheme, **SIZES), 11, "sparse", (8, 8), num_blocks=2)
    assert ranks(2).run(per_rank_workers.replayed, case) == [[], []]
