"""Where a processor keeps no order, numbers are left behind what they are about, and read before it."""

from __future__ import annotations

import platform
from collections.abc import Callable

import pytest

from moe_triton.backends.cpu.side_copies import CpuSideCopies
from moe_triton.balance.agreement import HAD, MOVE, NUM_WORDS, NUMBERS, PLACEMENTS, STEP, SWITCHED, InMemory
from moe_triton.balance.carriers import ByPosts, ByWords, Region
from tests.balance.test_mover import SharedArrays

RANKS, RING_BYTES = 2, 64


class Fenced(SharedArrays):
    """Memory with a fence that a test sees."""

    def __init__(self, queued: frozenset[int] = frozenset()) -> None:
        super().__init__(RANKS, 8 * NUM_WORDS + Region.num_bytes(RANKS, RING_BYTES))
        self.queued, self.copies = queued, CpuSideCopies()
        self.copies.fence = lambda: self.at_fence()
        self.at_fence: Callable[[], None] = lambda: None

    def words(self, rank: int) -> memoryview:
        return self.of(rank).numpy().data.cast("B").cast("q")


def before_numbers(memory: Fenced, writes: Callable[[], object]) -> list[list[int]]:
    """Rank 0's words at each fence while it writes."""
    seen: list[list[int]] = []
    memory.at_fence = lambda: seen.append(memory.words(0).tolist())
    writes()
    memory.at_fence = lambda: None
    return seen


def test_what_a_number_is_about_is_left_before_it() -> None:
    memory = Fenced()
    mine = InMemory(memory, 0, RANKS)
    (seen,) = before_numbers(memory, lambda: mine.begin(9))
    assert (seen[PLACEMENTS + 1], seen[MOVE]) == (9, 0)
    (seen,) = before_numbers(memory, lambda: mine.pass_step(0))
    assert seen[STEP] == 0
    assert len(before_numbers(memory, lambda: mine.changed(lambda: True))) == 1
    memory.words(0)[SWITCHED] = 0
    *_, seen = before_numbers(memory, lambda: mine.arrive(1, has_all=True, target=7))
    at = HAD + 3
    assert (seen[at], seen[at + 1 : at + 3]) == (0, [1, 7])
    assert memory.words(0).tolist()[:NUM_WORDS][at : at + 3] == [1, 1, 7]


def test_numbers_are_read_before_what_they_are_about() -> None:
    memory = Fenced()
    mine = InMemory(memory, 0, RANKS)
    for at in range(NUM_WORDS):
        memory.words(1)[at] = 100 + at

    def write_more() -> None:
        for at in range(NUM_WORDS):
            memory.words(1)[at] = 200 + at

    memory.at_fence = write_more
    said = mine._read()[1]
    assert said == [100 + at if at in NUMBERS else 200 + at for at in range(NUM_WORDS)]


@pytest.mark.parametrize("count_of", ["put_by", "taken_by"])
@pytest.mark.parametrize("is_queued", [False, True])
def test_counts_of_bytes_are_read_before_the_bytes(count_of: str, is_queued: bool) -> None:
    memory = Fenced(frozenset([1]) if is_queued else frozenset())
    region = Region(memory, 0, 0, RANKS, RING_BYTES)
    carrier = ByPosts(region, [1]) if is_queued else ByWords(region)
    fences: list[int] = []

    def write_more() -> None:
        fences.append(1)
        for rank in range(RANKS):
            memory.of(rank).fill_(1)

    memory.at_fence = write_more
    assert (getattr(carrier, count_of)(1), len(fences)) == (0, 1)


@pytest.mark.parametrize("tells", [lambda c: c.has_put(1, [], 5), lambda c: c.has_taken(1, 5)])
def test_counts_of_bytes_are_left_behind_them(tells: Callable[[ByWords], None]) -> None:
    memory = Fenced()
    carrier = ByWords(Region(memory, 0, 0, RANKS, RING_BYTES))
    (seen,) = before_numbers(memory, lambda: tells(carrier))
    assert (5 in seen, 5 in memory.words(0).tolist()) == (False, True)


@pytest.mark.parametrize(("machine", "has_fence"), [("x86_64", False), ("aarch64", True)])
def test_only_where_the_processor_keeps_no_order_there_is_a_fence(
    monkeypatch: pytest.MonkeyPatch, machine: str, has_fence: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    fence = CpuSideCopies().fence
    assert (fence is not None) is has_fence
    if fence is not None:
        fence()
