"""A combine in parts: which tokens are taken first, and what happens where results do not come."""

from __future__ import annotations

import numpy as np
import pytest

from moe_triton.core.ascendc import REPORT_BAD_ROW, REPORT_TIMEOUT
from moe_triton.core.records import PART_PROGRESS
from moe_triton.layout import STATUS_ENTRY_BYTES

from .case import Case, Routing, check_reports, draw_routing, results_of
from .driver import NOTHING_EXPECTED, World
from .library import Library
from .parts import CombineInParts
from .test_deadlines import AN_HOUR_US, LATE_US, SHORT_US, Later, dispatched, reported

ZONE = 1
Received = dict[str, np.ndarray]


def without_tokens(received: Received, of_rank: int, tokens: list[int]) -> Received:
    """Less the rows of some tokens of a rank."""
    origins = received["origins"]
    kept = origins[(origins[:, 0] != of_rank) | ~np.isin(origins[:, 1], tokens)]
    offsets = np.full_like(received["offsets"], len(kept))
    return {"origins": np.ascontiguousarray(kept), "offsets": offsets}


def send(world: World, rank: int, received: Received) -> None:
    """All results of a rank at once."""
    rows = results_of(world.case, received["origins"], 0)
    check_reports(world.send_results(rank, rows, received, ZONE))


class Rank0:
    """Its combine, whose own results are sent by the launches of its parts."""

    def __init__(self, world: World, received: Received) -> None:
        self.parts = CombineInParts(world, 0, 0, ZONE)
        self.routing: Routing = draw_routing(world.case, 0, 0, 0)
        self._received = received
        self._rows = results_of(world.case, received["origins"], 0)

    def launch(self, part: int, **changes: object) -> np.ndarray:
        return self.parts.launch(part, self._rows, self._received, self.routing, **changes)

    def ready(self, part: int) -> list[int]:
        """The tokens of a part."""
        return [int(token) for token in self.parts.ready.array[self.parts.places(part)]]


def test_tokens_that_are_complete_come_first(library: Library) -> None:
    """Rank 1 has sent the results of rank 0's last tokens only."""
    case = Case(tokens=(8, 5), blocks=1, part_tokens=4)
    world, received = dispatched(library, case)
    early = without_tokens(received[1], 0, [0, 1, 2, 3])
    routing = draw_routing(case, 0, 0, 0)
    needed = [token for token in range(4) if (routing.ids[token] >= case.experts_per_rank).any()]
    assert needed
    send(world, 1, early)
    rank = Rank0(world, received[0])
    check_reports(rank.launch(0))
    rank.parts.check(0, rank.routing)
    assert not set(rank.ready(0)) & set(needed)
    late = without_tokens(received[1], 0, [4, 5, 6, 7])
    with Later(library, lambda: world.send_results(1, results_of(case, late["origins"], 0), late, ZONE)):
        check_reports(rank.launch(1))
    rank.parts.check(1, rank.routing)
    assert set(rank.ready(1)) >= set(needed)


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_late_rank_keeps_nobody_from_sending(library: Library, blocks: int) -> None:
    """Rank 0 waits in its first part until its deadline; rank 1 gets all that it needs of it all the same."""
    case = Case(tokens=(9, 7), topk=4, blocks=blocks, part_tokens=2, timeout_us=SHORT_US)
    world, received = dispatched(library, case)
    rank = Rank0(world, received[0])
    report = rank.launch(0)
    assert REPORT_TIMEOUT in report[:, 0]
    waited = report[:, 0] == REPORT_TIMEOUT
    sent = rank.parts.progress.array[: len(waited), PART_PROGRESS.word("sent")]
    assert (sent[waited] == rank.parts.num_parts).all()
    if blocks == 1:
        send(world, 1, without_tokens(received[1], 0, list(range(9))))
        check_reports(world.wait_for_results(1, draw_routing(case, 0, 0, 1), ZONE))
        world.check_results(1, 0, ZONE, draw_routing(case, 0, 0, 1))


