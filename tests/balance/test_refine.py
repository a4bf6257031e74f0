"""`refine_placement`: what it changes, what it leaves, and whether that pays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.balance import (
    MovePrice,
    Placement,
    Refinement,
    rank_loads,
    rank_loads_by_source,
    rebalance_experts,
    refine_placement,
    skew,
)
from moe_triton.core.errors import ArgumentError
from moe_triton.core.replicas import COUNTED_BY
from tests.balance.plain import on_ranks, random_placement, zipf


@st.composite
def cases(draw: st.DrawFn) -> tuple[Placement, torch.Tensor]:
    ranks, shared, per_rank = draw(st.integers(1, 6)), draw(st.integers(0, 2)), draw(st.integers(1, 5))
    experts = draw(st.integers(per_rank, per_rank * ranks))
    layers, random = draw(st.integers(1, 3)), np.random.default_rng(draw(st.integers(0, 999)))
    placement = random_placement(random, layers, experts, per_rank, ranks + shared, shared)
    weight = random.integers(draw(st.sampled_from([1, 3, 1000])), size=(layers, experts))
    return placement, torch.from_numpy(weight)


MODES = st.sampled_from(COUNTED_BY)


def copied(before: Placement, after: Placement) -> set[tuple[int, int, int]]:
    """Layer, rank and expert of each copy on a rank that did not hold the expert."""
    return {
        (layer, rank, expert)
        for layer in range(before.num_layers)
        for rank, experts in enumerate(on_ranks(after, layer))
        for expert in set(experts) - set(on_ranks(before, layer)[rank])
    }


def check(
    found: Refinement, before: Placement, weight: torch.Tensor, expert_bytes: int, mode: str = "token"
) -> None:
    """What holds for every result."""
    after = found.placement
    assert (after.num_experts, after.num_ranks, after.num_shared_ranks) == (
        before.num_experts,
        before.num_ranks,
        before.num_shared_ranks,
    )
    moves = {(move.layer, after.rank_of(move.target), move.expert) for move in found.moved}
    assert moves == copied(before, after)
    assert len(found.moved) == len(moves)
    assert found.moved_bytes == expert_bytes * len(moves)
    slots = before.phy2log.clone()
    for move in found.moved:
        assert before.phy2log[move.layer, move.source] == move.expert
        slots[move.layer, move.target] = move.expert
    # What is copied is all that changes: whatever else a rank holds is where it was.
    assert torch.equal(slots, after.phy2log)
    assert set(after.repeats()) <= set(before.repeats())
    assert torch.equal(found.loads_before, rank_loads(before, weight, mode))
    assert torch.equal(found.loads_after, rank_loads(after, weight, mode))


@settings(max_examples=40)
@given(cases(), MODES)
def test_without_limits_it_repairs_and_never_loads_a_rank_more(
    case: tuple[Placement, torch.Tensor], mode: str
) -> None:
    before, weight = case
    found = refine_placement(before, weight, expert_bytes=7, enough_skew=1.0, mode=mode)
    check(found, before, weight, 7, mode)
    assert found.placement.repeats() == []
    if not before.repeats():
        worst = found.loads_before.max(dim=1).values
        assert bool((found.loads_after.max(dim=1).values <= worst * (1 + 1e-9)).all())
    again = refine_placement(found.placement, weight, enough_skew=1.0, mode=mode)
    assert again.loads_after.max() <= found.loads_after.max() * (1 + 1e-9)


@settings(max_examples=40)
@given(cases(), st.integers(0, 12))
def test_no_more_bytes_move_than_may(case: tuple[Placement, torch.Tensor], copies: int) -> None:
    before, weight = case
    found = refine_placement(before, weight, expert_bytes=10, max_moved_bytes=10 * copies + 9)
    check(found, before, weight, 10)
    assert found.moved_bytes <= 10 * copies
    if copies == 0:
        assert found.placement is before
    left, free = set(found.placement.repeats()), refine_placement(before, weight, expert_bytes=10)
    if left:  # repairs come first
        assert copies < len(free.moved)
    if free.moved_bytes <= 10 * copies:
        assert left == set()


@settings(max_examples=30)
@given(cases(), st.sampled_from([1e-3, 1.0, 1e3, 1e6]), MODES)
def test_what_moves_pays(case: tuple[Placement, torch.Tensor], num_steps: float, mode: str) -> None:
    before, weight = case
    price = MovePrice(seconds_per_row=1e-3, bytes_per_second=100, num_steps=num_steps, counted_steps=10)
    found = refine_placement(before, weight, expert_bytes=10, price=price, mode=mode)
    check(found, before, weight, 10, mode)
    assert found.saved_s is not None
    assert found.move_s is not None
    worst_before, worst = (loads.max(dim=1).values for loads in (found.loads_before, found.loads_after))
    saved = float((worst_before - worst).sum()) * 1e-3 * num_steps / 10
    assert found.saved_s == pytest.approx(saved, abs=1e-6 * num_steps)
    received = torch.zeros(before.num_layers, before.num_ranks)
    for move in found.moved:
        received[move.layer, before.rank_of(move.target)] += 10
    assert found.move_s == pytest.approx(float(received.max(dim=1).values.sum()) / 100)
    if found.placement is before:
        assert found.saved_s == found.move_s == 0
    else:
        assert found.saved_s > found.move_s


def test_what_does_not_pay_stays_with_experts_that_are_twice_on_a_rank() -> None:
    before = Placement(torch.tensor([[0, 0, 1, 2]]), 3, 2)
    weight = torch.tensor([[10, 5, 5]])
    dear = MovePrice(seconds_per_row=1e-6, bytes_per_second=1, num_steps=1)
    found = refine_placement(before, weight, expert_bytes=100, price=dear)
    assert found.placement is before
    assert found.moved == ()
    assert refine_placement(before, weight).placement.repeats() == []


def test_it_is_the_same_on_every_rank_whatever_loads_are_counted_in() -> None:
    """Of another unit, dtype, or more layers: a rank that reads its own file finds the same."""
    before = Placement.initial(3, 32, 40, 8)
    weight = torch.from_numpy(zipf(3, 32, 1.0, seed=3))
    found = refine_placement(before, weight)
    for same in (weight.double() / 1024, weight.numpy(), weight.to(torch.float32)):
        assert refine_placement(before, same).placement == found.placement
    assert refine_placement(before, weight).moved == found.moved


def test_a_balanced_placement_stays() -> None:
    before = Placement.initial(2, 16, 16, 4)
    found = refine_placement(before, torch.ones(2, 16))
    assert found.placement is before
    assert found.moved_bytes == 0
    assert refine_placement(before, torch.zeros(2, 16)).placement is before
    # Nearly balanced is good enough, unless it is not.
    nearly = torch.ones(2, 16)
    nearly[0, 0] = 1.04
    assert refine_placement(before, nearly).placement is before


# EP 16, 256 experts, 320 replicas; loads that are twice the mean on a rank without balance.
def test_known_loads_of_twice_the_mean_are_balanced() -> None:
    weight = zipf(4, 256, 0.75, seed=5)
    before = Placement.initial(4, 256, 320, 16)
    unbalanced = skew(rank_loads(Placement.initial(4, 256, 256, 16), weight))
    assert 1.7 < float(unbalanced.mean()) < 2.6
    anew = Placement(rebalance_experts(weight, 320, 1, 1, 16).phy2log, 256, 16)
    refined = refine_placement(before, weight)
    assert float(skew(rank_loads(anew, weight)).max()) <= 1.15
    assert float(skew(refined.loads_after).max()) <= 1.15
    # As dispatched by ranks, each of which has its own share of every expert.
    by_rank = refine_placement(before, weight, mode="rank")
    random = np.random.default_rng(7)
    counts = random.multinomial(weight, [1 / 16] * 16).transpose(0, 2, 1)
    assert float(skew(rank_loads_by_source(by_rank.placement, counts)).max()) <= 1.15
    # A tenth of the copies that a placement made anew moves, for the same.
    few = refine_placement(before, weight, max_moved_bytes=len(copied(before, anew)) // 10)
    assert float(skew(few.loads_after).max()) <= 1.15


@pytest.mark.parametrize(
    ("experts", "replicas", "ranks", "exponent"),
    [(256, 320, 64, 0.8), (256, 320, 64, 1.2), (256, 288, 32, 1.0), (64, 72, 8, 1.2)],
)
def test_it_comes_near_to_a_placement_made_anew(
    experts: int, replicas: int, ranks: int, exponent: float
) -> None:
    """From the initial placement, which has eight times the mean on a rank and more; and in fewer moves."""
    weight = zipf(2, experts, exponent, seed=1)
    before = Placement.initial(2, experts, replicas, ranks)
    anew = Placement(rebalance_experts(weight, replicas, 1, 1, ranks).phy2log, experts, ranks)
    found = refine_placement(before, weight)
    assert float(skew(found.loads_after).max()) <= float(skew(rank_loads(anew, weight)).max()) + 0.03
    assert found.moved_bytes < 0.8 * len(copied(before, anew))


def test_what_a_published_placement_has_twice_on_a_rank_is_repaired() -> None:
    weight = zipf(4, 256, 1.0, seed=2)
    anew = Placement(rebalance_experts(weight, 320, 1, 1, 16).phy2log, 256, 16)
    assert anew.repeats()
    found = refine_placement(anew, weight)
    check(found, anew, weight=torch.from_numpy(weight), expert_bytes=1)
    assert found.placement.repeats() == []
    assert float(skew(found.loads_after).max()) < 1.03


def test_ranks_that_each_send_to_one_replica_are_balanced_as_they_send() -> None:
    """An even split is not what they do: 3, 5 or 7 replicas of an expert get different numbers of rows."""
    weight = zipf(2, 256, 1.2, seed=1)
    before = Placement.initial(2, 256, 320, 16)
    by_token, by_rank = (refine_placement(before, weight, mode=mode) for mode in ("token", "rank"))
    assert float(skew(rank_loads(by_token.placement, weight, "rank")).min()) > 1.15
    assert float(skew(by_rank.loads_after).max()) < 1.03


def test_more_bytes_balance_more() -> None:
    weight = zipf(4, 64, 1.0, seed=4)
    before = Placement.initial(4, 64, 80, 8)
    worst = []
    for copies in (0, 4, 16, 64):
        found = refine_placement(before, weight, expert_bytes=3, max_moved_bytes=3 * copies)
        assert found.moved_bytes <= 3 * copies
        worst.append(float(found.loads_after.max(dim=1).values.sum()))
    assert worst == sorted(worst, reverse=True)
    assert worst[1] < 0.9 * worst[0]


def test_copies_come_from_the_same_server_where_they_can() -> None:
    weight = torch.from_numpy(zipf(3, 32, 1.1, seed=6))
    before = Placement.initial(3, 32, 48, 8)
    found = refine_placement(before, weight, expert_bytes=5, ranks_per_server=4)
    between = 0
    for move in found.moved:
        holders = before.log2phy[move.layer, move.expert]
        servers = {before.rank_of(slot) // 4 for slot in holders.tolist() if slot >= 0}
        source, target = (before.rank_of(slot) // 4 for slot in (move.source, move.target))
        assert source == target or target not in servers
        between += 5 * (source != target)
    assert found.moved_bytes_between_servers == between > 0
    assert refine_placement(before, weight).moved_bytes_between_servers == 0


SMALL = Placement.initial(1, 4, 6, 3)
ONES = torch.ones(1, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weight": torch.ones(2, 4)}, r"weight is of shape \(2, 4\)"),
        ({"weight": ONES * torch.nan}, "weight is nan for expert 0 in layer 0"),
        ({"expert_bytes": 0}, "expert_bytes is 0"),
        ({"max_moved_bytes": -1}, "max_moved_bytes is -1"),
        ({"max_moved_bytes": 1.5}, "max_moved_bytes is 1.5 .*must be an integer"),
        ({"enough_skew": 0.9}, "enough_skew is 0.9, but no rank has less"),
        ({"price": 1.0}, r"price is a float, but it must be a MovePrice or None"),
        ({"mode": "expert"}, r"mode is 'expert', but it must be one of \['rank', 'token'\]"),
        ({"ranks_per_server": [2, 2]}, r"ranks_per_server is \(2, 2\), but it must be of 3 ranks in all"),
        ({"placement": None}, "placement is None, but it must be a Placement"),
        ({"placement": "initial"}, "placement is 'initial', but it must be a Placement"),
        ({"expert_bytes": 10**400}, "expert_bytes is .*may be 281474976710656 at most"),
        ({"price": MovePrice(1e300, 1, 1e8)}, "price is MovePrice.*must be finite times. Pass seconds"),
        ({"price": MovePrice(1, 1e-308, 1), "expert_bytes": 1 << 40}, "price is MovePrice.* finite times"),
        ({"placement": Placement.initial(1, 4, 6, 1)}, "a rank of it has 6 slots for 4 experts"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        refine_placement(**{"placement": SMALL, "weight": torch.tensor([[1.0, 1, 9, 9]]), **options})


@pytest.mark.parametrize("name", ["seconds_per_row", "bytes_per_second", "num_steps", "counted_steps"])
def test_prices_are_positive(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name} is 0.0, but it must be positive"):
        MovePrice(**{"seconds_per_row": 1, "bytes_per_second": 1, "num_steps": 1, name: 0})


@pytest.mark.parametrize("price", [(1e200, 1.0, 1e200), (1e200, 1.0, 1e100, 1e-200)])
def test_what_a_row_saves_is_finite(price: tuple[float, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"num_steps is 1e.*counted_steps, must be a finite time. Pass"):
        MovePrice(*price)
