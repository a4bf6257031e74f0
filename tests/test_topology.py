"""Which ranks share a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.core.topology import Topology, check_ranks_per_server, fits

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


@given(SIZES)
def test_every_rank_is_on_one_server(sizes: tuple[int, ...]) -> None:
    topology = Topology.of(sum(sizes), sizes, 0)
    assert topology.num_servers == len(sizes)
    ranks = [rank for server in range(len(sizes)) for rank in topology.ranks_on(server)]
    assert ranks == list(range(sum(sizes)))
    assert [topology.servers[rank] for rank in topology.ranks_on(0)] == [0] * sizes[0]
    for rank in ranks:
        assert rank in topology.neighbours(rank)
        assert rank in topology.rail(rank)


@given(SIZES)
def test_rails_are_the_ranks_of_the_same_number(sizes: tuple[int, ...]) -> None:
    topology = Topology(sizes)
    for rank in range(sum(sizes)):
        number = rank - topology.neighbours(rank).start
        assert all(other - topology.neighbours(other).start == number for other in topology.rail(rank))
        assert len(topology.rail(rank)) == sum(size > number for size in sizes)


@given(SIZES, st.data())
def test_what_is_left_keeps_its_neighbours(sizes: tuple[int, ...], data: st.DataObject) -> None:
    topology, ranks = Topology(sizes), range(sum(sizes))
    members = sorted(data.draw(st.sets(st.sampled_from(ranks), min_size=1)))
    left = topology.left(members)
    assert sum(left.sizes) == len(members)
    for new, old in enumerate(members):
        neighbours = [members[other] for other in left.neighbours(new)]
        assert neighbours == [rank for rank in topology.neighbours(old) if rank in members]


@pytest.mark.parametrize(
    ("num_ranks", "given", "usual", "sizes"),
    [
        (16, None, 8, (8, 8)),
        (4, None, 8, (4,)),
        (12, None, 8, (8, 4)),
        (16, None, 0, (16,)),
        (8, 2, 8, (2, 2, 2, 2)),
        (4, 8, 0, (4,)),
        (4, (3, 1), 8, (3, 1)),
    ],
)
def test_sizes_follow_from_what_is_given(
    num_ranks: int, given: Any, usual: int, sizes: tuple[int, ...]
) -> None:
    assert fits(num_ranks, given)
    assert Topology.of(num_ranks, given, usual).sizes == sizes


@pytest.mark.parametrize("given", [3, (), (4, 5)])
def test_servers_that_do_not_fit_the_group(given: Any) -> None:
    assert not fits(8, given)


@pytest.mark.parametrize(
    "given", ["8", b"8", 2.0, True, [2, 2.0], [True], {2, 3}, object(), 0, -1, 1025, [1, 0]]
)
def test_numbers_of_ranks_are_integers_that_exist(given: object) -> None:
    with pytest.raises(ArgumentError, match="ranks_per_server"):
        check_ranks_per_server(given)


def test_integers_become_pythons() -> None:
    assert check_ranks_per_server(np.int64(2)) == 2
    assert check_ranks_per_server([np.int32(3), 1]) == (3, 1)
    sizes = Config(4, 1, 32, 1, 4, ranks_per_server=[3, 1]).topology.sizes
    assert sizes == (3, 1)
