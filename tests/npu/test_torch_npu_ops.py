"""torch_npu's operators with the npu back end, on the stand-in: bits, graphs, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moe_triton.processes import RankGroup
from tests.distributed import buffer_runs
from tests.distributed.operator_cases import OperatorCase, is_valid
from tests.distributed.operator_runs import check
from tests.npu import layer_workers, layers, operator_workers
from tests.npu.device import POLICIES

Ranks = Callable[[int], RankGroup]

LAYERS = [
    layers.v1,
    layers.v2,
    layers.v2_twice,
    layers.inband,
    layers.masked,
    layers.halves,
    layers.norm,
]
CASES: list[dict[str, Any]] = [
    {"quantize": "smooth", "mask": "tokens", "combine_weights": False},
    {"mask": "entries", "special": "all", "shared_expert_x": "3-D", "nums_type": 0, "values": "extreme"},
    {"shared": (1, 2), "ranks": 4, "comm_quant_mode": 2, "performance_info": True},
    {"norm": True, "special": "const", "alphas": "rows", "tokens": "variable", "dispatch_weights": False},
    {"comm_alg": "fullmesh_v2", "quantize": "dynamic", "comm_quant_mode": 2, "routing": "sparse"},
    {"tp": 2, "experts_per_rank": 1, "quantize": "dynamic"},
    {"tp": 2, "experts_per_rank": 1, "version": 1, "rounds": 3},
    {"tp": 1, "elastic": "routed", "ranks": 3, "routing": "skewed"},
    {"version": 1, "rounds": 3, "shared": (1, 1), "quantize": "scales only"},
    {"long_ids": True, "mask": "entries", "quantize": "dynamic"},
    {"long_ids": True, "quantize": "smooth", "shared": (1, 1), "routing": "sparse"},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_bits_are_the_references(ranks: Ranks, options: dict[str, Any]) -> None:
    case = OperatorCase(**{"ranks": 2, "num_blocks": 2, **options})
    assert is_valid(case)
    assert check(case, ranks(case.num_processes).run(operator_workers.run_case, case, "random")) == []


BUFFERS: list[dict[str, Any]] = [
    {"quantize": "smooth", "mask": "tokens", "combine_weights": False},
    {"mask": "entries", "special": "all", "shared_expert_x": "3-D", "values": "extreme"},
    {"shared": (1, 2), "ranks": 4, "comm_quant_mode": 2, "performance_info": True},
    {"comm_alg": "fullmesh_v2", "quantize": "dynamic", "comm_quant_mode": 2, "tokens": "variable"},
]


# whole calls with outputs of the caller's, with ids of 32 and of 64 bits; halves
@pytest.mark.parametrize("seed", [26, 22, 31])
@pytest.mark.parametrize("options", BUFFERS, ids=str)
def test_a_buffer_gives_the_same(ranks: Ranks, options: dict[str, Any], seed: int) -> None:
    case = OperatorCase(**{"ranks": 2, "num_blocks": 2, "seed": seed, **options})
    assert is_valid(case)
    results = ranks(case.num_processes).run(operator_workers.run_buffer, case, "random")
    assert check(case, results, canaries=False, given=buffer_runs.given_to, of_buffer=True) == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("version", [1, 2])
def test_whatever_runs_first(ranks: Ranks, version: int, policy: str) -> None:
    case = OperatorCase(ranks=2, version=version, rounds=3, quantize="dynamic", num_blocks=2)
    assert check(case, ranks(2).run(operator_workers.run_case, case, policy)) == []


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_steady_calls_neither_wait_nor_read(ranks: Ranks, layer: layers.Layer) -> None:
    assert ranks(2).run(layer_workers.steady, layer) == [[], []]


def test_masked_ranks_are_not_waited_for(ranks: Ranks) -> None:
    assert ranks(3).run(layer_workers.without_the_last, LAYERS) == [[]] * 3


def test_elastic_info_takes_one_wait_per_call(ranks: Ranks) -> None:
    assert ranks(2).run(layer_workers.elastic_waits) == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("chosen", "policy"),
    [
        *(([layers.v2], policy) for policy in POLICIES),
        *(([layers.v1_alone], policy) for policy in POLICIES),
        ([layers.v1, layers.v1_alone], "random"),
        ([layers.v2_twice, layers.inband], "random"),
        ([layers.halves, layers.masked], "random"),
        ([layers.norm], "random"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(layer.__name__ for layer in value),
)
def test_graphs_give_the_right_bits(ranks: Ranks, chosen: list[layers.Layer], policy: str) -> None:
    assert ranks(2).run(layer_workers.replay, chosen, policy) == [[], []]
