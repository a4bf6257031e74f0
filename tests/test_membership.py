"""What ranks that meet others find out about each other, and what they wait for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from moe_triton.rendezvous import membership as module
from moe_triton.rendezvous.membership import Membership, Past

ALL, PAIR = (0, 1, 2), (0, 1)
DIFFER = "\n  lost_ranks: [2] on rank(s) [0], [] on rank(s) [1]"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    yield now
    monkeypatch.undo()


class Rank:
    """One rank of three, and what it has met."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank, self.past = store, rank, Past()

    def joins(self, members: tuple[int, ...]) -> Rank:
        self._missing = [i for i, rank in enumerate(members) if rank != self._rank]
        self.meeting = Membership(self._store, self.past, self._rank, members, 3, "lost_ranks")  # type: ignore[arg-type]
        self.meeting.begin()
        self.meeting.wait()
        return self

    def says(self, is_last: bool = False) -> str:
        return self.meeting.look(lambda: self._missing, is_last)


@pytest.fixture
def ranks() -> list[Rank]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return [Rank(store, rank) for rank in range(3)]


def look_by_turns(clock: list[float], *ranks: Rank) -> list[str]:
    """What ranks that wait say first, in two looks each."""
    said = [""] * len(ranks)
    for _ in range(2):
        clock[0] += 1.0
        said = [one or rank.says() for one, rank in zip(said, ranks, strict=True)]
    return said


def test_the_same_construction_with_other_members(ranks: list[Rank], clock: list[float]) -> None:
    said = look_by_turns(clock, ranks[0].joins(PAIR), ranks[1].joins(ALL))
    assert all(text.endswith(DIFFER) for text in said)


def test_a_look_too_soon_is_none(ranks: list[Rank], clock: list[float]) -> None:
    ranks[1].joins(ALL).meeting.met(0)
    assert ranks[0].joins(PAIR).says() == ""


def test_a_rank_that_is_not_seen_to_wait_may_have_died_long_ago(
    ranks: list[Rank], clock: list[float]
) -> None:
    ranks[1].joins(ALL)
    assert look_by_turns(clock, ranks[0].joins(PAIR)) == [""]
    assert ranks[0].says(is_last=True) == ""


def test_after_a_failure_a_rank_is_waited_for_until_the_end(ranks: list[Rank], clock: list[float]) -> None:
    """It may follow: here, rank 0 has given the construction up that rank 1 is still in."""
    ranks[0].joins(ALL)
    ranks[1].joins(ALL)
    assert look_by_turns(clock, ranks[0].joins(PAIR), ranks[1]) == ["", ""]
    assert ranks[0].says(is_last=True).endswith(DIFFER)


def test_ranks_that_have_all_met_again_are_clean(ranks: list[Rank], clock: list[float]) -> None:
    ranks[0].joins(ALL)
    for rank in ranks:
        rank.joins(ALL).meeting.met(4)
    assert all(look_by_turns(clock, ranks[0].joins(PAIR), ranks[1].joins(ALL)))


def test_ranks_that_come_from_other_meetings_say_nothing_of_each_other(
    ranks: list[Rank], clock: list[float]
) -> None:
    """Rank 1 has yet to see that the meeting is over from which rank 0 comes."""
    ranks[1].joins(ALL)
    ranks[0].joins(ALL).meeting.met(0)
    assert look_by_turns(clock, ranks[0].joins(PAIR), ranks[1]) == ["", ""]


def test_a_rank_that_is_missed_by_nobody_is_told_at_the_end(ranks: list[Rank], clock: list[float]) -> None:
    """The others may come to it next."""
    for rank in ranks[:2]:
        rank.joins(PAIR).meeting.met(0)
    assert look_by_turns(clock, ranks[2].joins(ALL)) == [""]
    assert ranks[2].says(is_last=True).endswith("lost_ranks: [2] on rank(s) [0, 1], [] on rank(s) [2]")


def test_ranks_that_meet_in_one_pair_after_another_do_not_differ(
    ranks: list[Rank], clock: list[float]
) -> None:
    """Rank 2 waits for rank 1, which is still with rank 0."""
    pairs = ranks[0].joins(PAIR), ranks[1].joins(PAIR), ranks[2].joins((1, 2))
    assert look_by_turns(clock, *pairs) == ["", "", ""]
    for rank in ranks[:2]:
        rank.meeting.met(0)
    assert look_by_turns(clock, ranks[2]) == [""]


def test_who_waits_for_a_rank_that_has_found_a_disagreement_is_told(
    ranks: list[Rank], clock: list[float]
) -> None:
    """Rank 1 leaves rank 2 out, and rank 0 does not: rank 0 and rank 1 wait for each other."""
    said = look_by_turns(clock, ranks[0].joins(ALL), ranks[1].joins(PAIR), ranks[2].joins(ALL))
    assert all(said)
    assert said[2].endswith("lost_ranks: [2] on rank(s) [1], [] on rank(s) [2]")


def test_the_same_ranks_in_another_order(ranks: list[Rank], clock: list[float]) -> None:
    said = look_by_turns(clock, ranks[0].joins((0, 1, 2)), ranks[1].joins((1, 0, 2)))
    assert said[0].endswith("in this order, (0, 1, 2) on rank(s) [0], (1, 0, 2) on rank(s) [1]")


@pytest.mark.parametrize("text", ["", "{", "7", "[1, true]", '["", true, ["x"], "done", 0]', "[" * 9999])
def test_what_is_nothing_of_ours_is_passed_by(ranks: list[Rank], clock: list[float], text: str) -> None:
    ranks[0]._store.set("members/1", text)
    assert look_by_turns(clock, ranks[0].joins(PAIR)) == [""]
