"""Plans made by hand, whose times are computed by hand: order, streams, events, waits, parts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autotune.model.cost import UnknownWorkError
from autotune.model.timelines.timeline import Timeline, cpu_walk, npu_streams, one_stream, walk_ranks
from moe_triton.core import ascendc
from moe_triton.core.plan import Launch, Plan
from moe_triton.schemes.direct.ascendc import COUNTS_SEND, DIRECT_SEND
from moe_triton.schemes.fullmesh.ascendc import INBAND_RECEIVE, INBAND_SEND
from tests.autotune.model import calls
from tests.autotune.model.hand_made import (
    EVENT_US,
    LATENCY_US,
    LAUNCH_US,
    MACHINE,
    TWO_RANKS,
    communicate,
    compute,
    kernel_costs_of,
    plan_of,
    run_of,
    send,
    traffics_of,
    wait,
    walk,
)

RANKS = traffics_of(TWO_RANKS)
ONE = RANKS[0]
ROWS = run_of({1: {0: 1.0}})
"""The second launch waits for all of the first one."""


def times(timeline: Timeline) -> list[tuple[float, float]]:
    return [(span.begin_us, span.end_us) for span in timeline.spans]


def test_one_stream_runs_one_launch_after_the_other() -> None:
    plan = plan_of(compute("a"), compute("b"), compute("c"))
    timeline = walk(plan, ONE, MACHINE, kernel_costs=kernel_costs_of({"a": 10, "b": 20, "c": 1}))
    assert times(timeline) == [(4, 14), (18, 38), (42, 43)]
    assert timeline.total_us == 43
    assert timeline.parts == {"launches": 12, "events": 0, "waits": 0, "a": 10, "b": 20, "c": 1}
    assert timeline.critical == (0, 1, 2)


def test_a_host_that_launches_takes_longer_than_a_graph() -> None:
    plan = plan_of(compute("a"), compute("b"))
    kernel_costs = kernel_costs_of({"a": 10, "b": 20})
    assert walk(plan, ONE, MACHINE, kernel_costs=kernel_costs).total_us == 2 * LAUNCH_US + 30
    assert walk(plan, ONE, MACHINE, mode="stream", kernel_costs=kernel_costs).total_us == 4 * LAUNCH_US + 30


def test_a_launch_on_the_other_stream_waits_for_an_event_and_so_does_the_end() -> None:
    launches = compute("a"), compute("b", stream="communication")
    kernel_costs = kernel_costs_of({"a": 10, "b": 5, "c": 1})
    timeline = walk(plan_of(*launches, compute("c", alongside=True)), ONE, MACHINE, kernel_costs=kernel_costs)
    assert times(timeline)[:2] == [(4, 14), (14 + EVENT_US + LAUNCH_US, 25)]
    assert timeline.total_us == 25 + EVENT_US
    assert timeline.parts == {"launches": 8, "events": 2 * EVENT_US, "waits": 0, "a": 10, "b": 5}


def test_without_a_launch_alongside_one_stream_does_and_costs_no_events() -> None:
    plan = plan_of(compute("a"), compute("b", stream="communication"))
    timeline = walk(plan, ONE, MACHINE, kernel_costs=kernel_costs_of({"a": 10, "b": 5}))
    assert times(timeline) == [(4, 14), (18, 23)]
    assert timeline.total_us == 23


def test_launches_alongside_overlap_and_the_next_one_waits_for_both() -> None:
    plan = plan_of(compute("a"), compute("b", alongside=True, stream="communication"), compute("c"))
    for us, critical in (({"a": 30, "b": 10, "c": 1}, (0, 2)), ({"a": 10, "b": 30, "c": 1}, (1, 2))):
        timeline = walk(plan, ONE, MACHINE, kernel_costs=kernel_costs_of(us))
        a, b, c = timeline.spans
        assert a.begin_us == LAUNCH_US
        assert b.begin_us == EVENT_US + LAUNCH_US  # after what the user's stream held before
        assert c.begin_us == max(a.end_us, b.end_us + EVENT_US) + LAUNCH_US
        assert timeline.critical == critical
        assert sum(timeline.parts.values()) == timeline.total_us


def test_where_streams_may_not_overlap_there_is_one() -> None:
    launches = compute("a"), compute("b", alongside=True, stream="communication"), compute("c")
    kernel_costs = kernel_costs_of({"a": 30, "b": 10, "c": 1})
    want = [(4, 34), (38, 48), (52, 53)]
    assert times(walk(plan_of(*launches, overlap=False), ONE, MACHINE, kernel_costs=kernel_costs)) == want
    assert (
        times(walk(plan_of(*launches), ONE, MACHINE, kernel_costs=kernel_costs, streams=one_stream)) == want
    )


def test_the_cpu_runs_neighbours_in_pairs_and_an_npu_as_far_as_its_streams_go() -> None:
    """a, b beside a, c beside b: the CPU's c comes after both; an NPU's only after a."""
    plan = plan_of(
        compute("a"), compute("b", alongside=True, stream="communication"), compute("c", alongside=True)
    )
    kernel_costs = kernel_costs_of({"a": 10, "b": 30, "c": 1})
    cpu = walk(plan, ONE, MACHINE, kernel_costs=kernel_costs, streams=cpu_walk)
    assert times(cpu) == [(4, 14), (4, 34), (38, 39)]
    npu = walk(plan, ONE, MACHINE, kernel_costs=kernel_costs, streams=npu_streams)
    assert times(npu) == [(4, 14), (6, 36), (18, 19)]
    assert npu.total_us == 36 + EVENT_US


def test_a_wait_ends_when_the_last_peer_s_flag_is_there() -> None:
    plan = plan_of(send(), wait(), overlap=False)
    kernel_costs = kernel_costs_of({"dispatch_send": 10, "dispatch_rows": 3})
    early, late = walk_ranks(plan, RANKS, MACHINE, kernel_costs=kernel_costs, begins_us=[0, 100], run=ROWS)
    assert times(early) == [(4, 14), (18, 114 + LATENCY_US)]
    assert early.spans[1].waited_us == 114 + LATENCY_US - 21
    assert early.parts == {"launches": 8, "events": 0, "waits": 93.75, "send": 10, "wait": 3}
    assert times(late) == [(104, 114), (118, 121)]
    assert late.spans[1].waited_us == 0
    assert (early.total_us, late.total_us) == (114.75, 21)


def test_ranks_alike_wait_for_the_last_hop_only() -> None:
    plan = plan_of(send(), wait(), overlap=False)
    kernel_costs = kernel_costs_of({"dispatch_send": 10, "dispatch_rows": 0})
    quick = MACHINE.replaced({"launch_graph_us": 0})
    alone = walk(plan, ONE, quick, kernel_costs=kernel_costs, run=ROWS)
    assert times(alone) == [(0, 10), (10, 10 + LATENCY_US)]
    lines = walk_ranks(plan, RANKS, quick, kernel_costs=kernel_costs, run=ROWS)
    assert [times(each) for each in lines] == [times(alone)] * 2
    totals = [each.total_us for each in lines]
    assert totals == [10 + LATENCY_US] * 2


def test_arrivals_can_be_given() -> None:
    plan = plan_of(send(), wait("first"), wait("second"), overlap=False)
    asked, run = [], run_of({1: {0: 1.0}, 2: {0: 1.0}})

    def arrivals(launch: Launch, number: int) -> float:
        asked.append((launch.step, number))
        return 50.0

    kernel_costs = kernel_costs_of({"dispatch_send": 1, "dispatch_rows": 1})
    timeline = walk(plan, ONE, MACHINE, kernel_costs=kernel_costs, arrivals=arrivals, run=run)
    assert times(timeline) == [(4, 5), (9, 50), (54, 55)]
    assert asked == [("first", 0), ("second", 1)]


def test_a_receiver_s_link_takes_its_time() -> None:
    """Each rank sends 20000 bytes to the other one: 20 us at a thousand bytes a microsecond."""
    plan = plan_of(send(), wait(), overlap=False)
    kernel_costs = kernel_costs_of({"dispatch_send": 10, "dispatch_rows": 3})
    begin, run = LAUNCH_US, run_of({1: {0: 1.0}}, {0: [20_000] * 2})
    for timeline in (
        walk(plan, ONE, MACHINE, kernel_costs=kernel_costs, run=run_of({1: {0: 1.0}}, {0: [20_000]})),
        *walk_ranks(plan, RANKS, MACHINE, kernel_costs=kernel_costs, run=run),
    ):
        assert timeline.spans[1].end_us == begin + 20 + 0.25


def test_bytes_that_all_send_to_one_rank_queue_at_its_link() -> None:
    """Both ranks' rows go to rank 0: it receives rank 1's only, and rank 1 nothing."""
    plan = plan_of(send(), wait(), overlap=False)
    kernel_costs = kernel_costs_of({"dispatch_send": 10, "dispatch_rows": 3})
    run = run_of({1: {0: 1.0}}, {0: [20_000, 0]})
    crowded, idle = walk_ranks(plan, RANKS, MACHINE, kernel_costs=kernel_costs, run=run)
    assert crowded.spans[1].end_us == LAUNCH_US + 20 + 0.25
    assert idle.spans[1].end_us == 21
    # the same from two launches, which share the link
    plan = plan_of(send("first"), send(), wait(), overlap=False)
    run = run_of({2: {0: 1.0, 1: 1.0}}, {0: [20_000, 0], 1: [20_000, 0]})
    crowded, _ = walk_ranks(plan, RANKS, MACHINE, kernel_costs=kernel_costs, run=run)
    assert crowded.spans[2].end_us == LAUNCH_US + 40 + 0.25


def test_two_parts_are_packed_and_sent_beside_each_other() -> None:
    plan = plan_of(
        compute("pack"),
        send("send 0"),
        compute("pack", alongside=True),
        send("send 1"),
        wait(),
        compute("arrange"),
    )
    us = {"pack": 20, "dispatch_send": 30, "dispatch_rows": 1, "arrange": 5}
    timeline = walk(plan, ONE, MACHINE, kernel_costs=kernel_costs_of(us), run=run_of({4: {1: 1.0, 3: 1.0}}))
    assert times(timeline) == [
        (4, 24),
        (30, 60),  # after an event
        (28, 48),  # beside the first part's send
        (64, 94),  # the second part was packed long before
        (98, 99),
        (105, 110),
    ]
    assert timeline.critical == (0, 1, 3, 4, 5)
    assert timeline.parts == {
        "launches": 20,
        "events": 4,
        "waits": 0,
        "pack": 20,
        "send 0": 30,
        "send 1": 30,
        "wait": 1,
        "arrange": 5,
    }


def test_what_is_awaited_is_there_before_all_of_a_launch() -> None:
    """The first wait is for three quarters of what the late rank sends."""
    plan = plan_of(send(), wait("wait 0"), compute("sum"), wait("wait 1", alongside=True), compute("sum"))
    us, run = {"dispatch_send": 40, "dispatch_rows": 1, "sum": 50}, run_of({1: {0: 0.75}, 3: {0: 1.0}})
    quick = MACHINE.replaced({"launch_graph_us": 0, "event_us": 0})
    _, early = walk_ranks(plan, RANKS, quick, kernel_costs=kernel_costs_of(us), begins_us=[100, 0], run=run)
    assert early.spans[1].end_us == 100 + 40 * 3 / 4 + LATENCY_US
    assert early.spans[2].begin_us == early.spans[3].begin_us == early.spans[1].end_us
    assert early.spans[3].end_us == 100 + 40 + LATENCY_US
    assert early.spans[4].begin_us == early.spans[2].end_us


def test_flags_in_band_come_with_rows_and_counts_before_them() -> None:
    plan = plan_of(
        communicate("send", INBAND_SEND, post_status=1),
        communicate("wait", ascendc.DISPATCH_WAIT),
        communicate("arrange", INBAND_RECEIVE),
        overlap=False,
    )
    kernel_costs = kernel_costs_of({"inband_send": 40, "dispatch_wait": 1, "inband_receive": 2})
    run = run_of({1: {0: 0.0}, 2: {0: 1.0}})
    early, _ = walk_ranks(plan, RANKS, MACHINE, kernel_costs=kernel_costs, begins_us=[0, 100], run=run)
    assert early.spans[1].end_us == 100 + LAUNCH_US + LATENCY_US
    assert early.spans[2].end_us == 100 + LAUNCH_US + 40 + LATENCY_US


def test_direct_exchanges_counts_before_rows() -> None:
    """The second wait is for flags that a peer posts after its first wait, which is for the late rank."""
    plan = plan_of(
        communicate("send counts", COUNTS_SEND),
        communicate("wait for counts", ascendc.DISPATCH_WAIT),
        communicate("send", DIRECT_SEND),
        communicate("flag", ascendc.POST_STATUS),
        communicate("wait", ascendc.DISPATCH_WAIT),
        overlap=False,
    )
    run = run_of({1: {0: 1.0}, 4: {3: 1.0}}, ranks=3)
    us = {"counts_send": 1, "dispatch_wait": 0.25, "direct_send": 30, "post_status": 1}
    quick = MACHINE.replaced({"launch_graph_us": 0})
    ids = [[[0]], [[1]], [[2]]]
    ranks = traffics_of(ids, num_experts=3)
    begins = [50, 0, 0]
    late, early, other = walk_ranks(
        plan, ranks, quick, kernel_costs=kernel_costs_of(us), begins_us=begins, run=run
    )
    assert early.spans[1].end_us == 51 + LATENCY_US
    assert early.spans[3].end_us == 51 + LATENCY_US + 31
    assert times(early) == times(other)
    # The late rank sees the others' counts at once,.
    assert late.spans[1].waited_us == 0
    assert late.spans[4].waited_us > 0
    assert late.spans[4].end_us == early.spans[3].end_us + LATENCY_US


def random_plan(r: random.Random) -> Plan:
    launches: list[Launch] = []
    for number in range(r.randint(2, 10)):
        other = launches and launches[-1].stream == "compute"
        beside = bool(launches) and r.random() < 0.5
        stream = "communication" if bool(other) == beside else "compute"
        launches.append(compute(f"k{number}", beside, stream))  # type: ignore[arg-type]
    return plan_of(*launches)


@pytest.mark.parametrize("streams", [npu_streams, one_stream, cpu_walk])
def test_order_holds_the_sum_is_the_total_and_longer_kernel_costs_take_no_less(streams: object) -> None:
    r = random.Random(0)
    for _ in range(200):
        plan = random_plan(r)
        us = {launch.kernel.name: float(r.randint(1, 50)) for launch in plan.launches}
        timeline = walk(plan, ONE, MACHINE, kernel_costs=kernel_costs_of(us), streams=streams)  # type: ignore[arg-type]
        assert sum(timeline.parts.values()) == pytest.approx(timeline.total_us)
        for index, span in enumerate(timeline.spans):
            first = index - 1 if span.launch.alongside else index
            ends = [before.end_us for before in timeline.spans[:first]]
            assert span.begin_us >= max(ends, default=0) + LAUNCH_US
        longer = us | {r.choice(list(us)): 80.0}
        again = walk(plan, ONE, MACHINE, kernel_costs=kernel_costs_of(longer), streams=streams)  # type: ignore[arg-type]
        assert again.total_us >= timeline.total_us


def test_a_wait_for_what_nobody_sends_is_an_error_that_names_it() -> None:
    settings = calls.config(2, 4)
    whole = calls.plan(settings, "combine", blocks=2)
    (alone,) = (replace(each, joined=False) for each in whole.launches if each.step == "wait")
    with pytest.raises(UnknownWorkError, match=r"combine_wait on rank 0: its blocks wait for what nobody"):
        walk(
            plan_of(alone),
            calls.traffic(settings),
            MACHINE,
            kernel_costs=kernel_costs_of({"combine_wait": 1}),
        )


def test_all_ranks_of_a_group_are_walked_in_order() -> None:
    ranks = traffics_of([[[0]], [[1]], [[2]]], num_experts=3)
    with pytest.raises(ValueError, match="in order"):
        walk_ranks(plan_of(compute("a")), ranks[::-1], MACHINE, kernel_costs=kernel_costs_of({"a": 1}))
    with pytest.raises(ValueError, match="in order"):
        walk_ranks(plan_of(compute("a")), ranks[:2], MACHINE, kernel_costs=kernel_costs_of({"a": 1}))
