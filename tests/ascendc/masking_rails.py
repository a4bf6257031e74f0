"""Ranks of a hierarchy that are masked: before a dispatch, and while others wait for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_triton.core.ascendc import REPORT_TIMEOUT
from moe_triton.core.records import RAIL_END, STATUS_ENTRY
from moe_triton.runtime.masks import Paths

from .case import WrongResultError, check_reports, sent_to
from .hierarchy import HierarchyWorld
from .hierarchy_case import HierarchyCase, Received, check
from .hierarchy_hostile import all_sent, codes_of, dispatched, returned_by_all
from .library import Library, Phase
from .masking import Late, check_same, mask, while_masking
from .memory import Guarded

SHORT_US = 20_000


@dataclass(frozen=True)
class MaskedRailCase(HierarchyCase):
    """A rank is masked before a dispatch. So nothing comes of what it would have passed on."""

    tokens: tuple[int, ...] = (2, 3, 1, 0, 3, 2)
    servers: tuple[int, ...] = (2, 2, 2)
    topk: int = 4
    lost: int = 3
    relays: bool = True


@dataclass(frozen=True)
class DirectEntriesCase(MaskedRailCase):
    """The same, and its neighbour waits for what each rank says itself, as in a barrier. None has said it."""


@dataclass(frozen=True)
class MaskedMeanwhileCase(HierarchyCase):
    """A rank is masked while another one waits for it.

    Attributes:
        gone: which rank.
        during: its rail waits for its tokens, of which some have come; a rank of its server for its results;
            or its rail for what it has summed.
    """

    tokens: tuple[int, ...] = (2, 3, 4, 4, 3, 2)
    servers: tuple[int, ...] = (2, 2, 2)
    topk: int = 4
    parts: int = 2
    gone: int = 3
    during: Literal["relay", "returned", "partials"] = "relay"

    @property
    def neighbour(self) -> int:
        """The other rank of its server."""
        return self.gone ^ 1

    @property
    def peer(self) -> int:
        """The rank of its rail on the first server."""
        return self.gone % 2


def check_masked_rail(library: Library, case: MaskedRailCase, seed: int = 0) -> None:
    """Raises unless all that go on have the counts of all that reach them, and none of the others."""
    library.seed(seed)
    world, c = HierarchyWorld(library, case, seed), case.config
    _mask_all(world, case.lost)
    before = world.windows[case.lost].copy()
    everybody = all_sent(world, gone=(case.lost,))
    going_on = [rank for rank in range(c.num_ranks) if rank != case.lost]
    for kernel in ("rail_relay", "dispatch_wait"):
        for rank in going_on:
            phases = dict(world.dispatch_phases(rank, 0, 0, everybody[rank]))
            check_reports(library.launch(kernel, case.blocks, **phases[kernel]))
    for rank in going_on:
        _check_counts(world, rank, everybody[rank])
    check_same(world.windows[case.lost], before)


def check_direct_entries(library: Library, case: DirectEntriesCase, seed: int = 0) -> None:
    """Raises unless it waits for all others, also for those whose rows would come through the masked rank."""
    library.seed(seed)
    world, neighbour = HierarchyWorld(library, case, seed), case.lost ^ 1
    _mask_all(world, case.lost)
    name, wait = world.dispatch_phases(neighbour, 0, 0, _nothing(world))[3]
    wait |= {"is_relayed": 0, "timeout_us": SHORT_US, "count_end": 0}
    wait["recv_counts"] = np.zeros((case.config.num_local_experts, case.config.num_ranks), np.int32)
    report = library.launch(name, case.blocks, **wait)
    others = [rank for rank in range(case.config.num_ranks) if rank != case.lost]
    missing = np.flatnonzero((wait["recv_counts"] < 0).any(0)).tolist()
    if {code for code, *_ in codes_of(report)} != {REPORT_TIMEOUT} or missing != others:
        raise WrongResultError(f"ranks {missing} are missing instead of {others}")


def check_masked_meanwhile(library: Library, case: MaskedMeanwhileCase, seed: int = 0) -> None:
    """Raises unless the waits that a rank is missed in go on, with all that is not of that rank alone."""
    library.seed(seed)
    if case.during == "relay":
        _check_relay(HierarchyWorld(library, case, seed))
        return
    world, received = dispatched(library, case, seed)
    try:
        if case.during == "returned":
            _check_returned(world, received)
            return
        sums = _partials_sent(world, received)
    finally:
        world.nics.close()
    _check_partials(world, received, sums)


def _check_relay(world: HierarchyWorld) -> None:
    """The first of its tokens have come, and have been passed on. Then nothing of it has.

    Also where nobody knows yet that it is masked but the one that passes them on.
    """
    case, c = _case_of(world), world.config
    everybody = all_sent(world, sends_last=lambda rank: rank != case.gone)
    for rank in sorted(set(range(c.num_ranks)) - {case.gone}, key=lambda rank: rank != case.peer):
        relay = world.dispatch_phases(rank, 0, 0, everybody[rank])[2]
        if rank == case.peer:
            # What comes has the relay look anew: every other time nothing does.
            late = Late(_end_of(world, rank, world.layout.rail_flags)) if world.seed % 2 else None
            with while_masking(lambda: _mask_all(world, case.gone), late):
                _launch(world, relay)
        else:
            _launch(world, relay)
    for rank in range(c.num_ranks):
        if rank != case.gone:
            if rank == case.peer ^ 1:
                mask(world.tables[rank])
            _launch(world, world.dispatch_phases(rank, 0, 0, everybody[rank])[3])
            _check_counts(world, rank, everybody[rank], case.gone)


def _check_returned(world: HierarchyWorld, received: list[Received]) -> None:
    """Its results have not come to its neighbour, whose own have."""
    case = _case_of(world)
    _, phases = returned_by_all(world, received, case.gone)
    status = world.layout.return_status_of(0)
    at = status.offset(zone=0, source=case.neighbour % 2)
    late = Late(world.windows[case.neighbour][at : at + STATUS_ENTRY.num_bytes].view(np.int32))
    with while_masking(lambda: _mask_all(world, case.gone), late):
        _launch(world, phases[case.neighbour][0])


def _partials_sent(world: HierarchyWorld, received: list[Received]) -> list[Phase]:
    """All ranks but one send what they have summed, with what they say of it; each one's wait for sums."""
    case, waits = _case_of(world), []
    returned, phases = returned_by_all(world, received)
    for rank, (wait, _) in enumerate(phases):
        _launch(world, wait)
        world.nics.use(rank)
        tables = [Guarded((world.layout.num_servers,), np.int32) for _ in range(2)]
        sums = world.server_sums(rank, 0, received[rank])
        of_rank = received[rank], returned[rank], sums, tables[0], 0, tables[1].array
        *sends, last = world.partial_phases(rank, 0, 0, *of_rank)
        waits.append(last)
        for phase in sends if rank != case.gone else []:
            _launch(world, phase)
    return waits


