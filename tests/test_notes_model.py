"""Who is named when a rank dies or pauses: a model of three ranks, all of whose moments are tried.

Each rank makes calls: it works, posts a flag to every other rank, and waits for theirs. What a rank says of
its waits, and how it finds out whom to name, are the library's own (`Notes`, `Deadline`), on a clock and a
store of the model's. A store's writes are seen some time later, as on a busy machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from moe_triton.core.threads import Deadline
from moe_triton.rendezvous.notes import Culprits, Notes, noted_after_s

RANKS = 3
TICK_S = 0.05
TIMEOUT_S = 2.0
LAST_TICK = 300
LONG_PAUSE = 110  # everybody has raised before it ends
CALLS = 5
ALL = (0, 1, 2)
# Whom each rank waits for, by shape. A relay waits before it posts.
AWAITED = {"all": (ALL, ALL, ALL), "ring": ((1,), (2,), (0,)), "relay": ((1,), (2,), ())}


class Fault(NamedTuple):
    """What happens.

    Attributes:
        rank: to whom; -1 for nobody.
        call: in which call, when it has sent its flags to `sent` only.
        sent: these ranks.
        pause: ticks; 0 for a death.
        tick: at which all ranks pause together.
        all_pause: ticks of that; 0 for none.
        meets: whether this rank has made another call instead, whose flags nobody posts.
    """

    rank: int = -1
    call: int = 0
    sent: tuple[int, ...] = ()
    pause: int = 0
    tick: int = 0
    all_pause: int = 0
    meets: bool = False


class LateStore:
    """A store whose writes are seen later."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._written: dict[str, list[tuple[int, str]]] = {}

    def set(self, key: str, value: str) -> None:
        self._written.setdefault(key, []).append((self._world.tick + self._world.late, value))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert expected == desired
        seen = [value for tick, value in self._written.get(key, ()) if tick <= self._world.tick]
        return (seen[-1] if seen else expected).encode()


@dataclass
class World:
    """Three ranks, their flags and their store."""

    fault: Fault
    starts: tuple[int, ...]
    works: tuple[int, ...]
    late: int
    shape: str
    tick: int = 0
    flags: set[tuple[int, int, int]] = field(default_factory=set)  # call, from, to
    errors: dict[int, Culprits] = field(default_factory=dict)
    paused_until: dict[int, int] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)

    def clock(self) -> float:
        return self.tick * TICK_S

    def run(self) -> dict[int, Culprits]:
        """Runs until nothing moves any more; returns whom each rank has named that has run out of time."""
        store = LateStore(self)
        lives = {rank: self._life(rank, store) for rank in ALL}
        while lives and self.tick < LAST_TICK:
            for rank in list(lives):
                if rank in self.dead or (
                    self.tick >= self.paused_until.get(rank, 0) and next(lives[rank], None) is None
                ):
                    del lives[rank]
            self.tick += 1
            if self.fault.all_pause and self.tick == self.fault.tick:
                self.paused_until = dict.fromkeys(ALL, self.tick + self.fault.all_pause)
        return self.errors

    def _life(self, rank: int, store: LateStore) -> Iterator[int]:
        notes = Notes(lambda: store, rank, RANKS, clock=self.clock)  # type: ignore[arg-type, return-value]
        note: Generator[float, None, None] | None = None  # its thread goes on beside what the rank does

        def beside() -> None:
            nonlocal note
            if note is not None and next(note, None) is None:
                note = None

        yield from range(1, 1 + self.starts[rank])
        for call in range(CALLS):
            for _ in range(self.works[rank]):
                beside()
                yield 1
            is_relay = (self.shape, rank) == ("relay", 1)
            is_struck = (rank, call) == self.fault[:2]
            to = self.fault.sent if is_struck else () if is_relay else ALL
            self.flags |= {(call, rank, other) for other in to}
            meets = is_struck and self.fault.meets
            if is_struck and not self.fault.pause and not meets:
                self.dead.add(rank)
                return
            if is_struck and not meets:
                self.paused_until[rank] = self.tick + self.fault.pause
                yield 1
                self.flags |= {(call, rank, other) for other in ALL if not is_relay}
            began, deadline, waiting, is_noted = self.tick, Deadline(TIMEOUT_S, self.clock), [True], False
            name = f"dispatch number {call}"
            awaited = [other for other in AWAITED[self.shape][rank] if other != rank or not meets]
            while missing := [other for other in awaited if meets or (call, other, rank) not in self.flags]:
                if deadline.left() <= 0:
                    waiting[0] = False
                    notes.say("raised", name, missing)
                    asking = notes.asking(missing)
                    while True:
                        try:
                            next(asking)
                        except StopIteration as end:
                            self.errors[rank] = end.value
                            break
                        beside()
                        yield 1
                    return
                if not is_noted and (self.tick - began) * TICK_S >= noted_after_s(TIMEOUT_S):
                    is_noted = True
                    note = notes.renewing(name, missing, lambda waiting=waiting: waiting[0])
                beside()
                yield 1
            waiting[0] = False
            self.flags |= {(call, rank, other) for other in ALL}