def test_what_was_sent_ahead_is_not_sent_again(library: Library) -> None:
    case = Case(tokens=(9, 7), topk=4, blocks=1, part_tokens=2, timeout_us=SHORT_US)
    world, received = dispatched(library, case)
    rank = Rank0(world, received[0])
    assert rank.launch(0)[0, 0] == REPORT_TIMEOUT
    first = world.layout.combine_status.offset(zone=ZONE)
    flags = world.windows[1].bytes[first:]
    assert flags[: STATUS_ENTRY_BYTES * 7 * 4].any()
    flags[: STATUS_ENTRY_BYTES * 7 * 4] = 0
    rank.launch(1)
    assert not flags[: STATUS_ENTRY_BYTES * 7 * 4].any()


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("timed", [False, True])
def test_missing_results_are_named(library: Library, blocks: int, timed: bool) -> None:
    case = Case(tokens=(8, 5), blocks=blocks, part_tokens=4, timeout_us=SHORT_US, timed=timed)
    world, received = dispatched(library, case)
    lacking = [2, 5, 6]
    send(world, 1, without_tokens(received[1], 0, lacking))
    rank = Rank0(world, without_tokens(received[0], 0, lacking))
    for part in range(2):
        report = rank.launch(part)
    late = report[report[:, 0] == REPORT_TIMEOUT]
    assert late[:, 2].sum() == len(lacking)
    assert late[0, 1] in lacking
    assert np.flatnonzero(rank.parts.pending.array > 0).tolist() == lacking
    # Whatever reads the list finds tokens of this rank.
    assert ((rank.parts.ready.array >= 0) & (rank.parts.ready.array < 8)).all()
    if rank.parts.waited:
        times = rank.parts.waited.array.reshape(8, -1)
        assert (times[lacking] >= SHORT_US).all()
        assert (times >= 0).all()


def test_times_of_late_results(library: Library) -> None:
    case = Case(tokens=(6, 4), topk=3, blocks=1, part_tokens=3, timed=True, absent=0.2, special=0.2)
    world, received = dispatched(library, case)
    rank = Rank0(world, received[0])
    rows = results_of(case, received[1]["origins"], 0)
    with Later(library, lambda: world.send_results(1, rows, received[1], ZONE)):
        check_reports(rank.launch(0))
    check_reports(rank.launch(1))
    world.check_times(rank.parts.waited, of_results=True)
    assert rank.parts.waited is not None
    times, ids = rank.parts.waited.array.reshape(6, 3), rank.routing.ids
    is_late = (ids >= case.experts_per_rank) & (ids < 2 * case.experts_per_rank)
    is_routed = (ids >= 0) & (ids < world.config.num_experts)
    assert not times[~is_late & is_routed].any()
    assert (times[~is_routed] == NOTHING_EXPECTED).all()
    assert (times[is_late] >= LATE_US).any()


def test_entries_of_masked_tokens_are_not_touched(library: Library) -> None:
    case = Case(tokens=(4, 4), inactive=0.999, part_tokens=2)
    world = World(library, case)
    received = world.expected_rows(0, 0)
    rank = Rank0(world, received)
    assert (rank.routing.active_index < 0).all()
    at = world.layout.combine_status.offset(zone=ZONE)
    world.windows[0].bytes[at : at + 8 * STATUS_ENTRY_BYTES] = 0xEE
    for part in range(2):
        check_reports(rank.launch(part))
    assert (world.windows[0].bytes[at : at + 8 * STATUS_ENTRY_BYTES] == 0xEE).all()
    assert sorted(rank.parts.ready.array.tolist()) == [0, 1, 2, 3]


def test_blocks_that_have_reported_do_not_wait_again(library: Library) -> None:
    case = Case(tokens=(4, 4), blocks=2, part_tokens=2, timeout_us=AN_HOUR_US)
    world, received = dispatched(library, case)
    rank = Rank0(world, without_tokens(received[0], 0, [0, 1, 2, 3]))
    report = rank.launch(0, report=reported(2))
    assert report[:, 0].tolist() == [REPORT_TIMEOUT] * 2
    assert report[:, 3].tolist() == [ZONE] * 2


@pytest.mark.parametrize("value", [-1, -(2**31), 1000, 2**31 - 1])
@pytest.mark.parametrize("column", range(3))
def test_bad_origins_are_reported_once(library: Library, column: int, value: int) -> None:
    """Whatever part they are in: a token that no rank has is in the last one."""
    case = Case(tokens=(6, 6), blocks=1, part_tokens=2, topk=3)
    world, received = dispatched(library, case)
    origins, rows = received[1]["origins"], results_of(case, received[1]["origins"], 0)
    origins[0, column] = value
    before = [window.bytes.copy() for window in world.windows]
    progress = np.zeros((1, PART_PROGRESS.num_words), np.int32)
    found = []
    for part in range(3):
        of_part = {"part": part, "num_parts": 3, "part_tokens": 2, "progress": progress}
        report = world.send_results(1, rows, received[1], ZONE, **of_part)
        found += [(part, number) for code, _, number in report[:, :3].tolist() if code == REPORT_BAD_ROW]
    assert [number for _, number in found] == [1]
    if column == 1:
        assert found == [(2, 1)]
    for window, was in zip(world.windows, before, strict=True):
        window.check_guards()
        assert (window.bytes != was).any()
