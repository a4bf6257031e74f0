"""Calls in rounds, and outputs with places, in the npu back end's own Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from moe_triton.processes import RankGroup
from tests.distributed.cases import Case
from tests.distributed.long_runs import Options
from tests.distributed.test_long_calls import SCHEMES, case_of
from tests.npu import long_workers
from tests.npu.device import POLICIES
from tests.npu.test_dispatch_combine import config

Ranks = Callable[[int], RankGroup]
MOST: Options = {"num_max_tokens_per_rank": 13}


def check(ranks: Ranks, case: Case, *options: Options, policy: str = "random") -> None:
    num_ranks = case.config.num_ranks
    assert ranks(num_ranks).run(long_workers.compared, case, policy, options) == [[]] * num_ranks


def long_case(scheme: str = "fullmesh_v1", quantize: str | None = None) -> Case:
    case = case_of(scheme, (13, 2), quantize)
    return replace(case, num_blocks=2, config=replace(case.config, ranks_per_server=None))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("scheme", SCHEMES[:3])
def test_bits_are_those_of_one_large_round(
    ranks: Ranks, scheme: str, quantize: str | None, policy: str
) -> None:
    check(ranks, long_case(scheme, quantize), MOST, MOST, policy=policy)


@pytest.mark.parametrize(
    "options",
    [
        {"num_recv_tokens": "exact"},
        {"num_recv_tokens": 60},
        MOST | {"expert_alignment": 4, "do_zero_padding": True},
        {"expert_alignment": 4, "num_recv_tokens": "exact", "do_zero_padding": True},
        MOST | {"layout": "padded"},
        {"layout": "padded", "num_recv_tokens": "exact"},
    ],
    ids=str,
)
def test_outputs_as_asked_for(ranks: Ranks, options: Options) -> None:
    check(ranks, long_case(), options, options)


@pytest.mark.parametrize(
    "options",
    [MOST, MOST | {"expert_alignment": 4}, MOST | {"layout": "padded"}],
    ids=["rounds", "aligned", "padded"],
)
@pytest.mark.parametrize("scheme", SCHEMES[:3])
def test_graphs(ranks: Ranks, scheme: str, options: Options) -> None:
    case = long_case(scheme)
    assert ranks(2).run(long_workers.replayed, case, options) == [[], []]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_recv_tokens": "exact"}, "num_max_tokens_per_rank"),
        (MOST | {"num_recv_tokens": 60}, "num_recv_tokens"),
    ],
)
def test_graphs_of_what_the_host_reads_are_refused(ranks: Ranks, options: Options, name: str) -> None:
    for said in ranks(2).run(long_workers.refused, long_case(), options, True):
        assert name in said
        assert "a graph cannot wait for the host" in said


def test_who_has_more_than_a_round_says_how_many(ranks: Ranks) -> None:
    case = Case(config(), 11, "uniform", (9, 9), num_blocks=2)
    for said in ranks(2).run(long_workers.refused, case, {}, False):
        assert "Pass num_max_tokens_per_rank of dispatch" in said
