"""Priced plans of every scheme: as long as their parts, not below the floor, refused where there are none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.model.clusters.group import OPERATORS, Group, Routing
from autotune.model.clusters.prices import Call, PricedPlan
from autotune.model.constants import Machine, machine_named
from autotune.model.cost import Cost, KernelCost, Work
from autotune.model.kernel_costs.counted.price import counted
from autotune.model.kernel_costs.remembered import Remembered
from autotune.model.timelines.timeline import Mode
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.core.plan import device_launches

A3 = machine_named("A3")
SMALL = Group(ranks=16, tokens=16)
TRITON_US = 2.0


def kernel_cost_of(kernel: AscendCKernel | TritonKernel) -> KernelCost:
    """What is counted, and as long for every Triton kernel."""

    def fixed(work: Work, machine: Machine) -> Cost:
        return Cost({"fixed": TRITON_US})

    return counted if isinstance(kernel, AscendCKernel) else fixed


def call_of(group: Group) -> Call:
    return Call.typical(group, Remembered(kernel_cost_of))


def priced(group: Group, operator: int, mode: Mode = "stream") -> PricedPlan:
    (only,) = call_of(replace(group, mode=mode)).priced(OPERATORS[operator], A3)
    return only


@pytest.mark.parametrize("comm_alg", ["fullmesh_v1", "fullmesh_v2", "direct"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_plans_take_as_long_as_their_parts_and_no_less_than_their_floor(
    comm_alg: str, quantize: str | None
) -> None:
    for group in (SMALL, Group(ranks=8, tokens=128), Group(ranks=64, tokens=64, parts=4)):
        for operator in (0, 1):
            found = priced(replace(group, comm_alg=comm_alg, quantize=quantize), operator)
            assert found.us == pytest.approx(sum(found.timeline.parts.values()))
            assert found.us > found.floor_us > 0


def test_more_tokens_take_longer_and_there_are_no_parts_that_cannot_overlap() -> None:
    for operator in (0, 1):
        few, many = priced(SMALL, operator), priced(replace(SMALL, tokens=64), operator)
        assert few.us < many.us
        assert few.floor_us < many.floor_us
        assert priced(replace(SMALL, tokens=64, parts=1), operator).us == many.us
        in_turn = priced(replace(SMALL, tokens=64, parts=4, communication_blocks=0), operator)
        assert in_turn.plan == many.plan


def test_a_plan_is_in_one_part_unless_streams_overlap() -> None:
    group = Group(tokens=128, parts=2)
    own, overlapped = (priced(replace(group, communication_blocks=blocks), 1) for blocks in (0, 24))
    assert [span.launch.step for span in own.timeline.spans].count("sum") == 1
    assert {span.stream for span in own.timeline.spans} == {"compute"}
    assert [span.launch.step for span in overlapped.timeline.spans].count("sum") == 2


def test_parts_have_cores_of_their_own() -> None:
    found = priced(replace(SMALL, parts=2, communication_blocks=16), 0)
    blocks = {(span.launch.step, span.launch.blocks) for span in found.timeline.spans}
    assert {("route + pack", 48), ("send", 16), ("rows", 16), ("arrange", 32)} <= blocks
    assert {span.stream for span in found.timeline.spans} == {"compute", "communication"}


def test_a_graph_is_faster_by_its_launches_and_refused_where_there_can_be_none() -> None:
    graph, stream = priced(SMALL, 0, "graph"), priced(SMALL, 0, "stream")
    launches = len(device_launches(graph.plan.launches))
    assert stream.us - graph.us == pytest.approx(launches * (A3.launch_stream_us - A3.launch_graph_us))
    with pytest.raises(ArgumentError, match="cannot be captured") as caught:
        priced(replace(SMALL, comm_alg="direct"), 0, "graph")
    assert caught.value.argument == "mode"


def test_results_that_are_pulled_cross_the_link() -> None:
    pulled = priced(replace(SMALL, comm_alg="direct"), 1).timeline.spans[-1]
    assert pulled.launch.step == "sum"
    assert pulled.cost.sent > 0
    assert pulled.cost.parts["wire"] == pytest.approx(pulled.cost.sent / A3.remote_write_gb_per_s / 1e3)
    summed = next(s for s in priced(SMALL, 1).timeline.spans if s.launch.step == "sum")
    assert summed.cost.parts == {"fixed": TRITON_US}


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"experts": 250}, "experts"),
        ({"experts": 8}, "experts"),
        ({"parts": 17}, "parts"),
        ({"parts": 0}, "parts"),
        ({"communication_blocks": 48}, "communication_blocks"),
        ({"quantize": "int9"}, "quantize"),
        ({"comm_alg": "fullmesh"}, "comm_alg"),
        ({"routing": Routing("best")}, "routing"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        priced(replace(SMALL, **changes), 0)  # type: ignore[arg-type]
    assert caught.value.argument == argument


def test_a_judged_price_has_the_same_value_and_a_bar_around_it() -> None:
    call = call_of(SMALL)
    for operator in OPERATORS:
        value = call.priced(operator, A3)[0].us
        found = call.judged(operator, A3)
        assert found.value == value
        assert 0 < found.below < value
        assert found.above > 0
        assert {"launch_graph_us", "remote_writes_in_flight", "remote_write_gb_per_s", "cores"} <= found.read
        assert "launch_stream_us" not in found.read


def test_the_rank_is_one_that_receives_as_many_rows_as_most() -> None:
    def rows(kind: str) -> int:
        return call_of(Group(ranks=8, routing=Routing(kind))).traffics[0].num_rows

    mean = 128 * 8
    assert mean / 3 < rows("zipf") < mean
    assert rows("uniform") == pytest.approx(mean, rel=0.05)


def test_of_some_ranks_the_slowest_is_judged() -> None:
    group = replace(SMALL, routing=Routing("zipf"))
    call = Call.of(group, Remembered(kernel_cost_of), group.draw(), 0, 7)
    slowest = max(priced.us for priced in call.priced("dispatch", A3))
    assert call.judged("dispatch", A3).value == slowest
