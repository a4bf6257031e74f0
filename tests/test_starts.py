"""Agreements on a dispatch: every order of three ranks' steps, and some of up to five, word by word."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.rendezvous.starts import NONE, READY, Start
from moe_triton.rendezvous.stores import Store

AHEAD = (0, 0, 0, 2, 1)
"""Dispatches ahead that each rank promises: those of which every order is tried, as few as can be."""
MOST_BEGUN = 1
"""Dispatches that a rank begins in what is explored, whatever it has promised."""
LOOKS = 6
"""More than a rank needs once it has heard all."""


class DiedError(Exception):
    """A rank ends in the middle of a look."""


def nothing() -> None:
    """Nobody comes in between."""


class MemoryStore:
    """As torch's stores.

    Attributes:
        values: by their keys.
        before: is called before each operation.
    """

    def __init__(self, values: dict[str, bytes] | None = None) -> None:
        self.values = {} if values is None else values
        self.before: Callable[[], None] = nothing

    def set(self, key: str, value: str) -> None:
        self.before()
        self.values[key] = value.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.before()
        if key not in self.values and expected:
            return expected.encode()
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = desired.encode()
        return self.values[key]


class World:
    """Ranks that agree on a dispatch, and begin one after the other meanwhile.

    Attributes:
        store: of all.
        starts: each rank's part. Whoever changes one changes a copy.
        begun: dispatches that each has begun, as far as it did not know what was agreed on.
        over: ranks that have heard that one of them is lost, or was missed.
        lost: ranks that do nothing any more.
        inside: ranks that are in the middle of a look.
        has_given_up: whether one has.
    """

    def __init__(self, num_ranks: int) -> None:
        self.store = MemoryStore()
        self._stores = [self.store]  # where copies of a start find theirs
        self.starts = [Start(self._open, range(num_ranks), rank) for rank in range(num_ranks)]
        self.begun = [0] * num_ranks
        self.over, self.lost, self.inside = frozenset[int](), frozenset[int](), frozenset[int]()
        self.has_given_up = False

    def _open(self) -> Store:
        return cast(Store, self._stores[0])

    def copied(self) -> World:
        made = copy.copy(self)
        made.store = MemoryStore(self.store.values.copy())
        made.starts, made.begun = self.starts.copy(), self.begun.copy()
        return made

    def _start_of(self, rank: int) -> Start:
        start = copy.copy(self.starts[rank])
        for name, value in vars(start).items():
            if isinstance(value, (dict, list)):
                vars(start)[name] = value.copy()
        self.starts[rank], self._stores[0] = start, self.store
        return start

    def key(self) -> object:
        """Tells states apart. Of a rank that is over only what others may ask for."""
        starts = [
            (start.promised, start.at, start.is_settled)
            if start.is_settled or rank in self.lost
            else tuple(str(value) for name, value in vars(start).items() if name != "_open_store")
            for rank, start in enumerate(self.starts)
        ]
        over = self.over.intersection(self.unsettled)
        return (*starts, *self.begun, over, self.lost, self.has_given_up, *sorted(self.store.values.items()))

    @property
    def unsettled(self) -> list[int]:
        """Ranks that go on, and do not know yet what was agreed on."""
        return [
            rank for rank, start in enumerate(self.starts) if not start.is_settled and rank not in self.lost
        ]

    # What a rank does.

    def look(self, rank: int, is_ready: bool = True) -> None:
        before = self.inside
        self.inside |= {rank}
        try:
            start = self._start_of(rank)
            start.look(lambda: is_ready, lambda: self.begun[rank] + AHEAD[rank], rank in self.over)
        except DiedError:
            self.lose(rank)
        finally:
            self.inside = before

    def waits(self, rank: int) -> bool:
        start = self.starts[rank]
        return not start.is_settled and start.promised is not None and self.begun[rank] >= start.promised

    def give_up(self, rank: int) -> None:
        self.has_given_up = True
        self._start_of(rank).give_up()

    def begin(self, rank: int) -> None:
        """The next dispatch."""
        self.begun[rank] += 1

    def hear(self, rank: int) -> None:
        self.over |= {rank}

    def lose(self, rank: int) -> None:
        self.lost |= {rank}

    # What holds.

    def check(self) -> None:
        """Whatever has been done."""
        ats = {start.at for start in self.starts if start.is_settled}
        assert len(ats) <= 1, "ranks disagree"
        at = ats.pop() if ats else None
        if at is not None:
            promised = [start.promised for start in self.starts]
            kept = [each for each in promised if each is not None and each <= at]
            assert kept == promised, f"{at} agreed on, {promised} promised"
            assert max(self.begun) <= at, "one has begun it, or a later one, and does not know"

    def check_end(self) -> None:
        """Where looks change nothing any more."""
        waiting = self.unsettled
        if self.over.issuperset(waiting):
            promised = [rank for rank in waiting if self.starts[rank].promised is not None]
            assert not promised, f"{promised} wait for ever"
        if not self.over and not self.lost:
            assert not waiting, f"{waiting} wait for ever"
            assert self.has_given_up or self.starts[0].at is not None, "none, and nobody was lost"


def counted(world: World, rank: int) -> tuple[World, int]:
    """A look by itself, and how many operations it has."""
    made, count = world.copied(), 0

    def one_more() -> None:
        nonlocal count
        count += 1

    made.store.before = one_more
    made.look(rank)
    made.store.before = nothing
    return made, count


def interrupted(world: World, rank: int, at: int, meanwhile: Callable[[World], None]) -> World:
    """The same, with something else before an operation."""
    made, count = world.copied(), 0

    def comes() -> None:
        nonlocal count
        count += 1
        if count > at:
            made.store.before = nothing
            meanwhile(made)

    made.store.before = comes
    made.look(rank)
    return made


def die(world: World) -> None:
    raise DiedError


def begin_unless_promised(world: World, rank: int) -> None:
    if not world.waits(rank) and world.begun[rank] < MOST_BEGUN:
        world.begin(rank)


def after(world: World, looks: Collection[tuple[int, World, int]]) -> Iterator[World]:
    """Where each step leads. Within a look another rank may look, the own calls go on, or the rank die."""
    for rank, looked, count in looks:
        yield looked
        steps = [
            (World.begin, not world.waits(rank) and world.begun[rank] < MOST_BEGUN),
            (World.hear, rank not in world.over),
            (World.give_up, world.waits(rank)),
            (World.lose, not world.lost),
        ]
        for step, may_be in steps:
            if may_be:
                made = world.copied()
                step(made, rank)
                yield made
        for at in range(1, count):
            for other, *_ in looks:
                if other != rank:
                    yield interrupted(world, rank, at, lambda made, other=other: made.look(other))  # type: ignore[misc]
            yield interrupted(world, rank, at, lambda made, own=rank: begin_unless_promised(made, own))  # type: ignore[misc]
            if not world.lost:
                yield interrupted(world, rank, at, die)


def explore(num_ranks: int) -> int:
    """Raises what goes wrong in any order of their steps; returns how many states there are."""
    first = World(num_ranks)
    known, todo = {first.key()}, deque([first])
    while todo:
        world = todo.popleft()
        looks = [(rank, *counted(world, rank)) for rank in world.unsettled]
        own = world.key()
        if all(looked.key() == own for _, looked, _ in looks):
            world.check_end()
        for made in after(world, looks):
            if (key := made.key()) not in known:
                made.check()
                known.add(key)
                todo.append(made)
    return len(known)


def test_every_order_of_three_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    states = explore(3)
    with capsys.disabled():
        print(f"\n{states} states ", end="")


class Played:
    """Steps of ranks in an order that is drawn, also in the middle of each other's looks.

    Args:
        world: of the ranks.
        data: draws.
        died: how many may be lost.
    """

    def __init__(self, world: World, data: st.DataObject, died: int) -> None:
        self._world, self._data, self._died = world, data, died
        world.store.before = self._meanwhile

    def step(self) -> None:
        world = self._world
        if not world.unsettled:
            return
        rank, kind = self._data.draw(st.tuples(st.sampled_from(world.unsettled), st.integers(0, 9)))
        if kind == 0 and not world.waits(rank):  # on another thread than that which looks
            world.begin(rank)
        elif rank in world.inside:
            if kind == 1 and len(world.lost) < self._died:
                raise DiedError
        elif kind == 1 and len(world.lost) < self._died:
            world.lose(rank)
        elif kind == 2:
            world.hear(rank)
        elif kind == 3 and world.waits(rank):
            world.give_up(rank)
        else:
            world.look(rank, is_ready=kind > 4)
        world.check()

    def _meanwhile(self) -> None:
        while self._data.draw(st.booleans()):
            self.step()


@settings(deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(0, 2))
def test_some_orders_of_any_ranks(data: st.DataObject, num_ranks: int, died: int) -> None:
    world = World(num_ranks)
    played = Played(world, data, died)
    for _ in range(data.draw(st.integers(0, 8 * num_ranks))):
        played.step()
    world.store.before = nothing
    if world.lost or world.over:
        world.over = frozenset(range(num_ranks))
    for _ in range(LOOKS):
        for rank in world.unsettled:
            world.look(rank)
            world.check()
    world.check_end()


def words_that_are_no_number() -> st.SearchStrategy[bytes]:
    words = (
        st.binary(min_size=1)
        | st.text(min_size=1).map(str.encode)
        | st.sampled_from([b"9" * 5000, b"-1", "²".encode()])
    )
    return words.filter(lambda word: len(word) > 1000 or not word.decode(errors="replace").isdecimal())


@given(words_that_are_no_number())
def test_a_start_that_is_no_number_is_none_on_all(word: bytes) -> None:
    world = World(3)
    world.store.values["start"] = word
    for _ in range(LOOKS):
        for rank in world.unsettled:
            world.look(rank)
    assert [(start.is_settled, start.at) for start in world.starts] == [(True, None)] * 3


@given(words_that_are_no_number(), st.booleans())
def test_a_promise_that_is_no_number_is_none(word: bytes, is_lost: bool) -> None:
    """The rank's own follows, or it is lost."""
    world = World(3)
    world.begun = [2, 7, 4]
    world.store.values.update({"ready/2": word, "from/2": word})
    for _ in range(LOOKS):
        for rank in (0, 1):
            world.look(rank)
    assert world.unsettled == [0, 1, 2]
    if is_lost:
        world.lose(2)
        world.over = frozenset((0, 1))
    for _ in range(LOOKS):
        for rank in world.unsettled:
            world.look(rank)
    world.check()
    ends = {(start.is_settled, start.at) for start in world.starts[: 3 - is_lost]}
    assert ends == {(True, None if is_lost else 7)}


