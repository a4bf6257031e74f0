"""What servers tell each other of ranks that have gone, look by look, over a store of this process."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from moe_triton.rendezvous.server_ends import CLOSED, DEAD, FIRST_TICKS, LEFT, SILENT_TICKS, End, ServerEnds

SERVERS = 0, 0, 1, 1
GONE = End(3, DEAD, True, "the end of its process")


class Group:
    """The ranks of some servers, which take looks when they are told to."""

    def __init__(self, servers: Sequence[int] = SERVERS) -> None:
        self.store = dist.HashStore()  # type: ignore[attr-defined]
        self.known: list[dict[int, End]] = [{} for _ in servers]
        self.ranks = [self._rank(number, servers) for number in range(len(servers))]

    def _rank(self, number: int, servers: Sequence[int]) -> ServerEnds:
        known = self.known[number]

        def report(end: End) -> None:
            known.setdefault(end.number, end)

        return ServerEnds(self.store, number, servers, known.get, lambda _: False, report)

    def look(self, *ranks: int, times: int = 1, was_late: bool = False) -> None:
        for _ in range(times):
            for rank in ranks:
                self.ranks[rank].look(was_late)


def test_a_neighbour_tells() -> None:
    group = Group()
    group.look(0, 1, 2)
    group.known[2][3] = GONE
    group.look(2, 0, 1)
    assert [each.get(3) for each in group.known] == [GONE, GONE, GONE, None]


def test_who_leaves_tells_before() -> None:
    group = Group()
    group.known[2][3] = GONE
    group.ranks[2].stop(LEFT, has_ended=False)
    group.ranks[2].start()
    group.ranks[2].stop(LEFT, has_ended=False)
    group.look(0)
    assert group.known[0] == {3: GONE, 2: End(2, LEFT, False, "it said so")}


def test_another_one_tells_if_the_first_one_does_not() -> None:
    group = Group((0, 1, 1, 1))
    group.look(0, 1, 2)
    group.known[1][3] = group.known[2][3] = GONE
    group.look(2, 0)
    assert 3 not in group.known[0]  # it is rank 1's turn
    group.look(2, 0)
    assert group.known[0][3] == GONE


def test_a_silent_server_is_dead_and_that_is_not_certain() -> None:
    group = Group()
    group.look(0, 1, 2, 3, times=2)
    group.look(0, 1, times=SILENT_TICKS - 1)
    assert not group.known[0]
    group.look(0, 1, times=2)
    for known in group.known[:2]:
        assert sorted(known) == [2, 3]
        assert all(
            end.state == DEAD and not end.is_certain and "no heartbeat" in end.sign for end in known.values()
        )


def test_a_server_that_has_not_begun_gets_longer() -> None:
    group = Group()
    group.look(0, 1, times=FIRST_TICKS)
    assert not group.known[0]
    group.look(0, times=2)
    assert sorted(group.known[0]) == [2, 3]


def test_a_server_whose_first_rank_is_stopped_is_there() -> None:
    group = Group()
    group.look(0, 1, 2, 3, times=2)
    group.look(0, 1, 3, times=10 * SILENT_TICKS)
    assert not any(group.known)


def test_nobody_is_dead_to_who_was_stopped_itself() -> None:
    group = Group()
    group.look(0, 1, 2, 3, times=2)
    group.look(0, times=SILENT_TICKS - 1)
    group.look(0, was_late=True)
    group.look(0, times=SILENT_TICKS - 1)
    assert not group.known[0]


@pytest.mark.parametrize(("state", "known"), [(LEFT, [(LEFT, False)] * 4), (CLOSED, [])])
def test_who_has_left_is_not_missed(state: str, known: list[tuple[str, bool]]) -> None:
    """Of one that has only closed these buffers nothing is said that others of the group would go by."""
    group = Group()
    group.look(0, 1, 2, 3, times=2)
    for rank in (2, 3):
        group.ranks[rank].start()
        group.ranks[rank].stop(state, has_ended=False)
    group.look(0, 1, times=3 * FIRST_TICKS)
    assert [end[1:3] for each in group.known[:2] for _, end in sorted(each.items())] == known


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "[]",
        "[9, 'dead', true, '', true]",
        json.dumps([-1, DEAD, True, "", True]),
        "[" * 9999,
        json.dumps([2, "well", True, "", True]),
        json.dumps([None] * 5),
    ],
)
def test_what_no_rank_writes_is_ignored(text: str) -> None:
    group = Group()
    group.store.set("end/0", text)
    group.look(2, 3)
    group.known[2][3] = GONE
    group.look(2, 0)
    assert group.known[0] == {3: GONE}
    assert 2 not in group.known[0]
