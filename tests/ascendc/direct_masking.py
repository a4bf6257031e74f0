"""Ranks that are masked while the direct scheme's kernels run: rows go by all counts, or not at all."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_triton.core.ascendc import REPORT_MASKED

from .case import WrongResultError, check_reports, draw_routing
from .library import Library
from .masking import Late, MaskedDirectCase, MaskedDirectWorld, learn, mask, while_masking

LOST, LAST = 1, 2
When = Literal["counts", "others' counts", "rows to send", "other masks", "rows", "called off"]


@dataclass(frozen=True)
class MaskedLaterCase(MaskedDirectCase):
    """Rank 0 hears that a rank is masked after its call has begun. Another one was before.

    Attributes:
        when: it waits for that rank's counts; it waits for those of another one, and has these; it has all
            counts; it has begun with a rank masked that others have not; it waits for that rank's rows; or it
            waits for rows of others, one of whom calls the dispatch off.
    """

    tokens: tuple[int, ...] = (4, 3, 3, 0)
    lost: int = 3
    when: When = "counts"


def masked_later(world: MaskedDirectWorld, late: Late | None = None) -> AbstractContextManager[None]:
    """Masks the rank for rank 0 a while from now, and raises a flag of another rank's behind that."""
    return while_masking(lambda: mask(world.tables_of_peers[0], LOST, world.case.lost), late)


def check_masked_later(library: Library, case: MaskedLaterCase, seed: int = 0) -> None:
    """Raises unless rank 0 sends by the counts of all, or nothing, and says which."""
    library.seed(seed)
    world = MaskedDirectWorld(library, case, seed)
    if case.when in ("counts", "others' counts", "other masks"):
        _check_counts(world, case.when)
    elif case.when == "rows to send":
        _check_rows_to_send(world)
    else:
        _check_rows(world, is_called_off=case.when == "called off")


def _send_counts(world: MaskedDirectWorld, *ranks: int) -> None:
    for rank in ranks:
        check_reports(world.send_counts(rank, draw_routing(world.case, world.seed, 0, rank), 0))


def _check_counts(world: MaskedDirectWorld, when: str) -> None:
    """Nothing is sent, and no flag of rows."""
    if when == "other masks":
        for rank in (0, LAST):
            mask(world.tables_of_peers[rank], LOST, world.case.lost)
        learn(world.tables_of_peers[0], LOST, world.case.lost)
        _send_counts(world, LAST)
        missing = LAST
    else:
        missing = LOST if when == "counts" else LAST
        _send_counts(world, LOST + LAST - missing)
    phases = world.phases(0, draw_routing(world.case, world.seed, 0, 0), 0, 0)
    status = world.layout.counts_status
    end = status.offset(source=status.dims[-1].extent - 1) + status.item_bytes
    before = [window.copy() for window in world.windows]
    if when == "other masks":
        reports = world.library.launch_phases(world.case.blocks, phases)
    else:
        with masked_later(world):
            reports = world.library.launch_phases(world.case.blocks, phases)
    counts, wait, *others = reports
    for report in (counts, *others):
        check_reports(report)
    if wait[wait[:, 0] == REPORT_MASKED][:, 1].tolist() != [missing] or (wait[:, 0] % REPORT_MASKED).any():
        raise WrongResultError(f"reported {wait[:, :3].tolist()}")
    for rank, (window, was) in enumerate(zip(world.windows, before, strict=True)):
        changed = np.flatnonzero(window[end:] != was[end:])
        if changed.size:
            raise WrongResultError(f"byte {end + changed[0]} of rank {rank}'s window was written")


def _check_rows_to_send(world: MaskedDirectWorld) -> None:
    """All counts are there: they are used, and those of the rank that is masked by now among them."""
    ranks = 0, LOST, LAST
    _send_counts(world, *ranks)
    mask(world.tables_of_peers[0], LOST, world.case.lost)
    for rank in ranks:
        counts = world.layout.counts_status
        name, arguments = world.wait_phase(
            rank, counts, 0, **world.calls.in_one_launch(rank, 0), dispatch_word=0
        )
        check_reports(world.library.launch(name, 1, **arguments))
        check_reports(world.send_rows(rank, draw_routing(world.case, world.seed, 0, rank), 0))
    for rank in ranks:
        world.check_counts(rank, 0, 0)
        world.check_tables(rank, 0)
        if rank != LOST:
            world.check_rows(rank, 0)


def _check_rows(world: MaskedDirectWorld, *, is_called_off: bool) -> None:
    """Only those of the masked rank are not waited for; and a flag that says nothing is no flag of rows."""
    rows = world.layout.rows_status
    check_reports(world.post(0, rows, 0))
    if is_called_off:
        name, arguments = world.post_phase(LAST, rows, 0)
        check_reports(world.library.launch(name, 1, **{**arguments, "count": 0}))
    else:
        check_reports(world.post(LAST, rows, 0))
    at = rows.offset(source=LAST)
    late = Late(world.windows[0][at : at + rows.item_bytes])
    with masked_later(world, late):
        _, report = world.wait(0, rows, 0)
    if not is_called_off:
        check_reports(report)
    elif report[:, :2].tolist() != [[REPORT_MASKED, LAST]]:
        raise WrongResultError(f"reported {report[:, :3].tolist()}")
