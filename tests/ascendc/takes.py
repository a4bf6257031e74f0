"""A dispatch in parts: each part is sent, and what has come is taken."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from .case import Routing, WrongResultError, check_reports
from .memory import Guarded

if TYPE_CHECKING:
    from .driver import World


def dispatch_in_parts(
    world: World, rank: int, number: int, routing: Routing, zone: int, straggle: bool = False
) -> tuple[np.ndarray, Guarded | None]:
    """Counts, and times of arrival where the case wants them. All rows have been taken."""
    c, parts = world.config, world.case.takes
    waited = world.times(c.experts_on(rank) * c.num_ranks)
    tables = [Guarded((c.num_ranks, c.experts_on(rank)), np.int32) for _ in range(parts + 1)]
    bounds = [world.case.tokens[rank] * part // parts for part in range(parts + 1)]
    for part in range(parts):
        of_part = {"first_token": bounds[part], "num_tokens": bounds[part + 1] - bounds[part]}
        calls = world.calls.sending(rank, number) if part == 0 else {}
        check_reports(world.send_rows(rank, routing, zone, **calls, **of_part, post_status=int(part == 0)))
        if part == 0:
            waits = world.calls.waiting(rank, number)
            counts, report = world.wait_for_status(rank, zone, waited, sees_all=True, **waits)
            check_reports(report)
        if straggle:
            time.sleep(0.002)
        check_reports(take_rows(world, rank, zone, counts, tables, part, waited))
        check_taken(world, counts, tables, part)
    return counts, waited


def take_rows(
    world: World,
    rank: int,
    zone: int,
    counts: np.ndarray,
    tables: list[Guarded],
    part: int,
    waited: Guarded | None = None,
    **changes: object,
) -> np.ndarray:
    """The report."""
    arguments: dict[str, object] = {
        "part": part,
        "num_parts": len(tables) - 1,
        "rows_before": tables[part].array,
        "rows_taken": tables[part + 1].array,
        "window": world.windows[rank].bytes,
        "recv_counts": counts,
        "waited_us": waited.array if waited else 0,
        **world.masks,
        "num_local_experts": world.config.experts_on(rank),
        "num_ranks": world.config.num_ranks,
        "kept_rank": -1,
        "stamp_offset": world.case.slot.stamp_offset,
        "zone": zone,
        "timeout_us": world.case.timeout_us,
        "slots": world.slots.on(rank),
    }
    report = world.library.launch("dispatch_take", world.case.blocks, **{**arguments, **changes})
    for table in tables:
        table.check_guards()
    return report


def check_taken(world: World, counts: np.ndarray, tables: list[Guarded], part: int) -> None:
    """Numbers that grow, up to all."""
    before, taken = tables[part].array, tables[part + 1].array
    if part == 0 and before.any():
        raise WrongResultError(f"before the first part {before} are taken")
    if (taken < before).any() or (taken > counts.T).any():
        raise WrongResultError(f"{taken} are taken after {before}, of {counts.T}")
    if part + 1 == world.case.takes and (taken != counts.T).any():
        raise WrongResultError(f"the last part has taken {taken}, not {counts.T}")
