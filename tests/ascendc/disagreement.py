"""One rank whose call word differs from the others': who waits for its entries has to report it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_triton.core.ascendc import REPORT_MISMATCH
from moe_triton.layout import CALL_WORD, STATUS_ENTRY_BYTES, WORD_BYTES

from .call_words import word_of
from .case import Case, WrongResultError, check_reports, draw_routing
from .driver import World
from .library import Library

OTHER = word_of("D", 500)


@dataclass(frozen=True)
class DisagreeingCase(Case):
    """A dispatch in which one rank posts another word, and a wait for it.

    Attributes:
        other: that rank.
        absent_rank: one that posts nothing, or None.
    """

    other: int = 1
    absent_rank: int | None = None


def check_disagreement(library: Library, case: DisagreeingCase, seed: int = 0) -> None:
    """Raises unless rank 0 reports all entries of the other rank, and leaves what tells whose they are."""
    world = World(library, case, seed)
    ranks = [rank for rank in range(len(case.tokens)) if rank != case.absent_rank]
    for rank in ranks:
        call = {**world.calls.sending(rank, 0), **({"call": OTHER} if rank == case.other else {})}
        check_reports(world.send_rows(rank, draw_routing(case, seed, 0, rank), zone=0, **call))
    counts, report = world.wait_for_status(0, zone=0)
    experts, num_ranks = counts.shape
    if sorted(np.flatnonzero((counts >= 0).any(axis=0)).tolist()) != ranks:
        raise WrongResultError(f"counts {counts.tolist()}")
    mismatches = report[report[:, 0] == REPORT_MISMATCH]
    if mismatches[:, 2].sum() != experts:
        raise WrongResultError(f"{mismatches[:, :3].tolist()} reported, not {experts} entries")
    for words in mismatches.tolist():
        if words[1] % num_ranks != case.other or words[4:6] != [word_of("D", 0), OTHER]:
            raise WrongResultError(f"reported {words}")
    for expert in range(experts):
        at = world.layout.dispatch_status.offset(zone=0, expert=expert, source=case.other)
        entry = world.windows[0].bytes[at : at + STATUS_ENTRY_BYTES].view(np.int32)
        if entry[CALL_WORD] != OTHER or at % WORD_BYTES:
            raise WrongResultError(f"the entry was left as {entry.tolist()}")
