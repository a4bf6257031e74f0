"""Ranks that are masked: before a call, between dispatch and combine, and while others wait for them."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_triton.core.reach import (
    CHANGES_SHIFT,
    KNOWN_WORD,
    SET_WORD,
    known_word,
    masked_word,
    number_of,
)
from moe_triton.core.records import STATUS_ENTRY
from moe_triton.layout import FLAG_BITS
from moe_triton.runtime.masks import Paths

from .blocks import BlocksWorld
from .blocks_case import BlocksCase
from .case import Case, Routing, WrongResultError, check_reports, draw_routing, results_of, sent_to
from .direct import DirectCase, DirectWorld
from .driver import FLAG_WORD, World
from .inband import receive_inband
from .library import Library, Phase
from .memory import Guarded, changes_behind, word_behind
from .parts import CombineInParts
from .receiving import ReceivingCase, ReceivingWorld
from .takes import take_rows

LATE_S, LATER_S = 0.02, 0.01
STALE_COUNT, STALE_CALL = 2, 77


def mask(
    peers: np.ndarray, *gone: int, paths: Paths | None = None, stood_in_for: Collection[int] = ()
) -> None:
    """Does as the host does: words of the ranks, and behind them the word that says so.

    Args:
        peers: the table.
        gone: the ranks that are masked.
        paths: where other ranks are silent without them.
        stood_in_for: those of them in whose place others pass on what is sent to them.
    """
    lost = frozenset(gone).difference(stood_in_for)
    for peer in range(len(peers)):
        is_silent = paths.is_silent(peer, frozenset(gone), lost) if paths else peer in gone
        peers[peer] = masked_word(int(peers[peer]), peer in gone, peer in lost, is_silent)
    changes = changes_behind(peers)
    changes[0] = (int(changes[0] >> CHANGES_SHIFT) + 1) << CHANGES_SHIFT | len(gone)


def learn(peers: np.ndarray, *gone: int) -> None:
    """Has the call that begins know that these are masked, as the host does."""
    for peer in range(len(peers)):
        peers[peer] = known_word(int(peers[peer]), silent=peer in gone)
    word_behind(peers, SET_WORD)[0] = number_of(gone)
    word_behind(peers, KNOWN_WORD)[0] = changes_behind(peers)[0]


def check_same(window: np.ndarray, before: np.ndarray) -> None:
    """Raises if anything has gone to a masked rank."""
    if (window != before).any():
        raise WrongResultError("something was sent to a masked rank")


@dataclass(frozen=True)
class MaskedCase(Case):
    """One rank is masked.

    Attributes:
        gone: which one.
        when: before the first call, where it brings no tokens; between a dispatch and its combine; or while
            rank 0 waits for its entries, for its rows, or for its results.
    """

    tokens: tuple[int, ...] = (4, 0, 3)
    gone: int = 1
    when: Literal["before", "between", "entries", "rows", "results"] = "before"


@dataclass(frozen=True)
class MaskedReceivingCase(ReceivingCase):
    """A rank is masked while rank 0 waits for its rows, and takes those of others out of their slots.

    Attributes:
        gone: which one.
    """

    tokens: tuple[int, ...] = (4, 3, 3)
    gone: int = 1


@dataclass(frozen=True)
class MaskedDirectCase(DirectCase):
    """A rank is masked before the first call. Counts of an earlier one lie where its counts would."""

    tokens: tuple[int, ...] = (4, 0, 3)
    lost: int = 1


@dataclass(frozen=True)
class MaskedBlocksCase(BlocksCase):
    """A rank is masked before the first call."""

    tokens: tuple[int, ...] = (4, 0, 3)
    lost: int = 1


class MaskedWorld(World):
    """All ranks but the one that has been masked before. It has left something in every entry."""

    def __init__(self, library: Library, case: MaskedCase, seed: int = 0) -> None:
        super().__init__(library, case, seed)
        self._gone = case.gone
        mask(self.peers, self._gone)
        self._before = self.windows[self._gone].bytes.copy()

    def _rounds(self, rank: int) -> None:
        if rank != self._gone:
            super()._rounds(rank)

    def wait_for_status(
        self, rank: int, zone: int, waited: Guarded | None = None, **more: object
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same, with entries of the masked rank that may have their flag, and have a count."""
        if "status" not in more:
            self._leave_entries(rank, zone)
        return super().wait_for_status(rank, zone, waited, **more)  # type: ignore[arg-type]

    def _leave_entries(self, rank: int, zone: int) -> None:
        status = self.layout.dispatch_status_on(rank)
        for expert in range(self.config.experts_on(rank)):
            at = status.offset(zone=zone, expert=expert, source=self._gone)
            entry = self.windows[rank].bytes[at : at + STATUS_ENTRY.num_bytes].view(np.int32)
            has_flag = (self.seed + rank + expert) % 2
            entry[STATUS_ENTRY.word("flag")] = FLAG_BITS * has_flag
            entry[STATUS_ENTRY.word("count")] = STALE_COUNT
            entry[STATUS_ENTRY.word("call")] = STALE_CALL

    def awaited(self, rank: int, dispatch_number: int) -> Routing:
        """Without the masked rank's results: the host has marked their ids."""
        return marked(self, super().awaited(rank, dispatch_number), self._gone)

    def run(self) -> None:
        """The same. Nothing has gone to the masked rank."""
        super().run()
        check_same(self.windows[self._gone].bytes, self._before)


