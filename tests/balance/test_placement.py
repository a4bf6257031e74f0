"""`Placement`, its tables, and the loads of ranks under it."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.balance import Placement, rank_loads, rank_loads_by_source, skew
from moe_triton.core.errors import ArgumentError
from moe_triton.core.replicas import COUNTED_BY, REPLICA_BY
from tests.balance.plain import loads_of_ranks, on_ranks, random_placement

# Two layers of 4 experts on 3 ranks of 2 slots.
SMALL = Placement(torch.tensor([[0, 1, 2, 3, 0, 1], [3, 0, 1, 0, 2, 0]]), 4, 3)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    experts, ranks, shared = draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.integers(0, 2))
    per_rank = -(-experts // ranks) + draw(st.integers(0, 2))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    return random_placement(random, draw(st.integers(1, 3)), experts, per_rank, ranks + shared, shared)


@settings(max_examples=60)
@given(placements())
def test_the_tables_hold_the_slots_of_each_expert(placement: Placement) -> None:
    rank = placement.num_ranks - 1
    for layer, experts in enumerate(placement.phy2log.tolist()):
        slots = [[p for p, held in enumerate(experts) if held == e] for e in range(placement.num_experts)]
        assert [[p for p in row if p >= 0] for row in placement.log2phy[layer].tolist()] == slots
        assert placement.logcnt[layer].tolist() == list(map(len, slots))
        most = max(map(len, slots))
        for columns in (None, most + 3):
            table = placement.table(layer, columns)
            wide = most if columns is None else most + 2
            assert table.dtype == torch.int32
            assert table.tolist() == [[len(row), *row, *[-1] * (wide - len(row))] for row in slots]
        routes = placement.routing_table(layer, rank)
        assert routes.dtype == torch.int32
        assert routes.shape == (1024, placement.num_experts)
        for row in (0, 1, 1023):
            wanted = [found[(row + rank + e) % len(found)] for e, found in enumerate(slots)]
            assert routes[row].tolist() == wanted
    assert placement.log2phy.shape[2] == placement.logcnt.max()


@settings(max_examples=60)
@given(placements(), st.data())
def test_tables_leave_out_the_slots_of_masked_ranks(placement: Placement, data: st.DataObject) -> None:
    mask = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=placement.num_ranks, max_size=placement.num_ranks))
    )
    mask = mask.to(torch.int32)
    for layer, experts in enumerate(placement.phy2log.tolist()):
        slots = [
            [p for p, held in enumerate(experts) if held == e and not mask[placement.rank_of(p)]]
            for e in range(placement.num_experts)
        ]
        if not all(slots):
            expert = slots.index([])
            for call in (placement.table, partial(placement.routing_table, ep_rank=0)):
                with pytest.raises(
                    ArgumentError, match=f"the only ones with expert {expert} in layer {layer}"
                ):
                    call(layer, mask=mask)
            continue
        table = placement.table(layer, mask=mask)
        assert table.shape == placement.table(layer).shape
        assert table.tolist() == [[len(row), *row, *[-1] * (table.shape[1] - 1 - len(row))] for row in slots]
        routes = placement.routing_table(layer, 0, 5, mask)
        for row in range(5):
            assert routes[row].tolist() == [found[(row + e) % len(found)] for e, found in enumerate(slots)]


@settings(max_examples=60)
@given(placements(), st.integers(0, 99))
def test_loads_of_ranks_are_those_of_their_slots(placement: Placement, seed: int) -> None:
    random = np.random.default_rng(seed)
    weight = random.integers(100, size=(placement.num_layers, placement.num_experts))
    loads = rank_loads(placement, torch.from_numpy(weight))
    assert loads.numpy() == pytest.approx(np.array(loads_of_ranks(placement, weight)))
    assert loads.shape == (placement.num_layers, placement.num_ranks)
    assert loads.dtype == torch.float64


@settings(max_examples=60)
@given(placements(), st.integers(0, 99))
def test_rows_by_source_go_where_the_table_says(placement: Placement, seed: int) -> None:
    random, ranks = np.random.default_rng(seed), placement.num_ranks
    counts = random.integers(100, size=(placement.num_layers, ranks, placement.num_experts))
    expected = np.zeros((placement.num_layers, ranks))
    for layer in range(placement.num_layers):
        table = placement.table(layer).tolist()
        for source in range(ranks):
            for expert, (count, *slots) in enumerate(table):
                slot = slots[source // -(-ranks // count)]
                expected[layer, placement.rank_of(slot)] += counts[layer, source, expert]
    assert np.array_equal(rank_loads_by_source(placement, counts).numpy(), expected)
    alike = np.repeat(counts[:, :1], ranks, axis=1)
    by_rank = rank_loads(placement, alike.sum(axis=1), "rank")
    assert torch.allclose(by_rank, rank_loads_by_source(placement, alike))


def test_the_modes_by_which_loads_are_known_are_words_of_dispatch() -> None:
    assert COUNTED_BY == REPLICA_BY[: len(COUNTED_BY)] == ("rank", "token")  # kernels go by the numbers


def test_slots_are_on_ranks_behind_those_of_shared_experts() -> None:
    placement = dataclasses.replace(SMALL, num_ranks=5, num_shared_ranks=2, allow_repeats=True)
    assert placement.ranks.tolist() == [2, 2, 3, 3, 4, 4]
    assert [placement.rank_of(slot) for slot in range(6)] == [2, 2, 3, 3, 4, 4]
    assert on_ranks(placement, 0) == [[], [], [0, 1], [2, 3], [0, 1]]
    loads = rank_loads(placement, torch.ones(2, 4))
    assert loads[0].tolist() == [0, 0, 1, 2, 1]
    assert skew(loads, 2).tolist() == [1.5, 1]
    assert skew(torch.zeros(1, 5), 2).tolist() == [1]


def test_the_initial_placement_is_vllms() -> None:
    placement = Placement.initial(2, 5, 8, 4)
    assert placement.phy2log.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]] * 2
    assert placement.repeats() == []
    with pytest.raises(ArgumentError, match="num_replicas is 4, but it must be at least 5"):
        Placement.initial(2, 5, 4, 4)


def test_a_placement_is_a_value() -> None:
    ids = torch.tensor([[0, 1, 0, 1]], dtype=torch.int32)
    placement = Placement(ids, 2, 2)
    ids[0, 0] = 1
    assert placement.phy2log.tolist() == [[0, 1, 0, 1]]
    assert placement.phy2log.dtype == torch.int64
    same = Placement(placement.phy2log.numpy(), np.int32(2), np.int64(2))  # type: ignore[arg-type]
    assert same == placement
    assert hash(same) == hash(placement)
    assert same != Placement(placement.phy2log, 2, 4)
    assert same != Placement(placement.phy2log, 2, 3, 1)
    assert same != ids
    with pytest.raises(dataclasses.FrozenInstanceError):
        placement.num_ranks = 3  # type: ignore[misc]


def test_an_expert_that_is_on_a_rank_twice_is_named() -> None:
    repeated = [[0, 1, 2, 3, 0, 1], [1, 2, 0, 0, 3, 3]]
    assert Placement(torch.tensor(repeated), 4, 4, 1).repeats() == [(1, 2, 0), (1, 3, 3)]
    with pytest.raises(ArgumentError, match=r"expert 0 twice on rank 2 in layer 1.*refine_placement"):
        Placement(torch.tensor(repeated), 4, 4, 1, allow_repeats=False)


IDS = SMALL.phy2log
ONES = torch.ones(2, 4, dtype=torch.float64)
WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "none": ((None, 4, 3), "phy2log is None"),
    "floats": ((IDS.float(), 4, 3), "phy2log is of dtype float32, but ids must be integers"),
    "one layer": ((IDS[0], 4, 3), r"phy2log is of shape \(6,\)"),
    "too high": (
        (IDS, 3, 3),
        "phy2log is 3 in slot 3 of layer 0, on rank 1, but experts are numbered 0 to 2",
    ),
    "negative": ((IDS - 1, 4, 3), "phy2log is -1 in slot 0 of layer 0, on rank 0"),
    "left out": ((IDS, 5, 3), "a placement without expert 4 in layer 0, but every expert must have a slot"),
    "more experts than slots": ((IDS, 7, 3), "num_experts is 7, but phy2log has 6 slots"),
    "uneven": ((IDS, 4, 4), "phy2log is of 6 slots, but the 4 ranks of routed experts must have as many"),
    "all shared": ((IDS, 4, 3, 3), "num_shared_ranks is 3, but of 3 ranks at least one"),
    "no ranks": ((IDS, 4, 0), "num_ranks is 0, but it must be at least 1"),
    "bool": ((IDS, True, 3), r"num_experts is True \(a bool\), but it must be an integer"),
    "flag": ((IDS, 4, 3, 0, "no"), "allow_repeats is 'no', but it must be True or False"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_placement_is_refused(name: str) -> None:
    arguments, said = WRONG[name]
    with pytest.raises(ArgumentError, match=said):
        Placement(*arguments)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: SMALL.table(2), "layer is 2, but layers are 0 to 1"),
        (lambda: SMALL.table(1, 3), "num_columns is 3, but expert 0 has 3 replicas in layer 1. Pass 4 or"),
        (lambda: SMALL.routing_table(0, 3), "ep_rank is 3, but ranks are 0 to 2"),
        (lambda: SMALL.routing_table(-1, 0), "layer is -1, but it must be at least 0"),
        (lambda: SMALL.routing_table(0, 0, 0), "num_rows is 0"),
        (
            lambda: SMALL.table(0, mask=torch.tensor([0, 1, 0], dtype=torch.int32)),
            r"mask is 1 for rank\(s\) \[1\], the only ones with expert 2 in layer 0, but every expert must",
        ),
        (lambda: SMALL.table(0, mask=torch.zeros(2).int()), r"mask is of shape \(2,\).*must be \(3\)"),
        (lambda: SMALL.table(0, mask=torch.arange(3).int()), r"mask is \[0, 1, 2\], but it must have 1 for"),
        (lambda: SMALL.table(0, mask=torch.zeros(3)), "mask is of dtype torch.float32"),
        (lambda: SMALL.routing_table(0, 0, mask=[0, 0, 0]), "mask is .* but it must be a torch.Tensor"),
        (lambda: rank_loads(SMALL, torch.ones(2, 5)), r"weight is of shape \(2, 5\).*must be \(2, 4\)"),
        (lambda: rank_loads(SMALL, -torch.ones(2, 4)), "weight is -1.0 for expert 0 in layer 0"),
        (lambda: rank_loads(SMALL, torch.ones(2, 4), "expert"), "mode is 'expert', but it must be one of"),
        (lambda: rank_loads_by_source(SMALL, torch.ones(2, 4)), r"counts is of shape \(2, 4\)"),
        (lambda: rank_loads_by_source(SMALL, torch.ones(2, 4, 4)), r"must be \(2, 3, 4\)"),
        (lambda: SMALL.table(0, 10**12), "num_columns is 10+ .*may be 16777216 at most"),
        (lambda: SMALL.routing_table(0, 0, 10**12), "num_rows is 10+ .*may be 16777216 at most"),
        (lambda: Placement(IDS, 4, 10**12, 10**12 - 3), "num_ranks is 10+ .*may be 33554432 at most"),
        (lambda: Placement.initial(1, 4, 10**12, 1), "num_replicas is 10+ .*at most"),
        (lambda: Placement.initial(10**12, 4, 6, 3), "num_layers is 10+ .*at most"),
        (lambda: rank_loads(None, ONES), "placement is None, but it must be a Placement. Pass"),
        (lambda: rank_loads(IDS, ONES), r"placement is tensor[^$]*\(a Tensor\), but it must be a Placement"),
        (lambda: rank_loads_by_source(None, ONES), "placement is None, but it must be a Placement"),
        (lambda: skew(None), "loads is None, but it is needed"),
        (lambda: skew(SMALL), r"loads is .*\(a Placement\), but it must be a torch.Tensor"),
        (lambda: rank_loads(SMALL, ONES * 1e308), "weight is inf in all in layer 0, but the loads of a"),
        (lambda: rank_loads_by_source(SMALL, np.full((2, 3, 4), 1e308)), "counts is inf in all"),
        (lambda: skew(ONES * 1e308), "loads is inf in all in layer 0"),
        (lambda: skew(torch.ones(1, 2), 2), "num_shared_ranks is 2, but there are 2 ranks in all"),
    ],
)
def test_what_a_placement_does_not_have_is_refused(call: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        call()