def looks_of(
    store: MemoryStore, rank: int, promises: int, members: Collection[int] = (0, 1)
) -> Callable[..., Start]:
    """Lets a rank look, which promises a dispatch."""
    start = Start(lambda: cast(Store, store), members, rank)

    def look(is_ready: bool = True, is_over: bool = False) -> Start:
        start.look(lambda: is_ready, lambda: promises, is_over)
        return start

    return look


def test_the_highest_promise_is_agreed_on() -> None:
    store = MemoryStore()
    first, other = looks_of(store, 3, 5, (7, 3)), looks_of(store, 7, 9, (3, 7))
    assert (first().promised, other().promised, first().promised) == (None, 9, 5)
    assert (first().at, other().at, other().is_settled) == (9, 9, True)
    assert store.values == {
        "ready/3": b"ready",
        "ready/7": b"ready",
        "from/7": b"9",
        "from/3": b"5",
        "start": b"9",
    }


def test_nobody_promises_before_all_are_ready() -> None:
    store = MemoryStore()
    first, other = looks_of(store, 0, 5), looks_of(store, 1, 9)
    other(is_ready=False)
    assert (first().promised, first().promised, store.values) == (None, None, {"ready/0": READY.encode()})
    other()
    assert first().promised == 5


@pytest.mark.parametrize("is_ready", [False, True])
def test_nobody_promises_once_a_member_is_lost(is_ready: bool) -> None:
    """It would wait then, and those who have promised do not wait for it."""
    store = MemoryStore()
    first = looks_of(store, 0, 5)
    if is_ready:
        first()
    looks_of(store, 1, 9)()
    start = first(is_over=True)
    assert (start.promised, start.is_settled) == (None, False)
    assert ("ready/0" in store.values) == is_ready