class MaskedDirectWorld(DirectWorld):
    """All ranks but the one that has been masked before."""

    def __init__(self, library: Library, case: MaskedDirectCase, seed: int = 0) -> None:
        super().__init__(library, case, seed)
        for table in self.tables_of_peers:
            mask(table, case.lost)
            learn(table, case.lost)
        self._before = self.windows[case.lost].copy()

    def run(self) -> None:
        """The same. Nothing has gone to the masked rank."""
        super().run()
        check_same(self.windows[self.case.lost], self._before)

    def _rounds(self, rank: int) -> None:
        if rank != self.case.lost:
            super()._rounds(rank)

    def _counts_of_lost(self, rank: int, zone: int) -> np.ndarray:
        first = self.layout.counts.offset(zone=zone, source=self.case.lost)
        words: np.ndarray = self.windows[rank][first : first + self.layout.counts.stride("source")]
        return words.view(np.int32)[: self.layout.num_entries]

    def counts_phase(self, rank: int, routing: Routing, zone: int, **call: object) -> Phase:
        """The same, with counts of an earlier call in the window."""
        self._counts_of_lost(rank, zone)[:] = STALE_COUNT
        return super().counts_phase(rank, routing, zone, **call)

    def check_counts(self, rank: int, number: int, zone: int) -> None:
        """The same of the others' counts."""
        self._counts_of_lost(rank, zone)[:] = 0
        super().check_counts(rank, number, zone)


class MaskedBlocksWorld(BlocksWorld):
    """All ranks but the one that has been masked before."""

    def __init__(self, library: Library, case: MaskedBlocksCase, seed: int = 0) -> None:
        super().__init__(library, case, seed)
        for table in self.tables:
            mask(table, case.lost)
        self._before = self.windows[case.lost].copy()

    def _rounds(self, rank: int) -> None:
        if rank != self.case.lost:
            super()._rounds(rank)

    def run(self) -> None:
        """The same. Nothing has gone to the masked rank."""
        super().run()
        check_same(self.windows[self.case.lost], self._before)


def marked(world: World, routing: Routing, gone: int) -> Routing:
    """With ids as the host marks them."""
    c = world.config
    marks = copy.copy(routing)
    owner = c.num_shared_ranks + routing.ids // c.num_local_experts
    is_lost = (routing.ids >= 0) & (routing.ids < c.num_experts) & (owner == gone)
    marks.ids = np.where(is_lost, -2 - routing.ids, routing.ids).astype(np.int32)
    return marks


class Late:
    """A flag of a rank that is not masked. It is taken away, and raised again once another rank is masked."""

    def __init__(self, flag: np.ndarray) -> None:
        self._flag, self._raised, self._is_up = flag, flag.copy(), False
        flag[:] = 0

    def put_up(self) -> None:
        self._is_up = True
        self._flag[:] = self._raised

    def check(self) -> None:
        """Right behind the wait for it."""
        if not self._is_up:
            raise WrongResultError("a wait has ended without a rank that is not masked")


@contextmanager
def while_masking(masks: Callable[[], None], late: Late | None = None) -> Iterator[None]:
    """Masks ranks a while from now, and raises a flag of another rank's a while after that."""

    def run() -> None:
        time.sleep(LATE_S)
        masks()
        if late is not None:
            time.sleep(LATER_S)
            late.put_up()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
        if late is not None:
            late.check()
    finally:
        thread.join()


@contextmanager
def masked_later(world: World, *gone: int, late: Late | None = None) -> Iterator[None]:
    """The same, where all ranks have one table."""
    with while_masking(lambda: mask(world.peers, *gone), late):
        yield


def check_masked(library: Library, case: MaskedCase, seed: int = 0) -> None:
    """Raises unless those who go on get all that they get from each other, and nothing else."""
    library.seed(seed)
    if case.when == "before":
        MaskedWorld(library, case, seed).run()
        return
    world = World(library, case, seed)
    if case.when == "entries":
        _check_entries(world, case.gone)
    elif case.when == "rows":
        _check_rows(world, case.gone)
    else:
        _check_results(world, case.gone, is_before=case.when == "between")


