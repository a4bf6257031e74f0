"""Launches whose blocks are split: what runs beside each other, and what is taken as it comes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.model.constants import Machine
from autotune.model.cost import Cost, Work
from autotune.model.kernel_costs.counted.run import PlanRun
from autotune.model.timelines.timeline import cpu_walk, npu_streams
from moe_triton.core import ascendc
from moe_triton.core.plan import Launch, split
from moe_triton.schemes.common.ascendc import DISPATCH_OFFSETS
from moe_triton.schemes.fullmesh.ascendc import DISPATCH_RECEIVE, FUSED
from tests.autotune.model.hand_made import (
    LATENCY_US,
    LAUNCH_US,
    MACHINE,
    communicate,
    compute,
    kernel_costs_of,
    plan_of,
    run_of,
    send,
    walk,
)
from tests.autotune.model.test_timeline import ONE, times


def received() -> list[Launch]:
    """A launch of four blocks, three of which receive while one sends."""
    phases = [replace(send(), blocks=4)]
    kernels = ascendc.DISPATCH_WAIT, DISPATCH_OFFSETS, DISPATCH_RECEIVE
    phases += [communicate(kernel.name, kernel, blocks=4) for kernel in kernels]
    return split(phases, 3, FUSED)


def awaited(first: int) -> PlanRun:
    """Its launches begin with this number: counts, which come at once, and rows."""
    return run_of({first + 1: {first: 0.0}, first + 3: {first: 1.0}})


OF_SPLIT = {"a": 1, "dispatch_send": 30, "dispatch_wait": 2, "dispatch_offsets": 3, "b": 1}


def test_phases_of_a_split_launch_run_beside_each_other() -> None:
    plan = plan_of(compute("a"), *received(), compute("b"), overlap=False)
    timeline = walk(
        plan, ONE, MACHINE, kernel_costs=kernel_costs_of(OF_SPLIT | {"dispatch_receive": 4}), run=awaited(1)
    )
    sent = 9 + 30
    assert times(timeline)[1:] == [
        (9, sent),
        (9, 11),
        (11, 14),
        (14, sent + LATENCY_US),  # when the last row has come
        (sent + LATENCY_US + LAUNCH_US, sent + LATENCY_US + LAUNCH_US + 1),
    ]
    assert timeline.critical == (0, 2, 3, 4, 5)
    assert sum(timeline.parts.values()) == timeline.total_us
    assert timeline.parts["launches"] == 3 * LAUNCH_US
    assert [span.launch.blocks for span in timeline.spans[1:5]] == [1, 3, 3, 3]


@pytest.mark.parametrize("us", [4, 60])
def test_what_follows_a_split_launch_waits_for_all_of_its_blocks(us: float) -> None:
    launches = [*received(), compute("b")]
    for streams in (npu_streams, cpu_walk):
        timeline = walk(
            plan_of(*launches, overlap=False),
            ONE,
            MACHINE,
            kernel_costs=kernel_costs_of(OF_SPLIT | {"dispatch_receive": us}),
            streams=streams,
            arrivals=lambda launch, number: 0.0,
            run=awaited(0),
        )
        assert timeline.spans[4].begin_us == max(4 + 30, 4 + 2 + 3 + us) + LAUNCH_US


def test_who_takes_what_comes_takes_the_last_of_it_after_its_arrival() -> None:
    cost = Cost({"look": 1.0, "rows": 10.0}, look_us=1.0, taking_us=10.0)

    def kernel_cost(work: Work, machine: Machine) -> Cost:
        return cost if work.kernel is DISPATCH_RECEIVE else Cost({"fixed": OF_SPLIT[work.kernel.name]})

    timeline = walk(
        plan_of(*received(), overlap=False),
        ONE,
        MACHINE,
        kernel_costs=lambda _: kernel_cost,
        arrivals=lambda launch, number: {"dispatch_receive": 109.0}.get(launch.kernel.name, 0.0),
        run=awaited(0),
    )
    # It begins at 9: rows came for 100 us, a tenth of which it takes them. A round lasts 1 / 0.9 us.
    assert timeline.spans[3].end_us == pytest.approx(109 + 2 / 0.9)
    assert timeline.spans[3].waited_us == pytest.approx(100 + 2 / 0.9 - 11)


@pytest.mark.parametrize(
    ("coming_us", "after_us"),
    [(100, 2 / 0.9), (20, 4), (10.4, 2 * 20.8**0.5), (10, 2 * 20**0.5), (8, 10), (3, 11), (0.2, 11)],
)
def test_it_never_has_more_to_take_than_all(coming_us: float, after_us: float) -> None:
    cost = Cost({"look": 1.0, "rows": 10.0}, look_us=1.0, taking_us=10.0)
    assert cost.after_last_us(coming_us) == pytest.approx(after_us)
    assert Cost({"rows": 10.0}).after_last_us(coming_us) == 0