def test_who_gives_up_has_all_go_on_without() -> None:
    store = MemoryStore()
    first, other = looks_of(store, 0, 5), looks_of(store, 1, 9)
    first()
    start = other()
    assert start.promised == 9
    start.give_up()
    assert store.values["start"] == NONE.encode()
    assert (start.is_settled, start.at) == (True, None)
    assert (first().is_settled, first().at) == (True, None)


def test_who_waits_hears_that_another_has_given_up() -> None:
    """Also of one that has promised nothing yet."""
    store = MemoryStore()
    first, other, last = (looks_of(store, rank, 5, (0, 1, 2)) for rank in (0, 1, 2))
    last(), first()
    start = other()
    assert (first().promised, start.is_settled) == (5, False)
    start.give_up()
    assert (first().is_settled, first().at) == (True, None)
    assert (last().is_settled, last().at) == (True, None)


def test_who_gives_up_too_late_goes_by_what_was_agreed_on() -> None:
    store = MemoryStore()
    first, other = looks_of(store, 0, 5), looks_of(store, 1, 9)
    other()
    start = first()
    assert (other().at, start.is_settled) == (9, False)
    start.give_up()
    assert (start.is_settled, start.at) == (True, 9)


def test_what_is_settled_asks_nobody() -> None:
    store = MemoryStore()
    start = looks_of(store, 0, 5, (0,))()
    store.before = lambda: pytest.fail("it asks the store")
    start.look(lambda: pytest.fail("it asks"), lambda: pytest.fail("it promises"), True)
    start.give_up()
    assert (start.is_settled, start.at) == (True, 5)