def check_masked_receiving(library: Library, case: MaskedReceivingCase, seed: int = 0) -> None:
    """Raises unless rank 0's launch ends without the rows that are missing, and with all of the others'."""
    library.seed(seed)
    world = ReceivingWorld(library, case, seed)
    for rank in range(1, case.config.num_ranks):
        first = {"num_tokens": 1} if rank == case.gone else {}
        check_reports(world.send_rows(rank, draw_routing(case, seed, 0, rank), zone=0, **first))
    with masked_later(world, case.gone, late=_last_row(world)):
        _, rows, reports = world.receive(0, 0, 0)
    for report in reports:
        check_reports(report)
    origins, want = rows["out_origins"].array, world.expected_rows(0, 0)["origins"]
    others = want[:, 0] != case.gone
    # On a busy machine it is masked before its entry was looked at, and then has no rows that leave gaps.
    is_whole = np.array_equal(origins[others], want[others])
    if not (is_whole or np.array_equal(origins[: others.sum()], want[others])):
        raise WrongResultError(f"origins {origins.tolist()} instead of {want.tolist()}")


def _check_entries(world: World, gone: int) -> None:
    """Its masking is not the first one: there is one with the largest number that sends nothing either."""
    other = world.config.num_ranks - 1
    mask(world.peers, other)
    for rank in range(world.config.num_ranks):
        if rank not in (gone, other):
            check_reports(world.send_rows(rank, draw_routing(world.case, world.seed, 0, rank), zone=0))
    with masked_later(world, gone, other):
        counts, report = world.wait_for_status(0, zone=0)
    check_reports(report)
    world.check_counts(0, 0, counts)


def _check_rows(world: World, gone: int) -> None:
    """It has told how many rows come, and sent those of its first token only."""
    case = world.case
    for rank in range(world.config.num_ranks):
        first = {"num_tokens": 1} if rank == gone else {}
        check_reports(world.send_rows(rank, draw_routing(case, world.seed, 0, rank), zone=0, **first))
    counts, report = world.wait_for_status(0, zone=0)
    check_reports(report)
    if case.inband:
        offsets = world.expected_rows(0, 0)["offsets"]
        with masked_later(world, gone):
            _, report = receive_inband(world, 0, 0, offsets)
        check_reports(report)
        return
    with masked_later(world, gone, late=_last_row(world)):
        if case.takes > 1:
            shape = (world.config.num_ranks, world.config.experts_on(0))
            tables = [Guarded(shape, np.int32) for _ in range(2)]
            tables[0].array[:] = 0
            report = take_rows(world, 0, 0, counts, tables, 0)
        else:
            report = world.wait_for_rows(0, 0, counts)
    check_reports(report)


def _last_row(world: World) -> Late | None:
    """Of the last row of the last rank; None if it sends none."""
    source = world.config.num_ranks - 1
    for expert in reversed(range(world.config.experts_on(0))):
        if rows := len(sent_to(world.case, world.seed, 0, source, 0, expert)):
            row = {"source": source, "expert": expert, "index": rows - 1}
            if isinstance(world, ReceivingWorld):
                return Late(world.flags(0, zone=0, **row))
            return Late(world.stamp(0, zone=0, **row)[FLAG_WORD:])
    return None


def _last_result(world: World, awaited: Routing) -> Late | None:
    """Of rank 0's results that another rank sends, and not one that is masked; None where none does."""
    c, status = world.config, world.layout.combine_status
    for token, k in np.argwhere((awaited.ids >= 0) & (awaited.ids < c.num_experts))[::-1].tolist():
        if c.rank_of_expert(int(awaited.ids[token, k])) != 0:
            at = status.offset(zone=0, token=token, k=k)
            return Late(world.windows[0].bytes[at : at + STATUS_ENTRY.num_bytes])
    return None


def _check_results(world: World, gone: int, is_before: bool) -> None:
    case, ranks = world.case, range(world.config.num_ranks)
    received = [world.expected_rows(rank, 0) for rank in ranks]
    if is_before:
        mask(world.peers, gone)
    before = world.windows[gone].bytes.copy()
    for rank in ranks:
        if rank not in (0, gone):
            rows = results_of(case, received[rank]["origins"], 0)
            check_reports(world.send_results(rank, rows, received[rank], zone=0))
    rows = results_of(case, received[0]["origins"], 0)
    routing = draw_routing(case, world.seed, 0, 0)
    if is_before:
        check_reports(world.send_results(0, rows, received[0], zone=0))
        check_reports(world.wait_for_results(0, marked(world, routing, gone), zone=0))
        check_same(world.windows[gone].bytes, before)
    elif case.part_tokens:
        parts, late = CombineInParts(world, 0, 0, 0), _last_result(world, marked(world, routing, gone))
        with masked_later(world, gone, late=late):
            for part in range(parts.num_parts):
                check_reports(parts.launch(part, rows, received[0], routing))
        world.check_results(0, 0, 0, marked(world, routing, gone))
    else:
        check_reports(world.send_results(0, rows, received[0], zone=0))
        with masked_later(world, gone, late=_last_result(world, marked(world, routing, gone))):
            check_reports(world.wait_for_results(0, routing, zone=0))
        world.check_results(0, 0, 0, marked(world, routing, gone))
