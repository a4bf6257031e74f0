"""Indices come from memory that peers write: none of them may become an address unchecked."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from moe_triton.core.ascendc import REPORT_BAD_ROW
from moe_triton.layout import STATUS_ENTRY_BYTES

from .case import Case, check_reports, draw_routing, results_of
from .driver import World
from .inband import receive_inband
from .library import Library
from .test_deadlines import dispatched

HOSTILE = [-1, -2, 2**31 - 1, -(2**31), 1000]
SHORT_US = 20_000


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("flagged", [0, 1])
def test_origins_are_not_sent(library: Library, blocks: int, flagged: int) -> None:
    case = Case(tokens=(6, 6), topk=3, blocks=blocks)
    world, received = dispatched(library, case)
    origins = received[1]["origins"]
    rows = results_of(case, origins, 0)
    bad = 0
    for column in range(3):
        for value in HOSTILE[: len(origins) // 3]:
            origins[bad, column] = value
            bad += 1
    good = origins[bad:].copy()
    before = [window.bytes.copy() for window in world.windows]
    report = world.send_results(1, rows, received[1], zone=1, flag_rows=flagged)
    reported = report[report[:, 0] == REPORT_BAD_ROW]
    assert reported[:, 2].sum() == bad
    assert reported[0, 1] == 0
    _assert_only_results_changed(world, before, good, flagged)


def _assert_only_results_changed(
    world: World, before: list[np.ndarray], origins: np.ndarray, flagged: int = 1
) -> None:
    for rank, window in enumerate(world.windows):
        window.check_guards()
        now, was = window.bytes.copy(), before[rank]
        for source, token, k in origins:
            if source == rank:
                at = world.layout.combine_slots.offset(zone=1, token=token, k=k)
                now[at : at + world.case.result_bytes] = was[at : at + world.case.result_bytes]
                at = world.layout.combine_status.offset(zone=1, token=token, k=k)
                assert now[at : at + STATUS_ENTRY_BYTES].view(np.int32).tolist() == [flagged] * 8
                now[at : at + STATUS_ENTRY_BYTES] = was[at : at + STATUS_ENTRY_BYTES]
        assert np.array_equal(now, was)


@pytest.mark.parametrize("total", [2**31 - 1, 1000, -5])
def test_totals_read_no_further_than_the_rows(library: Library, total: int) -> None:
    world, received = dispatched(library, Case(tokens=(4, 4), blocks=2))
    rows = results_of(world.case, received[1]["origins"], 0)
    received[1]["offsets"][-1] = total
    before = [window.bytes.copy() for window in world.windows]
    report = world.send_results(1, rows, received[1], zone=1)
    sent = len(rows) if total > 0 else 0
    assert report[0, :3].tolist() == [REPORT_BAD_ROW, sent, total - sent if total > 0 else 1]
    _assert_only_results_changed(world, before, received[1]["origins"][:sent])


# Of each table: values, and how many of them are reported. Ids that no rank holds just stay at home.
TABLES = {
    "sent_ids": (HOSTILE, 0),
    "expand_idx": (HOSTILE, 5),
    "shared_ranks": ([-2, 1, 2**31 - 1, -(2**31), 7], 5),
    "shared_slots": ([-1, 6, 2**31 - 1, -(2**31)], 4),
}


@pytest.mark.parametrize("inband", [False, True])
@pytest.mark.parametrize("table", list(TABLES))
def test_routing_is_not_sent(library: Library, table: str, inband: bool) -> None:
    case = Case(tokens=(6, 6, 6), topk=3, blocks=2, shared=(1, 1), inband=inband, hidden=300)
    world = World(library, case)
    routing = copy.deepcopy(draw_routing(case, 0, 0, 1))
    values, bad = TABLES[table]
    getattr(routing, table).flat[: len(values)] = values
    before = [window.bytes.copy() for window in world.windows]
    report = world.send_rows(1, routing, zone=0, post_status=0)
    assert report[report[:, 0] == REPORT_BAD_ROW][:, 2].sum() == bad
    if bad:
        # Results are numbered (token, k): routed ones first.
        first = 0 if table == "expand_idx" else case.topk
        assert report[report[:, 0] == REPORT_BAD_ROW][0, 1] == first
    for rank, (window, was) in enumerate(zip(world.windows, before, strict=True)):
        window.check_guards()
        slots, others = world.slots.on(rank), window.bytes != was
        for expert in range(slots.extent("expert")):
            low = slots.offset(zone=0, source=1, expert=expert)
            others[low : low + slots.stride("source")] = False
        assert not others.any()


def test_an_expert_beyond_the_ranks_is_reported(library: Library) -> None:
    case = Case(tokens=(3, 3))
    world = World(library, case)
    routing = copy.deepcopy(draw_routing(case, 0, 0, 0))
    routing.sent_ids[0, 0] = 4
    report = world.send_rows(0, routing, zone=0, post_status=0, num_experts=5)
    assert report[0, :3].tolist() == [REPORT_BAD_ROW, 0, 1]


@pytest.mark.parametrize("inband", [False, True])
def test_more_results_than_rows_are_reported(library: Library, inband: bool) -> None:
    case = Case(tokens=(3, 3), topk=3, blocks=1, inband=inband)
    world = World(library, case)
    report = world.send_rows(0, draw_routing(case, 0, 0, 0), zone=0, post_status=0, rows_per_token=2)
    assert report[0, :3].tolist() == [REPORT_BAD_ROW, 2, 3]


@pytest.mark.parametrize("value", [-1, -(2**31), 1000, 2**31 - 1])
@pytest.mark.parametrize("entry", [0, 1, 3])
def test_offsets_stay_in_bounds(library: Library, value: int, entry: int) -> None:
    case = Case(tokens=(4, 4), blocks=1, inband=True, scaled=True, timeout_us=SHORT_US)
    world = World(library, case)
    for rank in range(2):
        check_reports(world.send_rows(rank, draw_routing(case, 0, 0, rank), zone=0))
    check_reports(world.wait_for_status(0, zone=0)[1])
    offsets = world.expected_rows(0, 0)["offsets"]
    capacity = int(offsets[-1])
    offsets[entry] = value
    _, report = receive_inband(world, 0, 0, offsets, capacity=capacity)
    assert report[0, :2].tolist() == [REPORT_BAD_ROW, entry]
    for window in world.windows:
        window.check_guards()
    # The flags of slots that belong to nobody's row are as they were.
    used = world.slots.offset(zone=1)
    assert not world.windows[0].bytes[used:].reshape(-1, 512)[:, 480:].any()


def test_a_smaller_output_is_not_overrun(library: Library) -> None:
    case = Case(tokens=(4, 4), blocks=2, inband=True, scaled=True)
    world = World(library, case)
    for rank in range(2):
        check_reports(world.send_rows(rank, draw_routing(case, 0, 0, rank), zone=0))
    check_reports(world.wait_for_status(0, zone=0)[1])
    offsets = world.expected_rows(0, 0)["offsets"]
    capacity = int(offsets[-1]) - 2
    outputs, report = receive_inband(world, 0, 0, offsets, capacity=capacity)
    assert report[report[:, 0] == REPORT_BAD_ROW][:, 2].sum() == 2
    origins = world.expected_rows(0, 0)["origins"][:capacity]
    assert np.array_equal(outputs["out_origins"].array, origins)
