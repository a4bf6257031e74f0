"""Words on a rail that name no place, and ranks that are gone: what is reported, and by whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moe_triton.core.ascendc import REPORT_BAD_ROW, REPORT_MISMATCH, REPORT_TIMEOUT
from moe_triton.core.records import LOST_COUNT, RAIL_END, RAIL_HEAD

from .case import WrongResultError
from .hierarchy import HierarchyWorld
from .hierarchy_case import HierarchyCase, Received
from .library import Library, Phase
from .memory import Guarded, across_lines

SHORT_US = 100_000


class Change(NamedTuple):
    """A word that a peer has written.

    Attributes:
        place: "end", "head" or "choice".
        word: which of its words.
        value: what it is now.
        code: what the relay reports.
        is_for_all: whether each block of the relay refuses it; otherwise the one does that relays to rank 0,
            and what goes to rank 1 may be right.
        is_early: the end flag is not there yet.
    """

    place: str
    word: int
    value: int
    code: int
    is_for_all: bool = True
    is_early: bool = False


_COUNT, _CALL = RAIL_END.word("count"), RAIL_END.word("call")
_TOKEN, _TOKENS = RAIL_HEAD.word("token"), RAIL_HEAD.word("tokens")
CHANGES = {
    "a count below 0": Change("end", _COUNT, -1, REPORT_BAD_ROW),
    "a count beyond the slots": Change("end", _COUNT, 1000, REPORT_BAD_ROW),
    "the largest count": Change("end", _COUNT, 2**31 - 1, REPORT_BAD_ROW),
    "the end of another call": Change("end", _CALL, 77, REPORT_MISMATCH),
    "a token below 0": Change("head", _TOKEN, -1, REPORT_BAD_ROW),
    "a token beyond the largest": Change("head", _TOKEN, 1 << 20, REPORT_BAD_ROW),
    "a token of another call": Change("head", RAIL_HEAD.word("call"), 77, REPORT_MISMATCH),
    "a token of another round": Change("head", RAIL_HEAD.word("number"), 9, REPORT_BAD_ROW),
    "messages of no tokens": Change("head", _TOKENS, 0, REPORT_BAD_ROW),
    "messages of no tokens, seen early": Change("head", _TOKENS, 0, REPORT_BAD_ROW, is_early=True),
    "messages of less than none, seen early": Change(
        "head", _TOKENS, -(2**31), REPORT_BAD_ROW, is_early=True
    ),
    "an expert that there is none of": Change("choice", 0, 0x7FFF, REPORT_BAD_ROW),
    "a position below 0": Change("choice", 0, -2, REPORT_BAD_ROW),
    "a position beyond the slots": Change("choice", 0, 1000 << 16, REPORT_BAD_ROW),
    "a position of another token": Change("choice", 0, 1 << 16, REPORT_BAD_ROW, is_for_all=False),
    "the largest position": Change("choice", 0, 0x7FFF << 16, REPORT_BAD_ROW),
}


@dataclass(frozen=True)
class HostileRailCase(HierarchyCase):
    """Rank 2, of another server, has sent rank 0 what is changed there before rank 0 relays it.

    Attributes:
        change: by its name in `CHANGES`.
    """

    tokens: tuple[int, ...] = (2, 2, 3, 2)
    blocks: int = 2
    topk: int = 4
    experts_per_rank: int = 1
    change: str = "a count below 0"
    timeout_us: int = SHORT_US


@dataclass(frozen=True)
class GoneCase(HierarchyCase):
    """A rank does nothing in a dispatch, or in a combine.

    Attributes:
        gone: which.
        in_combine: it has dispatched.
        is_said_late: who waits elsewhere hears of it from what would have sent partial rows.
    """

    tokens: tuple[int, ...] = (2, 3, 1, 2, 3, 2)
    servers: tuple[int, ...] = (2, 2, 2)
    topk: int = 4
    gone: int = 3
    in_combine: bool = False
    is_said_late: bool = False
    timeout_us: int = SHORT_US


@dataclass(frozen=True)
class OddCase(HierarchyCase):
    """A rank makes another combine than all others.

    Attributes:
        odd: which.
        is_said_late: as in `GoneCase`.
    """

    tokens: tuple[int, ...] = (2, 3, 1, 2, 3, 2)
    servers: tuple[int, ...] = (2, 2, 2)
    blocks: int = 3
    topk: int = 4
    odd: int = 3
    is_said_late: bool = False


def _sent(world: HierarchyWorld, rank: int, parts: int) -> Received:
    """A rank's dispatch up to its posts of some parts."""
    received = Received.of(world.config, world.layout.num_servers, 0, world.config.receive_capacity(rank))
    world.nics.use(rank)
    for part in range(parts):
        for name, arguments in world.dispatch_phases(rank, 0, 0, received, part)[:2]:
            report = world.library.launch(name, world.case.blocks, **arguments)
            if report.any():
                raise WrongResultError(f"rank {rank} reports {report[:, :3].tolist()} while it sends")
    return received


