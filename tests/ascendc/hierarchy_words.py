"""Words that a relay or a peer leaves in a receiver's window and that cannot be, and whom reports name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_triton.core.ascendc import REPORT_BAD_ROW, REPORT_MISMATCH, REPORT_TIMEOUT
from moe_triton.core.records import LOST_COUNT, RAIL_END, STATUS_ENTRY
from moe_triton.layout import UB_ALIGN

from .case import WrongResultError
from .hierarchy import HierarchyWorld
from .hierarchy_case import HierarchyCase, Received
from .hierarchy_hostile import (
    SHORT_US,
    all_sent,
    codes_of,
    dispatched,
    relay_on,
    returned_by_all,
    wait_on,
)
from .library import Library
from .memory import Guarded

Place = Literal["entry", "return", "partial end"]
_COUNT, _CALL, _LOST, _LOST_CALL = (RAIL_END.word(name) for name in ("count", "call", "lost", "lost_call"))
BEYOND = (-1, -5, 1000, 2**31 - 1, -(2**31))
# Of the end flag of rank 2, on another server, at rank 0: word, value, code, and what rank 0 has seen then.
PARTIAL_ENDS = (
    *((_COUNT, value, REPORT_BAD_ROW, 0) for value in BEYOND),
    (_CALL, 77, REPORT_MISMATCH, 0),
    # Its relay waits for ranks of its own server: 2 and 3.
    *((_LOST, value, REPORT_BAD_ROW, 0) for value in (*BEYOND, 1, 2, 5)),
    *((_LOST, value, REPORT_TIMEOUT, -1 - value) for value in (3, 4)),
)
# Of the same one: who is lost, its call word, code and first number. 0 stands for rank 0's own word.
PARTIAL_CALLS = (
    (3, 77, REPORT_MISMATCH, 2),
    (4, 77, REPORT_MISMATCH, 3),
    (4, 0, REPORT_BAD_ROW, 2),
    *((value, 77, REPORT_BAD_ROW, 2) for value in (-1, 1, 2, 5)),
)


@dataclass(frozen=True)
class HostileWordsCase(HierarchyCase):
    """Rank 0 finds what cannot be.

    Attributes:
        place: in an entry of rank 3's rows, which rank 1 relays; in rank 1's flag behind its results; or in
            the end flag of rank 2's partial rows.
    """

    tokens: tuple[int, ...] = (2, 2, 3, 2)
    blocks: int = 2
    topk: int = 4
    place: Place = "entry"
    timeout_us: int = SHORT_US


def check_hostile_words(library: Library, case: HostileWordsCase, seed: int) -> None:
    """One word after the other, each in a window that is as it should be otherwise."""
    checks: dict[Place, Callable[[Library, HostileWordsCase, int], HierarchyWorld]] = {
        "entry": _check_entries,
        "return": _check_returns,
        "partial end": _check_partial_ends,
    }
    world = checks[case.place](library, case, seed)
    for memory in world.memory:
        memory.check_guards()


def _write(world: HierarchyWorld, state: np.ndarray, at: int, value: int) -> None:
    """Rank 0's flags and entries as they were, but for one word."""
    window = world.windows[0]
    window[: len(state)] = state
    window[at : at + 4].view(np.int32)[0] = value


def _check_entries(library: Library, case: HostileWordsCase, seed: int) -> HierarchyWorld:
    world = HierarchyWorld(library, case, seed)
    received = all_sent(world)
    for rank, each in enumerate(received):
        relay_on(world, rank, each)
    c, layout = world.config, world.layout
    state = world.windows[0][: layout.state_bytes].copy()
    expert, source = 1, 3
    entry = layout.token_counts.offset(zone=0, expert=expert, source=source)
    most = c.num_max_tokens_per_rank
    for value in (*BEYOND, most + 1, LOST_COUNT, most, 0):
        _write(world, state, entry + 4 * STATUS_ENTRY.word("count"), value)
        report = wait_on(world, 0, received[0])
        code = {LOST_COUNT: REPORT_TIMEOUT, most: None, 0: None}.get(value, REPORT_BAD_ROW)
        if codes_of(report) != ({(code, expert * c.num_ranks + source)} if code else set()):
            raise WrongResultError(f"an entry of {value} rows: {report[:, :3].tolist()}")
        _check_bounds(world, received[0])
    return world


def _check_bounds(world: HierarchyWorld, received: Received) -> None:
    """Whatever counts say, rows are those of the window, and fit."""
    received.check_guards()
    ends, slots, rows = received.recv_offsets.array, received.row_slots.array, world.layout.forward_slots
    taken = slots[: ends[-1]] * UB_ALIGN
    is_inside = (taken >= rows.base) & (taken < rows.end)
    if (np.diff(ends, prepend=0) < 0).any() or ends[-1] > len(slots) or not is_inside.all():
        raise WrongResultError(f"rows {taken.tolist()} up to {ends.tolist()}")


def _check_returns(library: Library, case: HostileWordsCase, seed: int) -> HierarchyWorld:
    world, received = dispatched(library, case, seed)
    try:
        _, phases = returned_by_all(world, received)
    finally:
        world.nics.close()
    layout = world.layout
    state = world.windows[0][: layout.state_bytes].copy()
    flag = layout.return_status.offset(zone=0, expert=0, source=1)
    for value in (*BEYOND, 0):
        _write(world, state, flag + 4 * STATUS_ENTRY.word("count"), value)
        name, arguments = phases[0][0]
        report = library.launch(name, case.blocks, **arguments)
        if codes_of(report) != ({(REPORT_BAD_ROW, 1)} if value else set()):
            raise WrongResultError(f"a flag of {value} rows: {report[:, :3].tolist()}")
    return world


def _check_partial_ends(library: Library, case: HostileWordsCase, seed: int) -> HierarchyWorld:
    world, received = dispatched(library, case, seed)
    seen = Guarded((world.layout.num_servers,), np.int32)
    try:
        returned, phases = returned_by_all(world, received)
        for rank, (wait, _) in enumerate(phases):
            library.launch(wait[0], case.blocks, **wait[1])
            world.nics.use(rank)
            sums = world.server_sums(rank, 0, received[rank])
            for name, arguments in world.partial_phases(
                rank, 0, 0, received[rank], returned[rank], sums, seen
            )[:-1]:
                library.launch(name, case.blocks, **arguments)
    finally:
        world.nics.close()
    state = world.windows[0][: world.layout.state_bytes].copy()
    end = world.layout.partial_flags.offset(zone=0, server=1)
    sums = np.zeros(0, np.uint8)
    name, arguments = world.partial_phases(0, 0, 0, received[0], returned[0], sums, seen)[-1]
    for word, value, code, has_seen in PARTIAL_ENDS:
        _write(world, state, end + 4 * word, value)
        report = library.launch(name, case.blocks, **arguments)
        if codes_of(report) != {(code, 2)} or seen.array.tolist() != [2, has_seen]:
            raise WrongResultError(
                f"word {word} is {value}: {report[:, :3].tolist()}, seen {seen.array.tolist()}"
            )
    for lost, word, code, first in PARTIAL_CALLS:
        _write(world, state, end + 4 * _LOST, lost)
        call = word or int(arguments["call"])  # type: ignore[call-overload]
        world.windows[0][end + 4 * _LOST_CALL :][:4].view(np.int32)[0] = call
        report = library.launch(name, case.blocks, **arguments)
        if codes_of(report) != {(code, first)} or seen.array.tolist() != [2, 0]:
            raise WrongResultError(f"{lost} with the word {call}: {report[:, :3].tolist()}")
    return world
