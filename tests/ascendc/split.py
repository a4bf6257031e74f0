"""Which block sends how many rows: an even share of all of them, at any number of blocks."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np

from moe_triton.core.ascendc import MAX_BLOCKS, REPORT_BAD_ROW

from .case import Case, WrongResultError, draw_routing
from .direct import DirectCase, DirectWorld
from .driver import World
from .library import Library


@dataclass(frozen=True)
class SplitCase(Case):
    """Rows that have no place anywhere, so that the block which would send one reports it.

    `blocks` is where trying ends: from 1 on, and as many as there may be.

    Attributes:
        direct: whether rows go straight to their receivers' outputs.
    """

    direct: bool = False


def check_split(library: Library, case: SplitCase, seed: int = 0) -> None:
    """Raises unless the blocks have every row once, and none has more than its even share, rounded up."""
    rows = case.tokens[0] * case.config.num_results_per_token
    for blocks in [*range(1, case.blocks + 1), MAX_BLOCKS]:
        report = _report(library, replace(case, blocks=blocks), seed)
        counts = np.where(report[:, 0] == REPORT_BAD_ROW, report[:, 2], 0)
        if counts.sum() != rows or counts.max() > -(-rows // blocks):
            raise WrongResultError(f"{blocks} blocks send {counts.tolist()} of {rows} rows")


def _report(library: Library, case: SplitCase, seed: int) -> np.ndarray:
    routing = copy.deepcopy(draw_routing(case, seed, 0, 0))
    routing.expand_idx[:] = -1
    routing.shared_slots[:] = -1
    if case.direct:
        fields = {name: value for name, value in vars(case).items() if name != "direct"}
        return DirectWorld(library, DirectCase(**fields), seed).send_rows(0, routing, 0)
    return World(library, case, seed).send_rows(0, routing, 0, post_status=0)
