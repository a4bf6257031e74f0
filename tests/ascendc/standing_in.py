"""A relay that is gone, and another rank of its server runs what it did, in its window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_triton.runtime.masks import Paths

from .case import check_reports
from .hierarchy import HierarchyWorld
from .hierarchy_case import HierarchyCase, Received, check
from .hierarchy_hostile import all_sent, reopened, returned_by_all
from .library import Library, Phase
from .masking import mask
from .memory import Guarded


@dataclass(frozen=True)
class StandingInCase(HierarchyCase):
    """A rank is gone before a round, and has a stand-in: its experts alone are out of reach."""

    tokens: tuple[int, ...] = (2, 3, 1, 0, 3, 2)
    servers: tuple[int, ...] = (2, 2, 2)
    topk: int = 4
    lost: int = 3

    @property
    def going_on(self) -> list[int]:
        """All other ranks."""
        return [rank for rank in range(len(self.tokens)) if rank != self.lost]


def check_standing_in(library: Library, case: StandingInCase, seed: int = 0) -> None:
    """Raises unless those who go on get all that they send each other, and nobody waits for who is gone."""
    library.seed(seed)
    world = HierarchyWorld(library, case, seed)
    _stand_in(world, case.lost)
    received = all_sent(world, gone=(case.lost,))
    for rank, each in enumerate(received):
        _launch(world, world.dispatch_phases(rank, 0, 0, each)[2])
    for rank in case.going_on:
        for phase in world.dispatch_phases(rank, 0, 0, received[rank])[3:]:
            _launch(world, phase)
        world.check_received(rank, 0, received[rank])
    reopened(world)
    _stand_in(world, case.lost)
    try:
        waits = _sums_sent(world, case, received)
    finally:
        world.nics.close()
    for rank in case.going_on:
        _, wait = waits[rank]
        _launch(world, waits[rank])
        check("rail_seen", wait["rail_seen"], wait["outer_counts"])
        check("rail_left_out", wait["rail_left_out"], world.left_out_of(rank))
        world.check_sums(rank, 0, 0, 0)


def _sums_sent(world: HierarchyWorld, case: StandingInCase, received: list[Received]) -> list[Phase]:
    """Each rank's wait for what has been summed for it. The one that is gone has returned nothing."""
    returned, phases = returned_by_all(world, received, case.lost)
    waits = []
    for rank, (wait, _) in enumerate(phases):
        _launch(world, wait)
        world.nics.use(rank)
        seen, left_out = (Guarded((world.layout.num_servers,), np.int32) for _ in range(2))
        sums = world.server_sums(rank, 0, received[rank])
        of_rank = received[rank], returned[rank], sums, seen, 0, left_out.array
        *sends, last = world.partial_phases(rank, 0, 0, *of_rank)
        for phase in sends:
            _launch(world, phase)
        waits.append(last)
    return waits


def _stand_in(world: HierarchyWorld, lost: int) -> None:
    """On every rank. The one that stands in has its own table of peers for both."""
    for rank, table in enumerate(world.tables):
        if rank != lost:
            mask(table, lost, paths=Paths(world.config, rank, relays=True), stood_in_for=(lost,))
    world.tables[lost] = world.tables[lost ^ 1]


def _launch(world: HierarchyWorld, phase: Phase) -> None:
    name, arguments = phase
    check_reports(world.library.launch(name, world.case.blocks, **arguments))
