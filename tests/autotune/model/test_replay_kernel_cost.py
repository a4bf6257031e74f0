"""Launches of plans: numbers and tables of a call in, a cost out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from autotune.model.constants import machine_named
from autotune.model.cost import Table, Work, work_of
from autotune.model.kernel_costs.clock import PARTS
from autotune.model.kernel_costs.replay import ReplayError, replayed
from autotune.model.traffic import Traffic, traffic_of
from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.core.tuning import Tuning
from moe_triton.layout import STATUS_ENTRY_BYTES
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.schemes import make_scheme
from moe_triton.schemes.rank_context import RankContext

EP, T, H, K, M = 8, 16, 1024, 4, 64
CLEARED = M * STATUS_ENTRY_BYTES
A3 = machine_named("A3")


def traffic(seed: int = 0) -> Traffic:
    config = Config(EP, T, H, K, M, relaxed=True)
    ids = np.random.default_rng(seed).random((EP, T, M)).argsort(-1)[..., :K]
    return traffic_of(config, 0, ids, ("node",) * EP)


def works(call: Traffic) -> Mapping[str, Work]:
    """The launches of Triton kernels by the kernel's name."""
    scheme = make_scheme(
        RankContext(call.config, 0, 48, 1, CAPABILITIES["npu"], tuning=Tuning(receiving_blocks=0))
    )
    variants = (
        DispatchVariant(torch.bfloat16, ROW_FORMATS["int8"], weights=True),
        CombineVariant(torch.bfloat16, weights=True),
    )
    launches = [launch for variant in variants for launch in scheme.whole(variant, 0).launches]
    return {
        launch.kernel.name: work_of(launch, call)
        for launch in launches
        if isinstance(launch.kernel, TritonKernel)
    }


@pytest.fixture(scope="module")
def launches() -> Mapping[str, Work]:
    return works(traffic())


def test_every_launch_of_a_plan_has_a_cost_that_its_parts_sum_to(launches: Mapping[str, Work]) -> None:
    assert {"route_pack", "arrange", "weighted_sum"} <= launches.keys()
    for name, work in launches.items():
        cost = replayed(work, A3)
        assert tuple(cost.parts) == PARTS, name
        assert all(us >= 0 for us in cost.parts.values()), name
        assert 0 < cost.us < 100, name
        assert cost.sent == 0, name
        assert set(cost.detail) == {"S", "MTE2", "V", "MTE3"}, name


def test_bytes_are_those_that_the_kernels_move(launches: Mapping[str, Work]) -> None:
    """Whole rows, each once; and the scalars beside them, of which a read table has 4 bytes."""
    num_rows = traffic().num_rows
    pack, summed, arrange = (
        replayed(launches[name], A3) for name in ("route_pack", "weighted_sum", "arrange")
    )
    # each program looks at ids, of its own tokens and of those before; indices and counts are written once
    assert 4 * T * K <= pack.read - T * H * 2 <= 4 * T * K * launches["route_pack"].blocks
    assert pack.written == T * (H + 4) + 4 * (T * K + M)
    assert summed.written == T * H * 2 + 4  # and the zone
    # ids and weights on both cores that share a token; the zone in each program, and once to turn it
    assert summed.read == T * K * (2 * H + 2 * 8) + 4 * (launches["weighted_sum"].blocks + 1)
    # a row, its scale, the weight and three words of its origin; status entries, and the zone
    assert arrange.written == num_rows * (H + 4 + 4 + 12) + CLEARED + 4


def test_other_tables_are_another_cost(launches: Mapping[str, Work]) -> None:
    costs = [replayed(works(traffic(seed))["arrange"], A3) for seed in (0, 1, 0)]
    assert costs[0] == costs[2]
    assert costs[0].read != costs[1].read


def test_other_constants_are_another_cost(launches: Mapping[str, Work]) -> None:
    slow = A3.replaced({"scalar_global_cycles": 700})
    cost, slower = (replayed(launches["arrange"], machine) for machine in (A3, slow))
    assert slower.parts["scalar loads"] == pytest.approx(2 * cost.parts["scalar loads"], rel=0.2)
    assert (slower.read, slower.written) == (cost.read, cost.written)


def test_what_a_kernel_needs_and_the_call_has_not_is_an_error(launches: Mapping[str, Work]) -> None:
    work = launches["arrange"]
    unknown = {**work.arguments, "num_rows": Table(None)}
    with pytest.raises(ReplayError, match=r"control flow of arrange .* depends on data"):
        replayed(replace(work, arguments=unknown), A3)
    with pytest.raises(ReplayError, match="is a region"):
        replayed(replace(work, arguments={**work.arguments, "num_rows": (1, 2)}), A3)


def test_rows_of_no_expert_cost_nothing() -> None:
    call = traffic()
    none = replace(call, tables={**call.tables, "recv_offsets": np.zeros(M // EP * EP, np.int32)})
    empty, full = (replayed(works(each)["arrange"], A3) for each in (none, call))
    assert empty.written == CLEARED + 4
    assert empty.us < full.us
