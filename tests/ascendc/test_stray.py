"""Results that a combine was not told to wait for: see `stray`."""

from __future__ import annotations

import pytest

from moe_triton.core.ascendc import REPORT_STRAY

from .case import check_reports, draw_routing, results_of
from .library import Library
from .orders import orders
from .stray import StrayCase, StrayWorld, check_stray

CASES = {
    "one_of_two": StrayCase(tokens=(3, 2)),
    "all": StrayCase(tokens=(3, 2), dropped=2),
    "of_many_tokens": StrayCase(tokens=(150, 3, 40), blocks=3, topk=4, dropped=2),
    "beside_absent_ones": StrayCase(tokens=(6, 5, 4), absent=0.3, special=0.2, inactive=0.2, blocks=5),
    "shared": StrayCase(tokens=(4, 0, 3), shared=(1, 1), blocks=1),
    "inband": StrayCase(tokens=(3, 2), inband=True, hidden=128),
    "parts": StrayCase(tokens=(13, 10), blocks=4, part_tokens=4),
    "parts_beside_absent_ones": StrayCase(tokens=(9, 7, 8), part_tokens=3, absent=0.3, inactive=0.2, topk=3),
}


@orders(3, 25)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_no_later_combine_ends_by_its_flags(library: Library, case: StrayCase, seeds: range) -> None:
    for seed in seeds:
        check_stray(library, case, seed)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_has_come_and_nobody_expects_is_reported(library: Library, case: StrayCase) -> None:
    """Everything is sent before the first rank waits. Of tokens that wait for nothing nobody looks."""
    world = StrayWorld(library, case)
    received = [world.expected_rows(rank, 0) for rank in range(len(case.tokens))]
    for rank in range(1, len(case.tokens)):
        rows = results_of(case, received[rank]["origins"], 0)
        check_reports(world.send_results(rank, rows, received[rank], 0))
    routing = draw_routing(case, 0, 0, 0)
    report = world.reports_of(0, 0, 0, received[0], world.misused(routing))
    is_stray = report[:, 0] == REPORT_STRAY
    check_reports(report[~is_stray])
    assert report[is_stray, 2].sum() == world.num_stray(routing)
