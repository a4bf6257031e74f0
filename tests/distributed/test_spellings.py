"""`EPBuffer` can what torch_npu's functions can: the same matrix of features, by its names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_triton.processes import RankGroup
from tests.distributed import buffer_runs
from tests.distributed.operator_cases import OperatorCase
from tests.distributed.operator_runs import check
from tests.distributed.pairs import pairwise
from tests.distributed.test_operators import SHORT, described
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
# What EPBuffer has no argument for: the first version, running totals, a norm. And rows that are padded.
TAKEN: dict[str, tuple[Any, ...]] = {
    "version": (2,),
    "hidden": (64, 33, 150),
    "nums_type": (1,),
    "norm": (False,),
    "elastic": ("none", "routed", "shared", "both"),
}


def run_all(ranks: Groups, cases: Sequence[OperatorCase]) -> dict[str, list[str]]:
    """What differs from the reference, by case."""
    wrong = {}
    for case in cases:
        results = ranks(case.num_processes).run(buffer_runs.run_rank, case, timeout_s=seconds(120))
        found = check(case, results, canaries=False, given=buffer_runs.given_to, of_buffer=True)
        if found:
            wrong[described(case)] = found
    return wrong


PARTS = [*range(3), *(pytest.param(part, marks=pytest.mark.long) for part in range(3, 6))]


@pytest.mark.parametrize("part", PARTS)
def test_every_pair_of_features(ranks: Groups, part: int) -> None:
    assert run_all(ranks, pairwise(**SHORT | TAKEN)[part::6]) == {}


@pytest.mark.parametrize("bits", range(8))
def test_every_way_to_pass_tensors(ranks: Groups, bits: int) -> None:
    """Halves, outputs of the caller's, ids of 64 bits, weights of 16: by the lowest bits of the seed."""
    case = OperatorCase(ranks=2, seed=16 * 5 + 2 * bits, mask="entries", quantize="smooth", special="all")
    assert run_all(ranks, [case, replace(case, seed=case.seed + 1)]) == {}


@pytest.mark.parametrize(
    "features",
    [
        {"tp": 2, "experts_per_rank": 1},
        {"tp": 2, "experts_per_rank": 1, "hidden": 1280, "dtype": torch.float16},
        {"comm_alg": "fullmesh_v2", "mask": "entries", "special": "all"},
        {"quantize": "smooth", "shared": (1, 1), "ranks": 3},
    ],
)
def test_a_scale_for_every_128_elements(ranks: Groups, features: dict[str, Any]) -> None:
    """What is EPBuffer's alone: with a tensor-parallel peer too, from whom scales come by another kernel."""
    case = OperatorCase(**{"ranks": 2, "hidden": 256, "quantize": "dynamic", **features}, in_blocks=True)
    assert run_all(ranks, [case, replace(case, seed=1)]) == {}
