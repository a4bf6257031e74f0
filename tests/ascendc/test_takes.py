"""A dispatch in parts takes what has come, whoever sent it, and waits for the rest in its last part only."""

from __future__ import annotations

import numpy as np
import pytest

from .case import Case, check_reports, draw_routing
from .driver import World
from .library import Library
from .memory import Guarded
from .takes import check_taken, take_rows
from .test_deadlines import Later

ZONE, STRAGGLER = 0, 2


@pytest.mark.parametrize("blocks", [1, 3])
def test_rows_of_others_do_not_wait_for_the_straggler(library: Library, blocks: int) -> None:
    """Its counts were sent ahead, its rows come in the last part."""
    case = Case(tokens=(8, 6, 7), takes=3, blocks=blocks, topk=3, hidden=64)
    world = World(library, case)
    routings = [draw_routing(case, 0, 0, rank) for rank in range(3)]
    for rank in range(3):
        sent = 0 if rank == STRAGGLER else case.tokens[rank]
        check_reports(world.send_rows(rank, routings[rank], ZONE, num_tokens=sent))
    counts, report = world.wait_for_status(0, ZONE)
    check_reports(report)
    tables = [Guarded((3, case.config.experts_on(0)), np.int32) for _ in range(case.takes + 1)]
    for part in range(case.takes - 1):
        check_reports(take_rows(world, 0, ZONE, counts, tables, part))
        check_taken(world, counts, tables, part)
        taken = tables[part + 1].array
        assert not taken[STRAGGLER].any()
        assert (taken[:STRAGGLER] == counts.T[:STRAGGLER]).all()
    assert counts.T[STRAGGLER].any()
    last = case.takes - 1
    with Later(library, lambda: world.send_rows(STRAGGLER, routings[STRAGGLER], ZONE, post_status=0)):
        check_reports(take_rows(world, 0, ZONE, counts, tables, last))
    check_taken(world, counts, tables, last)
