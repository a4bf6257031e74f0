"""Which ranks share a server."""

from __future__ import annotations

import re
from collections import UserList
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
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


def test_ranks_that_are_left_may_be_numbered_anew() -> None:
    """Server by server: those of one stay neighbours."""
    topology = Topology((2, 2, 1))
    assert topology.left([2, 3, 0, 1]).sizes == (2, 2)
    assert topology.left([4, 1, 3]).sizes == (1, 1, 1)
    assert topology.left([]).sizes == ()
    assert Topology((4,)).left([3, 0, 2]).sizes == (3,)
    with pytest.raises(
        ArgumentError, match=r"ranks_per_server is \[2, 2, 1\], but .* neighbours.*\[0, 2, 1\]"
    ):
        topology.left([0, 2, 1])


@pytest.mark.parametrize(
    ("num_ranks", "given", "usual", "sizes"),
    [
        (16, None, 8, (8, 8)),
        (4, None, 8, (4,)),
        (12, None, 8, (8, 4)),
        (16, None, 0, (16,)),
        (8, 2, 8, (2, 2, 2, 2)),
        (8, 3, 0, (3, 3, 2)),
        (7, 6, 8, (6, 1)),
        (4, 8, 0, (4,)),
        (4, (3, 1), 8, (3, 1)),
    ],
)
def test_sizes_follow_from_what_is_given(
    num_ranks: int, given: Any, usual: int, sizes: tuple[int, ...]
) -> None:
    assert fits(num_ranks, given)
    assert Topology.of(num_ranks, given, usual).sizes == sizes


@pytest.mark.parametrize("given", [(), (4, 5)])
def test_servers_that_do_not_fit_the_group(given: Any) -> None:
    assert not fits(8, given)


class Unreadable(Sequence[int]):
    """A caller's own sequence."""

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("no")

    def __len__(self) -> int:
        return 2


class Endless(Unreadable):
    """One server more for every index."""

    def __getitem__(self, index: Any) -> Any:
        return 1


@pytest.mark.parametrize(
    "given",
    [
        "8",
        b"8",
        bytearray(b"\x02\x02"),
        2.0,
        True,
        np.bool_(True),
        np.float32(2),
        np.array(2),
        torch.tensor(2),
        [2, 2.0],
        [True],
        [[2], [2]],
        [np.array([2])],
        np.array([2.0, 2.0]),
        np.array([[2, 2]]),
        np.array([True, True]),
        torch.empty(2, dtype=torch.int32, device="meta"),
        torch.ones(1025, dtype=torch.int32),
        [torch.tensor(2)],
        [None],
        ["2"],
        {2, 3},
        {2: 3},
        iter([2, 2]),
        object(),
        0,
        -1,
        1025,
        10**5000,
        [1, 0],
        [2, -2],
        [1] * 1025,
        range(2**40),
        Unreadable(),
        Endless(),
    ],
    ids=lambda given: type(given).__name__,
)
def test_numbers_of_ranks_are_integers_that_exist(given: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        check_ranks_per_server(given)
    assert caught.value.argument == "ranks_per_server"
    assert len(str(caught.value)) < 500
    with pytest.raises(ArgumentError, match=r"^ranks_per_server is "):
        Config(4, 1, 32, 1, 4, ranks_per_server=given)  # type: ignore[arg-type]


def test_the_servers_of_the_ranks_are_told_what_is_asked_for() -> None:
    with pytest.raises(ArgumentError) as caught:
        check_ranks_per_server([0, 1, 0, 1])
    assert caught.value.rule == "a server has 1 to 1024 ranks"
    for wrong in ([0, 1, 0, 1], np.array([[2, 2]]), "2,2"):
        with pytest.raises(ArgumentError) as caught:
            check_ranks_per_server(wrong)
        assert caught.value.remedy.startswith("Servers are ranges of consecutive ranks: pass how many ranks")


def test_integers_become_pythons() -> None:
    assert check_ranks_per_server(np.int64(2)) == 2
    assert check_ranks_per_server([np.int32(3), 1]) == (3, 1)
    assert check_ranks_per_server((2, 2)) == check_ranks_per_server(UserList([2, 2])) == (2, 2)
    assert type(check_ranks_per_server(np.int8(2))) is int
    for array in (np.array([3, 1], np.int8), torch.tensor([3, 1])):
        sizes = check_ranks_per_server(array)
        assert sizes == (3, 1)
        assert [type(size) for size in sizes] == [int, int]
    numbers = check_ranks_per_server([np.uint8(2), np.int64(2)])
    assert isinstance(numbers, tuple)
    assert {type(number) for number in numbers} == {int}
    sizes = Config(4, 1, 32, 1, 4, ranks_per_server=[3, 1]).topology.sizes
    assert sizes == (3, 1)


@pytest.mark.parametrize("given", [(4, 5), 0, (), None])
@pytest.mark.parametrize("num_ranks", [0, 8, 2**62])
def test_sizes_that_are_not_checked_have_servers_too(num_ranks: int, given: Any) -> None:
    """Whatever comes in, other rules are about it, and nothing grows with it."""
    topology = Topology.or_usual(num_ranks, None if given == 0 else given, 8)
    assert topology.num_servers == Topology.of(min(max(1, num_ranks), 1024), None, 8).num_servers


@pytest.mark.parametrize(
    ("sizes", "ranks", "said"),
    [
        ((4,), [0, 1, 3], "rank(s) [0, 1, 3]"),
        ((4,), [0, 1, 2, 3], "rank(s) [0, 1, 2, 3]"),
        ((4, 4), [4, 5, 6, 7], "server 1 (ranks 4 to 7)"),
        ((4, 4), [7, 5, 4, 6], "server 1 (ranks 4 to 7)"),
        ((4, 4), [4, 5, 6], "rank(s) [4, 5, 6] of server 1 (ranks 4 to 7)"),
        ((4, 4), [1, 4, 5, 6, 7], "rank(s) [1] of server 0 (ranks 0 to 3) and server 1 (ranks 4 to 7)"),
        ((3, 1), [3], "server 1 (rank 3)"),
        ((3, 1), [0, 3], "rank(s) [0] of server 0 (ranks 0 to 2) and server 1 (rank 3)"),
        ((2, 2, 2), [2, 3, 4, 5], "server 1 (ranks 2 to 3) and server 2 (ranks 4 to 5)"),
        ((2, 2), [1, 2], "rank(s) [1] of server 0 (ranks 0 to 1) and rank(s) [2] of server 1 (ranks 2 to 3)"),
        ((2, 2), [], "rank(s) []"),
        ((2, 2), [9], "rank(s) [9]"),
    ],
)
def test_ranks_in_words(sizes: tuple[int, ...], ranks: list[int], said: str) -> None:
    assert Topology(sizes).in_words(ranks) == said


@given(SIZES, st.data())
def test_no_rank_is_left_out_of_words(sizes: tuple[int, ...], data: st.DataObject) -> None:
    topology = Topology(sizes)
    ranks = sorted(data.draw(st.sets(st.sampled_from(range(sum(sizes))))))
    said, named = topology.in_words(ranks), set()
    for found in re.finditer(r"(?<!of )server (\d+) \(", said):
        named |= set(topology.ranks_on(int(found[1])))
    for found in re.finditer(r"\[([\d, ]*)\]", said):
        named |= {int(number) for number in found[1].split(",") if number.strip()}
    assert sorted(named) == ranks
