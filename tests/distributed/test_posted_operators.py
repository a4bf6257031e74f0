"""torch_npu's operators in groups of several servers: pairs of A2's features, bit for bit the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_triton.backends.cpu.nic import NicSettings, emulated_nic
from moe_triton.processes import RankGroup
from tests.distributed.operator_cases import FEATURES, OperatorCase, is_valid
from tests.distributed.operator_runs import check, run_rank
from tests.distributed.pairs import pairwise
from tests.distributed.test_operators import described
from tests.patience import seconds

Groups = Callable[[int], RankGroup]

# The first value of each is A2's usual one. V1's functions take no comm_alg.
OF_A2: dict[str, tuple[Any, ...]] = {
    "given_product": ("A2",),
    "version": (2, 1),
    "tp": (0, 1),
    "ranks": (4,),
    "servers": ((2, 2), (3, 1), (1, 1, 2)),
    "shared": ((1, 0), (0, 0)),
    "experts_per_rank": (2, 1),
    "topk": (2, 1, 5),
    "hidden": (64,),
    "special": ("none", "zero", "copy"),
    "alphas": ("numbers",),
    "comm_alg": ("", "fullmesh"),
    "comm_quant_mode": (0,),
    "mask": ("none", "tokens", "entries"),
    "shared_expert_x": ("none",),
    "elastic": ("none",),
    "kernels": ("triton",),
}
EIGHT: dict[str, tuple[Any, ...]] = {
    **OF_A2,
    "ranks": (8,),
    "servers": ((4, 4), (2, 2, 2, 2), (5, 3)),
}
PARTS = 5
IN_SHORT = [
    OperatorCase(quantize="smooth", mask="tokens", special="copy", tokens="global_bs"),
    OperatorCase(version=1, quantize="dynamic", tokens="variable", routing="sparse", dtype=torch.float16),
    OperatorCase(version=1, quantize="scales only", mask="entries", values="extreme"),
    OperatorCase(special="zero", performance_info=True, tokens="variable", routing="sparse", batch=9),
    OperatorCase(quantize="dynamic", special="copy", performance_info=True, norm=True, stragglers=True),
]
"""A2's features, each beside several others."""


def between_servers(process: int, num_processes: int, case: OperatorCase) -> bytes:
    """`run_rank` over queues that deliver in an order of their own, of either kind."""
    settings = NicSettings(seed=1 + case.seed % 1000 + 1000 * process, keeps_order=bool(case.seed & 1))
    with emulated_nic(settings):
        return run_rank(process, num_processes, case)


def run_all(ranks: Groups, cases: Sequence[OperatorCase]) -> dict[str, list[str]]:
    """What differs from the reference, by case."""
    wrong = {}
    for case in cases:
        found = check(case, ranks(case.num_processes).run(between_servers, case, timeout_s=seconds(120)))
        if found:
            wrong[described(case)] = found
    return wrong


@pytest.mark.parametrize("case", IN_SHORT, ids=described)
def test_features_beside_each_other(ranks: Groups, case: OperatorCase) -> None:
    for seed, servers in ((2, (2, 2)), (3, (3, 1))):
        between = replace(case, given_product="A2", servers=servers, seed=seed)
        assert is_valid(between)
        assert run_all(ranks, [between]) == {}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("values", [OF_A2, EIGHT], ids=["EP 4", "EP 8"])
def test_every_pair_of_features(ranks: Groups, values: dict[str, tuple[Any, ...]], part: int) -> None:
    assert run_all(ranks, pairwise(**values)[part::PARTS]) == {}


def test_the_pairs_have_every_value() -> None:
    for values in (OF_A2, EIGHT):
        cases = pairwise(**values)
        for name in ("version", "servers", "topk", "special", "mask", "comm_alg"):
            assert {getattr(case, name) for case in cases} == set(values[name]), name
        assert {case.quantize for case in cases} == set(FEATURES["quantize"])
        assert {case.performance_info for case in cases} == {False, True}
        assert {case.tokens for case in cases} == set(FEATURES["tokens"])
        assert all(case.product == "A2" for case in cases)
