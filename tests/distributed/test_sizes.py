"""Sizes that only an `EPBuffer` takes, bit for bit as the reference model has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from moe_triton import Tuning
from moe_triton.core.config import Config
from moe_triton.processes import RankGroup
from moe_triton.schemes import product_of
from tests.distributed.cases import Case
from tests.distributed.workers import compare_rounds
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
SCHEMES = "fullmesh_v1", "fullmesh_v2", "direct", "fullmesh", "hierarchy"
RANKS = 4


def config_of(scheme: str, tokens: int, hidden: int, topk: int, experts: int, shared: int = 0) -> Config:
    """A group of four ranks, of which as many as there are shared experts hold nothing else."""
    servers = 2 if product_of(scheme) == "A2" else None
    sizes = RANKS, tokens, hidden, topk, experts, shared, shared
    return Config(*sizes, product=product_of(scheme), scheme=scheme, relaxed=True, ranks_per_server=servers)


def check(ranks: Groups, case: Case, tuning: Tuning | None = None) -> None:
    results = ranks(RANKS).run(compare_rounds, case, tuning, timeout_s=seconds(120.0))
    assert results == [[]] * RANKS


@pytest.mark.parametrize("scheme", SCHEMES)
def test_most_experts_and_choices(ranks: Groups, scheme: str) -> None:
    config = config_of(scheme, 5, 64, 32, 2048)
    check(ranks, Case(config, 7, "uniform", (5, 0, 3, 5), num_blocks=2, rounds=3))


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct"])
def test_more_results_of_a_token_than_a_word_has_bits(ranks: Groups, scheme: str) -> None:
    """Of 34, those of shared experts come last. Entries of 2,048 experts on 2 of 4 ranks go beyond 64 KB."""
    config = config_of(scheme, 5, 64, 32, 2048, shared=2)
    check(ranks, Case(config, 8, "sparse", (5, 0, 3, 5), quantize="int8", num_blocks=2, rounds=3))


def test_more_results_than_a_word_has_bits_in_parts_of_those_that_are_complete(ranks: Groups) -> None:
    case = Case(config_of("fullmesh_v1", 9, 64, 32, 64, shared=2), 9, "sparse", (9, 0, 4, 7), rounds=4)
    check(ranks, replace(case, num_blocks=3), Tuning(combine_tokens=2, communication_blocks=1))
