"""Every constant of the data file decides some answer: what nobody reads has no place there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from autotune.model.clusters import a2
from autotune.model.clusters.group import OPERATORS, Group
from autotune.model.clusters.prices import Call
from autotune.model.constants import Machine, machine_named
from autotune.model.fits.validate import ROWS, predict
from autotune.model.kernel_costs.kernel_cost import kernel_cost_of
from autotune.model.kernel_costs.remembered import Remembered
from autotune.model.sensitivity import constants_read

GROUP = Group(ranks=32, tokens=16)
NOT_OF_PLANS = {
    "call_overhead_us"
}  # what a host waits for after a call; `moe-triton model calibrate` takes it off


def _reads_of_plans(group: Group) -> frozenset[str]:
    call = Call.typical(group, Remembered(kernel_cost_of))

    def total(tried: Machine) -> float:
        return sum(call.priced(operator, tried)[0].us for operator in OPERATORS)

    return constants_read(total, machine_named("A3"))


def _reads_of_a2(scheme: str) -> frozenset[str]:
    flow = a2.mean_flow(servers=2, cards=8, tokens=16, topk=8, servers_per_token=2)

    def cost(machine: Machine) -> float:
        return sum(
            a2.operator_cost(scheme, operator, flow, machine, row_bytes=14336).us
            for operator in ("dispatch", "combine")
        )

    return constants_read(cost, machine_named("A2"))


@pytest.fixture(scope="module")
def read() -> frozenset[str]:
    found = [
        _reads_of_plans(GROUP),
        _reads_of_plans(replace(GROUP, mode="stream")),
        _reads_of_plans(replace(GROUP, comm_alg="fullmesh_v2")),
        _reads_of_plans(replace(GROUP, parts=2)),
        _reads_of_plans(replace(GROUP, ranks_per_server=16)),
        *(constants_read(partial(predict, row), machine_named(row.product)) for row in ROWS),
        *(_reads_of_a2(scheme) for scheme in a2.SCHEMES),
    ]
    return frozenset().union(*found)


@pytest.mark.parametrize("product", ["A2", "A3"])
def test_every_constant_is_read(product: str, read: frozenset[str]) -> None:
    assert machine_named(product).constants.keys() - read == NOT_OF_PLANS


def test_nothing_else_is_read(read: frozenset[str]) -> None:
    assert read <= machine_named("A2").constants.keys() | machine_named("A3").constants.keys()
