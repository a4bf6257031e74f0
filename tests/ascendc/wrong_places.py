"""A result whose place is none: it has to be reported, and nothing is sent in its stead."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_triton.core.ascendc import REPORT_BAD_ROW

from .case import Case, WrongResultError, results_of
from .driver import World
from .library import Library
from .memory import GARBAGE
from .placed import SPARE_ROWS, at_places, draw_places


@dataclass(frozen=True)
class WrongPlaceCase(Case):
    """What rank 0 sends back in one combine.

    Attributes:
        is_below: whether the place is in front of the first one, and not behind the last one.
    """

    is_below: bool = False


def check_wrong_place(library: Library, case: WrongPlaceCase, seed: int = 0) -> None:
    """Raises unless rank 0 reports that row, and only that, and all others reach their slots."""
    world = World(library, case, seed)
    received = world.expected_rows(0, 0)
    rows = results_of(case, received["origins"], 0)
    wrong = seed % len(rows)
    places = draw_places(seed, 0, len(rows))
    places[wrong] = -1 if case.is_below else len(rows) + SPARE_ROWS
    report = world.send_results(0, at_places(rows, places), received, 0, places=places)
    reported = report[report[:, 0] != 0, :3].tolist()
    if reported != [[REPORT_BAD_ROW, wrong, 1]]:
        raise WrongResultError(f"reported {reported}, not row {wrong}")
    for number, (source, token, k) in enumerate(received["origins"].tolist()):
        window = world.windows[source].bytes
        at = world.layout.combine_slots.offset(zone=0, token=token, k=k)
        slot = window[at : at + case.result_bytes]
        at = world.layout.combine_status.offset(zone=0, token=token, k=k)
        is_flagged = window[at : at + 4].any()
        is_right = is_flagged and np.array_equal(slot, rows[number])
        if not (not is_flagged and (slot == GARBAGE).all() if number == wrong else is_right):
            raise WrongResultError(f"result {number} at place {places[number]} differs")
