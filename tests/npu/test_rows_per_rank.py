"""Dispatches with one row for each token and rank, in the npu back end's own Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moe_triton.core.tuning import Tuning
from moe_triton.processes import RankGroup
from tests.distributed.cases import Case
from tests.distributed.long_runs import Options
from tests.distributed.test_long_calls import case_of
from tests.npu import long_workers, per_rank_workers
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


MOST: Options = {"num_max_tokens_per_rank": 13}


def long_case(scheme: str, quantize: str | None = None, **sizes: int) -> Case:
    """Of four rounds on one rank, and of one on the other."""
    case = case_of(scheme, (13, 2), quantize, num_topk=4, num_experts=6, **sizes)
    return replace(case, num_blocks=2, config=replace(case.config, ranks_per_server=None))


@pytest.mark.parametrize(
    ("scheme", "quantize"), [("fullmesh_v1", "int8"), ("fullmesh_v2", None), ("fullmesh", "int8")]
)
def test_rounds(ranks: Ranks, scheme: str, quantize: str | None) -> None:
    options = [MOST, {"num_recv_tokens": "exact"}, {"num_recv_tokens": 40}]
    args = long_case(scheme, quantize), "random", 2, options
    assert ranks(2).run(per_rank_workers.compared_in_rounds, *args) == [[], []]


@pytest.mark.parametrize("policy", [pytest.param(p, marks=pytest.mark.long) for p in POLICIES])
@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "fullmesh"])
def test_rounds_in_any_order(ranks: Ranks, scheme: str, policy: str) -> None:
    args = long_case(scheme, hidden=65), policy, 0, [MOST, MOST]
    assert ranks(2).run(per_rank_workers.compared_in_rounds, *args) == [[], []]


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "fullmesh"])
def test_graphs_of_rounds(ranks: Ranks, scheme: str) -> None:
    assert ranks(2).run(per_rank_workers.replayed_in_rounds, long_case(scheme), MOST) == [[], []]


def test_graphs_of_what_the_host_reads_are_refused(ranks: Ranks) -> None:
    options = MOST | {"do_expand": False, "num_recv_tokens": 60}
    for said in ranks(2).run(long_workers.refused, long_case("fullmesh_v1"), options, True):
        assert "num_recv_tokens" in said
        assert "a graph cannot wait for the host" in said
