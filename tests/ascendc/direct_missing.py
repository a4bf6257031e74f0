"""A direct dispatch to which one rank does not come: nothing may be sent before its counts are there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_triton.core.ascendc import REPORT_TIMEOUT

from .case import WrongResultError, check_reports, draw_routing
from .direct import DirectCase, DirectWorld
from .library import Library

MISSING = 1


@dataclass(frozen=True)
class MissingCountsCase(DirectCase):
    """Rank 0's dispatch, all ranks but one having sent their counts."""


def check_missing_counts(library: Library, case: MissingCountsCase, seed: int = 0) -> None:
    """Raises unless rank 0 reports the missing rank, and sends neither rows nor their flags.

    That rank may still read what lies in this zone, and where rows belong depends on its counts.
    """
    library.seed(seed)
    world = DirectWorld(library, case, seed)
    for rank in range(2, len(case.tokens)):
        check_reports(world.send_counts(rank, draw_routing(case, seed, 0, rank), 0))
    before = [window.copy() for window in world.windows]
    phases = world.phases(0, draw_routing(case, seed, 0, 0), 0, 0)
    counts, wait, *others = library.launch_phases(case.blocks, phases)
    for report in (counts, *others):
        check_reports(report)
    if wait[wait[:, 0] == REPORT_TIMEOUT][:, 1:3].tolist() != [[MISSING, 1]]:
        raise WrongResultError(f"reported {wait[:, :3].tolist()}")
    # What may change comes first in a zone: counts, and the entries that announce them.
    status = world.layout.counts_status
    end = status.offset(source=status.dims[-1].extent - 1) + status.item_bytes
    for rank, (window, was) in enumerate(zip(world.windows, before, strict=True)):
        changed = np.flatnonzero(window[end:] != was[end:])
        if changed.size:
            raise WrongResultError(f"byte {end + changed[0]} of rank {rank}'s window was written")