def all_sent(
    world: HierarchyWorld,
    gone: tuple[int, ...] = (),
    sends_last: Callable[[int], bool] = lambda rank: True,
) -> list[Received]:
    """Every rank but some has sent, and everything has been delivered; of some without the last part."""
    parts = world.case.parts
    try:
        return [
            _sent(world, rank, parts if sends_last(rank) else parts - 1)
            if rank not in gone
            else Received.of(world.config, world.layout.num_servers, 0, 1)
            for rank in range(world.config.num_ranks)
        ]
    finally:
        world.nics.close()


def relay_on(world: HierarchyWorld, rank: int, received: Received) -> np.ndarray:
    """The report of a rank's relay."""
    name, arguments = world.dispatch_phases(rank, 0, 0, received)[2]
    return world.library.launch(name, world.case.blocks, **arguments)


def wait_on(world: HierarchyWorld, rank: int, received: Received) -> np.ndarray:
    """The report of a rank's wait. Its offsets follow."""
    (name, arguments), offsets = world.dispatch_phases(rank, 0, 0, received)[3:]
    report = world.library.launch(name, world.case.blocks, **arguments)
    world.library.launch(offsets[0], world.case.blocks, **offsets[1])
    return report


def codes_of(report: np.ndarray) -> set[tuple[int, ...]]:
    """What blocks report: codes and first numbers."""
    return {tuple(words[:2]) for words in report.tolist() if any(words)}


def dispatched(library: Library, case: HierarchyCase, seed: int) -> tuple[HierarchyWorld, list[Received]]:
    """All ranks have what a dispatch brings them, and may post again."""
    world = HierarchyWorld(library, case, seed)
    received = all_sent(world)
    for rank, each in enumerate(received):
        relay_on(world, rank, each)
    for rank, each in enumerate(received):
        wait_on(world, rank, each)
        world.check_received(rank, 0, each)
    return reopened(world), received


def returned_by_all(
    world: HierarchyWorld, received: list[Received], gone: int | None = None
) -> tuple[list[Guarded], list[list[Phase]]]:
    """All ranks but one have returned their results; what their waits leave, and each one's wait and rest."""
    returned = [Guarded((1, world.layout.ranks_per_server), np.int32) for _ in received]
    phases = [world.return_phases(rank, 0, 0, each, returned[rank]) for rank, each in enumerate(received)]
    for rank, (sends, flag, *_) in enumerate(phases):
        if rank != gone:
            world.nics.use(rank)
            for name, arguments in (sends, flag):
                world.library.launch(name, world.case.blocks, **arguments)
    return returned, [rest for _, _, *rest in phases]


