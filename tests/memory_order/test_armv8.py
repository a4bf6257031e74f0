"""The model gives the verdicts that are known, and takes barriers for what they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .armv8 import Fence, Load, Program, Store, Thread, Update
from .litmus import LITMUS, Litmus

PLACES = ("x", "y", "z")
Ends = set[frozenset[tuple[str, int]]]


@pytest.mark.parametrize("litmus", LITMUS, ids=lambda litmus: litmus.name)
def test_litmus(litmus: Litmus) -> None:
    assert litmus.program.allows(litmus.end) is litmus.is_allowed


def test_names_are_those_of_one_program_each() -> None:
    assert len({litmus.name for litmus in LITMUS}) == len(LITMUS)


def ends(threads: Sequence[Thread]) -> Ends:
    return {frozenset(end.items()) for end in Program(threads).outcomes()}


def interleaved(threads: Sequence[Thread]) -> Ends:
    """How sequentially consistent executions end: one memory, and one access after the other."""
    orders = set(itertools.permutations([n for n, thread in enumerate(threads) for _ in thread]))
    return {frozenset(_run(threads, order)) for order in orders}


def _run(threads: Sequence[Thread], order: Sequence[int]) -> Iterator[tuple[str, int]]:
    memory = {
        each.place: 0 for thread in threads for each in thread if isinstance(each, Load | Store | Update)
    }
    left = [iter(thread) for thread in threads]
    for number in order:
        each = next(left[number])
        if isinstance(each, Store):
            assert isinstance(each.value, int)
            memory[each.place] = each.value
        elif isinstance(each, Load | Update):
            yield each.into, memory[each.place]
            if isinstance(each, Update):
                memory[each.place] += each.adds
    yield from memory.items()


@st.composite
def programs(draw: st.DrawFn) -> list[Thread]:
    """Two or three threads, with seven accesses in all at most."""
    sizes = draw(st.sampled_from([(2, 2), (3, 2), (3, 3), (2, 2, 2), (3, 2, 2), (1, 1, 2)]))
    names = itertools.count()

    def access() -> Load | Store | Update:
        place, number = draw(st.sampled_from(PLACES)), next(names)
        kind = draw(st.sampled_from(["load", "load", "store", "store", "update"]))
        if kind == "load":
            return Load(place, f"r{number}")
        return Store(place, number + 1) if kind == "store" else Update(place, f"r{number}", adds=16)

    return [[access() for _ in range(size)] for size in sizes]


def with_fences(thread: Thread, fences: Sequence[Fence | None]) -> Thread:
    """One of these behind each access, or none."""
    pairs = itertools.zip_longest(thread, fences[: len(thread)])
    return [each for pair in pairs for each in pair if each is not None]


@given(programs())
def test_with_full_barriers_everywhere_memory_is_sequentially_consistent(threads: list[Thread]) -> None:
    assert ends([with_fences(thread, [Fence.FULL] * len(thread)) for thread in threads]) == interleaved(
        threads
    )


@given(programs())
def test_without_barriers_it_is_that_or_weaker(threads: list[Thread]) -> None:
    assert ends(threads) >= interleaved(threads)


@given(programs(), st.lists(st.sampled_from([None, *Fence]), min_size=9, max_size=9))
def test_a_barrier_allows_nothing_new(threads: list[Thread], fences: list[Fence | None]) -> None:
    fenced = [with_fences(thread, fences[3 * n : 3 * n + 3]) for n, thread in enumerate(threads)]
    assert ends(fenced) <= ends(threads)


def test_what_is_no_part_of_a_program_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"no register or place: \['y'\]"):
        Program([[Store("x", 1)]]).allows({"y": 1})


@pytest.mark.parametrize("accesses", [5, pytest.param(6, marks=pytest.mark.long)])
def test_four_threads_are_searched_whole(accesses: int) -> None:
    """Each passes what the one before says on, with as much else around it as patterns have."""
    threads: list[Thread] = []
    for number in range(4):
        thread: list[Load | Store | Update | Fence] = (
            [Load(f"flag{number}", f"f{number}", reads=1)] if number else []
        )
        for own in range(accesses - 1 - len(thread)):
            place = f"data{(number + own) % 3}"
            thread.append(Store(place, 8 * number + own + 1) if own % 2 else Load(place, f"r{number}{own}"))
        if number == 3:
            thread = [thread[0], Fence.LOADS, Load("first", "end"), *thread[1:]]
        elif number == 0:
            thread = [Store("first", 1), Fence.FULL, *thread, Store("flag1", 1, release=True)]
        else:
            thread = [*thread, Store(f"flag{number + 1}", 1, release=True)]
        threads.append(thread)
    assert not Program(threads).allows({"end": 0})
    assert Program(threads).allows({"end": 1})
