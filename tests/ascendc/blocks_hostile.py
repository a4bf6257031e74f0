"""A rank that waits for a block which is not as it should be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_triton.core.ascendc import REPORT_BAD_ROW, REPORT_TIMEOUT
from moe_triton.layout import WORD_BYTES

from .blocks import BlocksCase, BlocksWorld, Outputs
from .case import WrongResultError, check_reports, draw_routing
from .library import Library


@dataclass(frozen=True)
class HostileBlockCase(BlocksCase):
    """Rank 0 waits for a block that is not as it should be.

    Attributes:
        header: what stands in the header of the last rank in place of its first count; None: nothing comes.
        has_end: whether FLAG2 of what it ought to send is there.
    """

    header: int | None = None
    has_end: bool = True


def check_hostile(library: Library, case: HostileBlockCase, seed: int = 0) -> None:
    """Raises unless rank 0 reports the last rank, at once where it can know, and reads nothing outside."""
    library.seed(seed)
    world = BlocksWorld(library, case, seed)
    c, last = world.config, len(case.tokens) - 1
    outputs = Outputs.of(c.num_local_experts, c.num_ranks, c.receive_capacity(0))
    for rank in range(1 if case.header is not None else 0, len(case.tokens)):
        if rank == last and case.header is None:
            continue
        phases = world.phases(rank, draw_routing(case, seed, 0, rank), 0, 0, outputs)[:2]
        for name, arguments in phases if rank < last or case.has_end else phases[:1]:
            check_reports(library.launch(name, case.blocks, **arguments))
    if case.header is not None:
        at = world.layout.blocks.offset(rank=last)
        world.windows[0][at : at + WORD_BYTES].view(np.int32)[0] = case.header
        for name, arguments in world.phases(0, draw_routing(case, seed, 0, 0), 0, 0, outputs)[:2]:
            check_reports(library.launch(name, case.blocks, **arguments))
    phases = world.phases(0, draw_routing(case, seed, 0, 0), 0, 0, outputs)[2:]
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