def check_hostile_rail(library: Library, case: HostileRailCase, seed: int) -> None:
    """The relay reports its peer; what the peer sent counts as lost, for its neighbour as well."""
    world = HierarchyWorld(library, case, seed)
    received = all_sent(world)
    change, slot = CHANGES[case.change], case.rail_slot
    # Where phases follow one another, nobody looks at tokens before the end flag is there.
    code = REPORT_TIMEOUT if change.is_early and not case.message_tokens else change.code
    ends, slots = world.layout.rail_flags, world.layout.rail_slots
    first = {
        "end": ends.offset(zone=0, server=1),
        "head": slots.offset(zone=0, server=1),
        "choice": slots.offset(zone=0, server=1) + slot.words_offset,
    }[change.place]
    world.windows[0][first : first + 32].view(np.int32)[change.word] = change.value
    if change.is_early:
        first = ends.offset(zone=0, server=1)
        world.windows[0][first : first + 32].view(np.int32)[RAIL_END.word("number")] = 0
    relay, *others = [relay_on(world, rank, received[rank]) for rank in range(4)]
    if any(report.any() for report in others):
        raise WrongResultError(f"{case.change}: others report, too")
    if not codes_of(relay) or codes_of(relay) != {(code, 2)}:
        raise WrongResultError(f"{case.change}: the relay reports {relay[:, :3].tolist()}")
    if received[0].rail_counts.array.tolist() != [2, -1]:
        raise WrongResultError(f"{case.change}: counts {received[0].rail_counts.array.tolist()}")
    expected = REPORT_MISMATCH if change.code == REPORT_MISMATCH else REPORT_TIMEOUT
    for rank in (0, 1):
        wait = wait_on(world, rank, received[rank])
        counts = received[rank].recv_counts.array
        if rank == 1 and not change.is_for_all and not wait.any():
            world.check_received(rank, 0, received[rank])
            continue
        if {int(code) for code in wait[:, 0] if code} != {expected}:
            raise WrongResultError(f"{case.change}: the wait reports {wait[:, :3].tolist()}")
        if (counts[:, 2] != LOST_COUNT).all() or (counts[:, [0, 1, 3]] < 0).any():
            raise WrongResultError(f"{case.change}: rank {rank} got {counts.tolist()}")
    for memory in world.memory:
        memory.check_guards()


def check_gone(library: Library, case: GoneCase, seed: int) -> None:
    """Every rank that is left says who is gone."""
    (_check_gone_in_combine if case.in_combine else _check_gone_in_dispatch)(library, case, seed)


def _check_gone_in_dispatch(library: Library, case: GoneCase, seed: int) -> None:
    """A rank has sent nothing. Others hear of it from who would have relayed its rows."""
    world, gone = HierarchyWorld(library, case, seed), case.gone
    received = all_sent(world, (gone,))
    ranks = case.servers[0]
    left = [rank for rank in range(world.config.num_ranks) if rank != gone]
    relays = {rank: relay_on(world, rank, received[rank]) for rank in left}
    for rank, relay in relays.items():
        wait = wait_on(world, rank, received[rank])
        counts = received[rank].recv_counts.array
        is_rail, is_neighbour = rank % ranks == gone % ranks, rank // ranks == gone // ranks
        if codes_of(relay) != ({(REPORT_TIMEOUT, gone)} if is_rail else set()):
            raise WrongResultError(f"rank {rank} relays and reports {relay[:, :3].tolist()}")
        # A neighbour gets nothing that rank should have relayed, from any server.
        lost = range(gone % ranks, world.config.num_ranks, ranks) if is_neighbour else [gone]
        mark = -1 if is_neighbour else LOST_COUNT
        if {int(code) for code in wait[:, 0] if code} != {REPORT_TIMEOUT}:
            raise WrongResultError(f"rank {rank} waits and reports {wait[:, :3].tolist()}")
        for source in range(world.config.num_ranks):
            is_lost = source in lost
            if (counts[:, source] != mark).any() if is_lost else (counts[:, source] < 0).any():
                raise WrongResultError(f"rank {rank}: without rank {gone} counts {counts.tolist()}")


