"""What fewer launches are worth: dispatch and combine against the plans that had seven launches and four."""

from __future__ import annotations

import pytest

from autotune.model.clusters.group import OPERATORS, Group
from autotune.model.clusters.prices import Call
from autotune.model.kernel_costs.kernel_cost import kernel_cost_of
from autotune.model.kernel_costs.remembered import Remembered
from moe_triton.core.plan import synced_phases
from tests.autotune.model.calls import config, plan, traffic
from tests.autotune.model.hand_made import walk
from tests.autotune.model.test_local_kernels import CORE

# The constants by which the earlier plans were priced: with others, they would take something else too.
MACHINE = CORE.replaced(
    {
        "launch_graph_us": 4,
        "flag_latency_us": 0.7,
        "hop_sibling_us": 0.2,
        "hop_node_us": 0.7,
        "hop_far_us": 2.1,
        "remote_write_gb_per_s": 196,
        "remote_writes_in_flight": 48,
        "vector_reduce_factor": 2,
    }
)
EARLIER_US = {
    ("fullmesh_v1", 16, 16): 100.74,
    ("fullmesh_v1", 16, 128): 304.30,
    ("fullmesh_v1", 64, 16): 110.33,
    ("fullmesh_v1", 64, 128): 358.17,
    ("fullmesh_v2", 16, 16): 91.04,
    ("fullmesh_v2", 16, 128): 301.48,
    ("fullmesh_v2", 64, 16): 100.31,
    ("fullmesh_v2", 64, 128): 356.03,
}
"""Dispatch (int8) and combine in a graph, by scheme, ranks and tokens per rank."""

GOALS = {16: 0.60, 64: 0.67}
"""Of what the earlier plans took, by ranks."""


@pytest.mark.parametrize(("comm_alg", "ranks", "tokens"), EARLIER_US)
def test_a_pair_takes_so_much_of_what_it_took(comm_alg: str, ranks: int, tokens: int) -> None:
    group = Group(ranks=ranks, tokens=tokens, comm_alg=comm_alg, quantize="int8", mode="graph")
    call = Call.typical(group, Remembered(kernel_cost_of))
    us = sum(call.priced(operator, MACHINE)[0].us for operator in OPERATORS)
    assert us / EARLIER_US[comm_alg, ranks, tokens] <= GOALS[ranks]


@pytest.mark.parametrize("comm_alg", ["fullmesh_v1", "fullmesh_v2"])
@pytest.mark.parametrize("tokens", [16, 128])
@pytest.mark.parametrize("receiving", [None, 0])
def test_sums_of_256_counts_wait_for_no_other_core(comm_alg: str, tokens: int, receiving: int | None) -> None:
    """So no SyncAll is to be added to them, with cores that receive and without."""
    settings = config(16, tokens, scheme=comm_alg)
    assert settings.num_ranks * settings.num_local_experts == 256
    whole = plan(settings, "dispatch", receiving=receiving)
    (number,) = [i for i, launch in enumerate(whole.launches) if launch.step == "offsets"]
    assert number not in synced_phases(whole.launches)
    spans = walk(whole, traffic(settings), MACHINE, kernel_costs=kernel_cost_of).spans
    assert spans[number].cost.us <= 2