def _check_partials(world: HierarchyWorld, received: list[Received], waits: list[Phase]) -> None:
    """There are no sums of its server, and all of the others'."""
    case = _case_of(world)
    name, wait = waits[case.peer]
    late = Late(_end_of(world, case.peer, world.layout.partial_flags))
    with while_masking(lambda: _mask_all(world, case.gone), late):
        _launch(world, (name, wait))
    is_there = np.arange(world.layout.num_servers) != case.gone // 2
    check("rail_seen", wait["rail_seen"], np.asarray(wait["outer_counts"]) * is_there)
    check("rail_left_out", wait["rail_left_out"], world.left_out_of(case.peer) * is_there)


def _case_of(world: HierarchyWorld) -> MaskedMeanwhileCase:
    assert isinstance(world.case, MaskedMeanwhileCase)
    return world.case


def _launch(world: HierarchyWorld, phase: Phase) -> None:
    name, arguments = phase
    check_reports(world.library.launch(name, world.case.blocks, **arguments))


def _mask_all(world: HierarchyWorld, gone: int) -> None:
    """On every rank."""
    for rank, table in enumerate(world.tables):
        mask(table, gone, paths=Paths(world.config, rank, relays=True))


def _nothing(world: HierarchyWorld) -> Received:
    return Received.of(world.config, world.layout.num_servers, 0, 1)


def _end_of(world: HierarchyWorld, rank: int, ends: object) -> np.ndarray:
    """The number in the end flag of the last server, which is not the masked rank's."""
    assert hasattr(ends, "offset")
    at = ends.offset(zone=0, server=world.layout.num_servers - 1)
    return world.windows[rank][at : at + RAIL_END.num_bytes].view(np.int32)


def _check_counts(world: HierarchyWorld, rank: int, received: Received, gone: int = -1) -> None:
    """Of all that have sent, without a rank and those whose tokens it would have passed on."""
    paths, counts = Paths(world.config, rank, relays=True), received.recv_counts.array
    for expert, source in np.ndindex(counts.shape):
        sent = sent_to(world.case, world.seed, 0, source, rank, expert)
        want = 0 if paths.is_silent(source, frozenset({gone})) else len(sent)
        if counts[expert, source] != want:
            raise WrongResultError(f"count {counts[expert, source]} instead of {want}")