def _check_gone_in_combine(library: Library, case: GoneCase, seed: int) -> None:
    """Neighbours of a rank that returns nothing say so to their rails; its own rail gets nothing."""
    (world, received), gone = dispatched(library, case, seed), case.gone
    ranks, servers = case.servers[0], world.layout.num_servers
    every = range(world.config.num_ranks)
    try:
        returned, phases = returned_by_all(world, received, gone)
        for rank in every:
            if rank == gone:
                continue
            world.nics.use(rank)
            waits, lost = phases[rank]
            report = library.launch(waits[0], case.blocks, **waits[1])
            if not case.is_said_late:
                library.launch(lost[0], case.blocks, **lost[1])
            is_neighbour = rank // ranks == gone // ranks
            if bool(report.any()) != is_neighbour:
                raise WrongResultError(f"rank {rank} waits and reports {report[:, :3].tolist()}")
            if is_neighbour and not case.is_said_late:
                continue  # its plan ends with the launch that reports
            sums = world.server_sums(rank, 0, received[rank])
            seen = Guarded((servers,), np.int32)
            *sends, _ = world.partial_phases(rank, 0, 0, received[rank], returned[rank], sums, seen)
            if any(library.launch(name, case.blocks, **arguments).any() for name, arguments in sends):
                raise WrongResultError(f"rank {rank} cannot send its partial rows")
    finally:
        world.nics.close()
    for rank in every:
        if rank == gone or rank // ranks == gone // ranks:
            continue
        seen = Guarded((servers,), np.int32)
        sums = np.zeros(0, np.uint8)
        wait = world.partial_phases(rank, 0, 0, received[rank], returned[rank], sums, seen)[-1]
        report = library.launch(wait[0], case.blocks, **wait[1])
        if {int(code) for code in report[:, 0] if code} != {REPORT_TIMEOUT}:
            raise WrongResultError(f"rank {rank} waits and reports {report[:, :3].tolist()}")
        mark = -1 if rank % ranks == gone % ranks else -2 - gone
        if seen.array[gone // ranks] != mark or (np.delete(seen.array, gone // ranks) < 0).any():
            raise WrongResultError(f"rank {rank} has seen {seen.array.tolist()} without rank {gone}")


def reopened(world: HierarchyWorld) -> HierarchyWorld:
    """With NICs again, which have been closed to have everything delivered."""
    world.nics = world.make_nics()
    world.tables = [across_lines(table.tolist()) for table in world.tables]
    for table, words in zip(world.tables, world.nics.words, strict=True):
        table[:] = words
    return world


def check_odd(library: Library, case: OddCase, seed: int) -> None:
    """Its neighbours meet its other word, and say to their rails whose it is."""
    (world, received), odd, another = dispatched(library, case, seed), case.odd, 77
    ranks, every = case.servers[0], range(world.config.num_ranks)
    returned = [Guarded((1, ranks), np.int32) for _ in every]
    seen = [Guarded((world.layout.num_servers,), np.int32) for _ in every]
    phases = [world.return_phases(rank, 0, 0, received[rank], returned[rank]) for rank in every]
    phases[odd][1][1]["call"] = another
    rails = []
    try:
        for rank in every:
            for name, arguments in phases[rank][:2]:
                library.launch(name, case.blocks, **arguments)
        for rank in every:
            world.nics.use(rank)
            wait, lost = phases[rank][2:]
            expected = {(REPORT_MISMATCH, odd % ranks)} if rank // ranks == odd // ranks else set()
            if codes_of(library.launch(wait[0], case.blocks, **wait[1])) != expected:
                raise WrongResultError(f"rank {rank} does not report the call of rank {odd}")
            if not case.is_said_late:
                library.launch(lost[0], case.blocks, **lost[1])
            sums = world.server_sums(rank, 0, received[rank])
            *sends, last = world.partial_phases(rank, 0, 0, received[rank], returned[rank], sums, seen[rank])
            rails.append(last)
            if expected and not case.is_said_late:
                continue  # its plan ends with the launch that reports
            for name, arguments in sends:
                library.launch(name, case.blocks, **arguments)
    finally:
        world.nics.close()
    for rank in every:
        if rank // ranks != odd // ranks:
            report = library.launch(rails[rank][0], case.blocks, **rails[rank][1])
            if codes_of(report) != {(REPORT_MISMATCH, odd)}:
                raise WrongResultError(f"rank {rank} of another server reports {report[:, :3].tolist()}")
