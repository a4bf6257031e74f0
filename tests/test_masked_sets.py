"""Sets of masked ranks: who names the next one."""

from __future__ import annotations

from typing import cast

import pytest

from moe_triton.rendezvous.masked_sets import MaskedSets
from moe_triton.rendezvous.stores import Store
from tests.lost_rules import MemoryStore


def sets_of(store: MemoryStore, rank: int) -> MaskedSets:
    return MaskedSets(lambda: cast(Store, store), 3, rank)


def test_each_set_holds_the_one_before() -> None:
    store = MemoryStore([])
    first, other = sets_of(store, 0), sets_of(store, 1)
    assert first.add([2]) == {2}
    assert other.add([0]) == {0, 2}
    assert first.follow() == {0, 2}
    assert (first.number, other.number) == (2, 2)


@pytest.mark.parametrize("comes", ["before it reads", "between its look and its word"])
def test_of_two_that_miss_each_other_one_goes_on(comes: str) -> None:
    store = MemoryStore([])
    first, other = sets_of(store, 0), sets_of(store, 1)
    if comes == "before it reads":
        first.add([1])
    else:
        store.meanwhile = lambda: first.add([1])
    assert other.add([0]) == {1}
    assert first.follow() == {1}
    assert other.add([0, 2]) == {1}, "who is in a set names nobody"
    assert store.sets == [0b010]
