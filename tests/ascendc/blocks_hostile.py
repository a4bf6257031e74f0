"""A rank that waits for a block which is not as it should be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_triton.core.ascendc import REPORT_BAD_ROW, REPORT_TIMEOUT
from moe_triton.layout import NUM_ZONES, UB_ALIGN, WORD_BYTES
from moe_triton.schemes.a2_fullmesh.layout import end_flag

from .blocks import BlocksWorld
from .blocks_case import BlocksCase, Outputs
from .case import WrongResultError, check_reports, draw_routing
from .library import Library

TOO_MANY = 12
"""Rows that end behind a block of cases of two ranks with three tokens, and still in the window."""


@dataclass(frozen=True)
class HostileBlockCase(BlocksCase):
    """Rank 0 waits for a block that is not as it should be.

    Attributes:
        header: what stands in the header of the last rank in place of its first count; None: nothing comes.
        has_end: whether FLAG2 of what it ought to send is there.
        has_other_end: whether FLAG2 is also where it would be if that count were right.
        has_old_block: whether its zone has the block before, as large; the header stays as sent.
    """

    header: int | None = None
    has_end: bool = True
    has_other_end: bool = False
    has_old_block: bool = False


def check_hostile(library: Library, case: HostileBlockCase, seed: int = 0) -> None:
    """Raises unless rank 0 reports the last rank, at once where it can know, and reads nothing outside."""
    library.seed(seed)
    world = BlocksWorld(library, case, seed)
    c, last = world.config, len(case.tokens) - 1
    outputs = Outputs.of(c.num_local_experts, c.num_ranks, c.receive_capacity(0))
    senders = [rank for rank in range(len(case.tokens)) if rank != last or case.header is not None]
    try:
        if case.has_old_block:
            _send_as_before(world, last, outputs)
        for rank in senders:
            if world.nics:
                world.nics.use(rank)
            phases = world.sending(world.phases(rank, draw_routing(case, seed, 0, rank), 0, 0, outputs))
            for name, arguments in phases if rank < last or case.has_end else phases[:1]:
                check_reports(library.launch(name, case.blocks, **arguments))
    finally:
        if world.nics:
            world.nics.close()  # what was posted is there
    if case.header is not None and not case.has_old_block:
        _change_header(world, last, case.header)
    phases = world.waiting(world.phases(0, draw_routing(case, seed, 0, 0), 0, 0, outputs))
    wait, offsets = library.launch_phases(case.blocks, phases)
    check_reports(offsets)
    outputs.check_guards()
    code = REPORT_TIMEOUT if case.header is None or not case.has_end else REPORT_BAD_ROW
    said = [words[:3].tolist() for words in wait if words[0]]
    if said != [[code, last, 1]]:
        raise WrongResultError(f"reported {said}, expected {[code, last, 1]}")
    if (outputs.recv_counts.array[:, last] != -1).any():
        raise WrongResultError(f"counts {outputs.recv_counts.array.tolist()}")
    if outputs.recv_offsets.array.tolist() != np.maximum(outputs.recv_counts.array, 0).cumsum().tolist():
        raise WrongResultError(
            f"sums {outputs.recv_offsets.array.tolist()}: what did not come counts as none"
        )


def _send_as_before(world: BlocksWorld, rank: int, outputs: Outputs) -> None:
    """Sends the same block of a rank with the number of its zone's round before."""
    numbers = world.numbers[rank]
    now = numbers.copy()
    numbers -= NUM_ZONES
    routing = draw_routing(world.case, world.seed, 0, rank)
    for name, arguments in world.sending(world.phases(rank, routing, 0, 0, outputs)):
        check_reports(world.library.launch(name, world.case.blocks, **arguments))
    numbers[:] = now


def _change_header(world: BlocksWorld, rank: int, count: int) -> None:
    """Sets the first count of that rank's header; and FLAG2 behind so many rows, if the case says so."""
    layout, window, case = world.layout, world.windows[0], world.case
    at = layout.blocks.offset(rank=rank)
    counts = window[at : at + WORD_BYTES * case.experts_per_rank].view(np.int32)
    counts[0] = count
    if isinstance(case, HostileBlockCase) and case.has_other_end:
        end = at + layout.rows_offset + int(counts.sum()) * case.row.packed_bytes
        window[end : end + UB_ALIGN].view(np.int32)[:] = end_flag(case.first_number)
