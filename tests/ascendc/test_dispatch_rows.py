"""dispatch_rows: whom it waits for, how long, and what it leaves behind."""

from __future__ import annotations

import numpy as np
import pytest

from moe_triton.core.ascendc import REPORT_BAD_ROW, REPORT_TIMEOUT
from moe_triton.layout import FLAG_BITS

from .case import Case, check_reports, draw_routing, sent_to
from .driver import FLAG_WORD, World
from .library import Library
from .test_deadlines import AN_HOUR_US, EARLIER_US, LATE_US, SHORT_US, Later, reported

CASE = Case(tokens=(4, 3, 4), topk=3, blocks=2, timed=True)
NUM_ENTRIES = 6


def arrived(library: Library, case: Case) -> tuple[World, np.ndarray]:
    """A world in which all ranks have sent to rank 0, and the counts that it has seen."""
    world = World(library, case)
    for rank in range(len(case.tokens)):
        check_reports(world.send_rows(rank, draw_routing(case, 0, 0, rank), zone=0))
    counts, report = world.wait_for_status(0, zone=0)
    check_reports(report)
    return world, counts


def last_row(counts: np.ndarray) -> tuple[int, int, int]:
    """Expert, source and number of the last row of the last entry that has any."""
    expert, source = (int(i[-1]) for i in counts.nonzero())
    return expert, source, int(counts[expert, source]) - 1


def flag(world: World, row: tuple[int, int, int]) -> np.ndarray:
    expert, source, index = row
    return world.stamp(0, zone=0, source=source, expert=expert, index=index)[FLAG_WORD:]


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_names_the_entries_of_rows_that_do_not_come(library: Library, blocks: int) -> None:
    case = Case(**{**CASE.__dict__, "blocks": blocks, "timeout_us": SHORT_US})
    world, counts = arrived(library, case)
    row = last_row(counts)
    flag(world, row)[0] = 0
    before, waited = counts.copy(), world.times(NUM_ENTRIES)
    assert waited is not None
    waited.array[:] = EARLIER_US
    report = world.wait_for_rows(0, 0, counts, waited)
    assert (report[:, 0] == REPORT_TIMEOUT).sum() == 1
    entry = row[0] * 3 + row[1]
    assert report[report[:, 0] == REPORT_TIMEOUT][0, 1:3].tolist() == [entry, 1]
    before[row[:2]] = -1
    assert counts.tolist() == before.tolist()
    waited.check_guards()
    assert waited.array[entry] >= SHORT_US
    assert set(np.delete(waited.array, entry).tolist()) == {EARLIER_US}


def test_other_entries_are_complete_when_one_is_not(library: Library) -> None:
    world, counts = arrived(library, Case(**{**CASE.__dict__, "timeout_us": SHORT_US}))
    missing = last_row(counts)
    flag(world, missing)[0] = 0
    world.wait_for_rows(0, 0, counts)
    for expert, source in np.ndindex(2, 3):
        for index in range(int(counts[expert, source])):
            assert not flag(world, (expert, source, index))[0]


@pytest.mark.parametrize("blocks", [1, 2])
def test_times_the_late(library: Library, blocks: int) -> None:
    world, counts = arrived(library, Case(**{**CASE.__dict__, "blocks": blocks}))
    row = last_row(counts)
    late, waited = flag(world, row), world.times(NUM_ENTRIES)
    assert waited is not None
    late[0], waited.array[:] = 0, EARLIER_US

    def raise_flag() -> np.ndarray:
        late[0] = FLAG_BITS
        return np.zeros((1, 3), np.int32)

    with Later(library, raise_flag):
        check_reports(world.wait_for_rows(0, 0, counts, waited))
    entry = row[0] * 3 + row[1]
    assert waited.array[entry] >= LATE_US
    # Those that it polls with the late one had come before, and others at once.
    assert set(np.delete(waited.array, entry).tolist()) == {EARLIER_US}


def test_it_does_not_wait_again(library: Library) -> None:
    world, counts = arrived(library, Case(**{**CASE.__dict__, "timeout_us": AN_HOUR_US}))
    flag(world, last_row(counts))[0] = 0
    report = world.wait_for_rows(0, 0, counts, report=reported(2))
    assert report[:, 0].tolist() == [REPORT_TIMEOUT] * 2


def test_an_entry_that_did_not_come_has_no_rows(library: Library) -> None:
    world, counts = arrived(library, Case(**{**CASE.__dict__, "timeout_us": AN_HOUR_US}))
    expert, source, index = last_row(counts)
    for number in range(index + 1):
        flag(world, (expert, source, number))[0] = 0
    counts[expert, source] = -1
    check_reports(world.wait_for_rows(0, 0, counts))
    assert counts[expert, source] == -1


def test_rows_of_a_kept_rank_are_not_waited_for(library: Library) -> None:
    case = Case(**{**CASE.__dict__, "timeout_us": AN_HOUR_US})
    world, counts = arrived(library, case)
    own = [(expert, 0, i) for expert in range(2) for i in range(len(sent_to(case, 0, 0, 0, 0, expert)))]
    assert own
    for row in own:
        flag(world, row)[0] = 0
    check_reports(world.wait_for_rows(0, 0, counts, kept_rank=0))


@pytest.mark.parametrize("count", [100, 2**31 - 1])
def test_counts_stay_in_bounds(library: Library, count: int) -> None:
    """Peers wrote them."""
    case = Case(**{**CASE.__dict__, "timeout_us": SHORT_US, "blocks": 1})
    world, counts = arrived(library, case)
    expert, source, _ = last_row(counts)
    counts[expert, source] = count
    report = world.wait_for_rows(0, 0, counts)
    most = case.config.num_max_tokens_per_rank
    assert report[0, :3].tolist() == [REPORT_BAD_ROW, expert * 3 + source, count - most]
    for window in world.windows:
        window.check_guards()
