"""How far ranks are from each other."""

from __future__ import annotations

import pytest

from autotune.model.constants import machine_named
from autotune.model.topology import hop_us, tiers, tiers_between
from moe_triton.core.errors import ArgumentError


def test_a3_has_dies_cards_and_nodes() -> None:
    found = tiers("A3", 40, rank=17)
    assert found[17] == "self"
    assert found[16] == "sibling"
    assert set(found[18:32]) == {"node"}
    assert set(found[:16] + found[32:]) == {"far"}


def test_a2_has_servers_of_eight_cards() -> None:
    found = tiers("A2", 24, rank=8)
    assert found[8] == "self"
    assert set(found[9:16]) == {"node"}
    assert set(found[:8] + found[16:]) == {"network"}


@pytest.mark.parametrize("product", ["A2", "A3"])
def test_as_far_there_as_back(product: str) -> None:
    table = [tiers(product, 36, rank) for rank in range(36)]
    assert table == list(zip(*table, strict=True))


def test_servers_may_have_different_numbers_of_ranks() -> None:
    assert tiers_between((0, 1, 1, 1), 2) == ("network", "node", "self", "node")
    assert tiers_between((0,) * 8 + (1,) * 8, 3) == tiers("A2", 16, 3)


@pytest.mark.parametrize("product", ["A2", "A3"])
def test_each_tier_is_farther_than_the_one_before(product: str) -> None:
    machine = machine_named(product)
    farther = ["self", "sibling", "node", "far"] if product == "A3" else ["self", "node", "network"]
    hops = [hop_us(machine, tier) for tier in farther]
    assert hops[0] == 0
    assert hops == sorted(hops)
    assert set(tiers(product, 36, 0)) == set(farther)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("product", lambda: tiers("A5", 8, 0)),
        ("rank", lambda: tiers("A3", 8, 8)),
        ("tier", lambda: hop_us(machine_named("A3"), "moon")),
        ("tier", lambda: hop_us(machine_named("A2"), "far")),
    ],
)
def test_what_is_not_there_is_refused(argument: str, call) -> None:
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.argument == argument