def worlds(faults: list[Fault]) -> Iterator[World]:
    starts = [(0, 0, 0), (0, 7, 15), (15, 0, 7), (0, 28, 28)]
    works = [(1, 1, 1), (0, 6, 3), (6, 0, 3)]
    for fault, start, work, late in itertools.product(faults, starts, works, (0, 8)):
        for shape in AWAITED:
            yield World(fault, start, work, late, shape)


def struck(pauses: tuple[int, ...]) -> list[Fault]:
    """One rank, in some of its calls, when it has posted to none or one of the others."""
    faults = itertools.product(ALL, (0, 1), pauses)
    return [
        Fault(rank, call, sent, pause)
        for rank, call, pause in faults
        for sent in ((), ((rank + 1) % RANKS,), ((rank + 2) % RANKS,))
    ]


def certain(errors: dict[int, Culprits]) -> set[int]:
    """Whom anybody has named without a doubt."""
    return {rank for found in errors.values() for rank in found.ranks if rank not in found.uncertain}


@pytest.mark.parametrize("victim", ALL)
def test_survivors_of_a_death_name_the_dead_and_nobody_else(victim: int) -> None:
    doubts = number = 0
    for world in worlds([fault for fault in struck((0,)) if fault.rank == victim]):
        errors = world.run()
        assert errors or (world.shape, victim) == ("relay", 0)
        assert victim not in errors, world
        for found in errors.values():
            assert found.ranks == (victim,), world
            assert not found.uncertain or "until a moment ago" in found.why, world
            doubts, number = doubts + bool(found.uncertain), number + 1
    assert doubts < number / 20, (doubts, number)


def test_nobody_is_named_with_certainty_but_who_has_paused() -> None:
    """Pauses shorter than a time-out, somewhat longer, and much longer."""
    for world in worlds(struck((10, 38, 60, LONG_PAUSE))):
        errors, victim = world.run(), world.fault.rank
        late = {rank for rank in ALL if world.starts[rank] * TICK_S > TIMEOUT_S / 2}  # by themselves
        assert certain(errors) <= {victim} | late, world
        if world.fault.pause == LONG_PAUSE:
            assert all(victim in found.ranks for rank, found in errors.items() if rank != victim), world


def test_nobody_is_named_after_all_have_paused_together() -> None:
    pauses = [Fault(tick=tick, all_pause=pause) for tick in range(1, 40, 7) for pause in (5, 39, 100)]
    for world in worlds(pauses):
        assert world.run() == {}, world


def test_only_the_dead_is_named_where_all_who_are_left_pause_as_well() -> None:
    """Before their time is up, or while they ask."""
    for rank, tick, pause in itertools.product(ALL, range(32, 80, 9), (15, 100)):
        for world in worlds([Fault(rank, 1, (), 0, tick, pause)]):
            errors = world.run()
            assert certain(errors) <= {rank}, world
            assert all(rank in found.ranks for found in errors.values()), world


@pytest.mark.parametrize("victim", ALL)
def test_ranks_that_make_different_calls_name_each_other(victim: int) -> None:
    """They wait in a circle, and run out of time together."""
    others = tuple(rank for rank in ALL if rank != victim)
    for world in worlds([Fault(victim, call, meets=True) for call in (0, 1)]):
        if world.shape == "all":
            errors = world.run()
            assert set(errors) == set(ALL), world
            assert all(errors[rank].ranks == (victim,) for rank in others), world
            assert errors[victim].ranks, world
            assert set(errors[victim].ranks) <= set(others), world


def test_a_fault_is_needed_for_an_error() -> None:
    for world in worlds([Fault()]):
        assert world.run() == {}
