"""Who stands in for whom."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core.topology import Topology
from moe_triton.runtime.masks import StandIn
from moe_triton.runtime.stand_ins import StandIns, assigned

TOPOLOGIES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(lambda sizes: Topology(tuple(sizes)))


def histories(topology: Topology) -> st.SearchStrategy[list[list[int]]]:
    """Ranks that are lost one after the other, some at once."""
    ranks = st.sampled_from(range(len(topology.servers)))
    return st.lists(st.lists(ranks, min_size=1, max_size=3), min_size=1, max_size=6)


def behind(topology: Topology, rank: int) -> list[int]:
    """The other ranks of its server, from the next one on, and behind the last one the first."""
    own = topology.neighbours(rank)
    return [own.start + (rank - own.start + step) % len(own) for step in range(1, len(own))]


def check(
    topology: Topology,
    before: Mapping[int, StandIn],
    masked: Collection[int],
    since: int,
    made: Mapping[int, StandIn],
) -> None:
    """Raises unless these stand in who have to, for nobody else."""
    place = {each.rank: lost for lost, each in made.items()}
    assert len(place) == len(made), "one stands in for two"
    assert not set(place) & set(masked), "one that is masked stands in"
    assert set(made) <= set(masked), "one stands in for a rank that is not masked"
    kept = {lost for lost, each in before.items() if lost in masked and each.rank not in masked}
    for lost in masked:
        if lost in kept:
            assert made[lost] == before[lost]
            continue
        passed_by = behind(topology, lost)
        if lost in made:
            assert made[lost].since == since
            passed_by = passed_by[: passed_by.index(made[lost].rank)]
        for rank in passed_by:
            assert rank in masked or place[rank] in kept or place[rank] < lost, f"{rank} would stand in"


@given(TOPOLOGIES, st.data())
def test_each_lost_rank_has_the_next_that_is_free(topology: Topology, data: st.DataObject) -> None:
    before: dict[int, StandIn] = {}
    masked: set[int] = set()
    for since, lost in enumerate(data.draw(histories(topology))):
        masked.update(lost)
        made = assigned(topology, before, frozenset(masked), since)
        check(topology, before, masked, since, made)
        before = made


@given(TOPOLOGIES, st.data())
def test_whoever_comes_back_needs_nobody(topology: Topology, data: st.DataObject) -> None:
    ranks = st.sets(st.sampled_from(range(len(topology.servers))))
    before = assigned(topology, {}, data.draw(ranks), 3)
    masked = data.draw(ranks)
    check(topology, before, masked, 5, assigned(topology, before, masked, 5))


@given(TOPOLOGIES, st.data())
def test_all_ranks_find_the_same(topology: Topology, data: st.DataObject) -> None:
    """Whatever order they have learned of it in; and the same again: what they pass is left as it is."""
    first, *more = data.draw(histories(topology))
    before = assigned(topology, {}, first, 1)
    given_before = dict(before)
    masked = data.draw(st.permutations(sorted({*first, *(rank for lost in more for rank in lost)})))
    made = assigned(topology, before, masked, 2)
    assert before == given_before
    turned = {lost: before[lost] for lost in data.draw(st.permutations(sorted(before)))}
    assert assigned(Topology(topology.sizes), turned, frozenset(masked), 2) == made
    assert assigned(topology, made, masked, 3) == made


def test_a_stand_in_that_is_lost_has_one_itself() -> None:
    """The two that it was for have others from then on, and a pair on another server stays as it is."""
    topology = Topology((4, 2))
    first = assigned(topology, {}, {1, 5}, 10)
    assert first == {1: StandIn(2, 10), 5: StandIn(4, 10)}
    second = assigned(topology, first, {1, 2, 5}, 20)
    assert second == {1: StandIn(3, 20), 2: StandIn(0, 20), 5: StandIn(4, 10)}
    assert assigned(topology, second, {0, 1, 2, 5}, 30) == {1: StandIn(3, 20), 5: StandIn(4, 10)}


def test_the_first_rank_is_behind_the_last() -> None:
    assert assigned(Topology((2, 3)), {}, {4}, 7) == {4: StandIn(2, 7)}


def test_a_rank_alone_on_its_server_has_nobody() -> None:
    assert assigned(Topology((1, 2)), {}, {0}, 7) == {}


def test_a_call_that_wakes_late_leaves_the_next_agreement_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the one that follows others has ended the first, and promised something in the next."""
    first, second = mock.Mock(is_settled=True, at=None), mock.Mock(is_settled=False)
    owner = mock.Mock(num_dispatches=lambda: 5)
    made = StandIns(*[mock.Mock() for _ in range(7)], timeout_s=1.0, owner=owner)
    made._start, made._promise = first, (first, 3)

    def wait(start: object) -> None:
        assert start is first
        made._start, made._promise = second, (second, 9)

    monkeypatch.setattr(made, "_wait_for", wait)
    made.before_dispatch()
    assert made._start is second
    assert made._promise == (second, 9)
