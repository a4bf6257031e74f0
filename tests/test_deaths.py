"""What one process knows of the ends of others, whatever tells; here ranks are watches of one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from moe_triton.rendezvous import deaths
from moe_triton.rendezvous.deaths import BY_ENTRANCE, ITSELF, NOT_WATCHED, Gone, Watch
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.rendezvous.process_ends import BY_PIDFD
from tests.patience import seconds


class Alone:
    """A meeting of ranks that have no group."""

    group, num_ranks, hosts, num_hosts = None, 2, (0, 0), 1

    def __init__(self, rank: int) -> None:
        self.rank = rank


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds(20)
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    made = [Watch(cast(Meeting, Alone(rank))) for rank in range(2)]
    yield made
    for watch in made:
        watch.close()
    until(lambda: deaths._watcher._thread is None)


def begin(watches: Sequence[Watch], servers: Sequence[int] = (0, 0)) -> None:
    offers = [watch.offer(servers) for watch in watches]
    for watch in watches:
        watch.take(offers)
        watch.take_here((0, 1))
    for watch in watches:
        watch.begin()


def signs(watch: Watch) -> list[str]:
    return [each.sign for each in watch.health()]


def test_ranks_watch_each_other(watches: list[Watch]) -> None:
    begin(watches)
    until(lambda: signs(watches[0]) == [ITSELF, BY_PIDFD])
    until(lambda: signs(watches[1]) == [BY_PIDFD, ITSELF])
    assert watches[0].gone() == {}
    watches[1].close()
    health = watches[0].health()[1]
    assert (health.state, health.sign) == ("left", "it has closed its buffers")
    assert health.since_s <= time.time()
    assert watches[0].dead() == {}


def test_any_sign_is_told_once_to_all_who_listen(watches: list[Watch]) -> None:
    heard: list[Gone] = []
    watches[0].listen(heard.append)
    begin(watches)
    watches[0].notice(1, "its connection", is_certain=False)
    watches[0].notice(1, "its heartbeat")
    ((rank, state, has_ended, since_s, sign, is_certain),) = heard
    assert (rank, state, has_ended, sign, is_certain) == (1, "dead", True, "its connection", False)
    assert watches[0].dead() == {1: heard[0]}
    health = watches[0].health()[1]
    assert (health.state, health.since_s, health.sign) == ("dead", since_s, "its connection")
    later: list[Gone] = []
    watches[0].listen(later.append)
    assert later == heard
    assert watches[1].gone() == {}


@pytest.mark.parametrize(
    "offer", [None, "text", {}, {"token": "0", "entrance": ""}, {"token": "0" * 16, "entrance": 3}]
)
def test_who_offers_nothing_is_not_watched(watches: list[Watch], offer: Any) -> None:
    watches[0].take([watches[0].offer((0, 0)), offer])
    watches[0].take_here((0, 1))
    watches[0].begin()
    assert signs(watches[0]) == [ITSELF, NOT_WATCHED]
    watches[0].notice(1, "nobody")
    assert watches[0].gone() == {}


def test_an_entrance_that_is_gone(watches: list[Watch]) -> None:
    offers = [watch.offer((0, 0)) for watch in watches]
    (entrance,) = watches[0]._held.entrances
    entrance.close()
    watches[1].take(offers)
    watches[1].take_here((0, 1))
    watches[1].begin()
    assert signs(watches[1]) == [NOT_WATCHED, ITSELF]


@pytest.mark.parametrize("ended", [0, 1])
def test_who_has_ended_before_anybody_has_connected_is_dead(watches: list[Watch], ended: int) -> None:
    """Also where it is the one that would connect."""
    offers = [watch.offer((0, 0)) for watch in watches]
    (entrance,), other = watches[ended]._held.entrances, watches[1 - ended]
    entrance.listener.close()  # as the end of its process does, which leaves the name
    other.take(offers)
    other.take_here((0, 1))
    assert [(rank, gone.sign) for rank, gone in other.dead().items()] == [(ended, BY_ENTRANCE)]
    other.begin()


def test_ends_are_noticed_before_all_have_come_to_the_end_of_the_construction(watches: list[Watch]) -> None:
    offers = [watch.offer((0, 0)) for watch in watches]
    for watch in watches:
        watch.take(offers)
        watch.take_here((0, 1))
    until(lambda: signs(watches[0]) == [ITSELF, BY_PIDFD])
    until(lambda: signs(watches[1]) == [BY_PIDFD, ITSELF])
    watches[0].begin()
