"""`rebalance_experts`: that it is EPLB's algorithm."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.balance import Placement, rank_loads, rebalance_experts, skew
from moe_triton.core.errors import ArgumentError
from tests.balance.plain import rebalance_layer, zipf
from tests.patience import seconds

# The example in the README of deepseek-ai/EPLB (d52c72d), and what it prints.
PUBLISHED = torch.tensor(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
SIZES = 16, 4, 2, 8
PRINTED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_the_published_example_comes_out_as_printed() -> None:
    found = rebalance_experts(PUBLISHED, *SIZES)
    assert found.phy2log.tolist() == PRINTED
    assert [tensor.dtype for tensor in found] == [torch.int64] * 3
    assert found.logcnt.tolist()[0] == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]
    assert found.log2phy.shape == (2, 12, 2)
    # Replicas of an expert in the order in which they were added, not in that of slots.
    assert found.log2phy[0, 1].tolist() == [15, 13]
    assert found.log2phy[0, 0].tolist() == [12, -1]


@pytest.mark.parametrize(
    "weight",
    [
        *(PUBLISHED.to(dtype) for dtype in (torch.int32, torch.uint8, torch.float64, torch.float16)),
        PUBLISHED.to(torch.bfloat16),
        PUBLISHED.numpy(),
        PUBLISHED.numpy().astype(np.uint64),
        PUBLISHED.t().contiguous().t(),
        PUBLISHED.float().requires_grad_(),
    ],
    ids=lambda weight: f"{type(weight).__name__}-{weight.dtype}",
)
def test_any_real_dtype_is_taken(weight: Any) -> None:
    assert rebalance_experts(weight, *map(np.int64, SIZES)).phy2log.tolist() == PRINTED  # type: ignore[arg-type]


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, ...]:
    """Experts, replicas, groups, servers and ranks."""
    nodes, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    groups = nodes * draw(st.integers(1, 3))
    experts = groups * draw(st.integers(1, 3))
    per_rank = -(-experts // (nodes * ranks)) + draw(st.integers(0, 3))
    # Of another number of servers than groups, there is one server for all.
    named = draw(st.sampled_from([nodes, groups + 1]))
    return experts, per_rank * nodes * ranks, groups, named, nodes * ranks


@settings(max_examples=120)
@given(sizes(), st.integers(1, 3), st.sampled_from([2, 9, 10**9]), st.booleans(), st.integers(0, 99))
def test_it_is_what_plain_loops_find(
    of: tuple[int, ...], num_layers: int, most: int, is_whole: bool, seed: int
) -> None:
    """Bit for bit: few different loads make ties."""
    num_experts, *rest = of
    random = np.random.default_rng(seed)
    weight = random.integers(most, size=(num_layers, num_experts)).astype(np.float32)
    if not is_whole:
        weight = (weight * random.random(weight.shape)).astype(np.float32)
    phy2log, log2phy, logcnt = rebalance_experts(weight, *rest)
    for layer in range(num_layers):
        slots, by_expert = rebalance_layer(list(weight[layer]), *rest)  # type: ignore[call-arg]
        assert phy2log[layer].tolist() == slots
        assert [[n for n in row if n >= 0] for row in log2phy[layer].tolist()] == by_expert
        assert logcnt[layer].tolist() == list(map(len, by_expert))
    assert log2phy.shape[2] == logcnt.max()


def test_ties_go_to_the_lower_index_however_many_there_are() -> None:
    """From 17 equal items on torch's sort is in no order."""
    found = rebalance_experts(torch.ones(1, 64), 64, 1, 1, 8)
    assert found.phy2log[0, :8].tolist() == list(range(0, 64, 8))
    assert rebalance_experts(torch.zeros(1, 4), 8, 1, 1, 2).logcnt.tolist() == [[5, 1, 1, 1]]


def test_61_layers_are_placed_within_a_moment() -> None:
    weight = zipf(61, 256, 1.0, seed=0)
    begun = time.process_time()
    found = rebalance_experts(weight, 320, 1, 1, 64)
    assert time.process_time() - begun < seconds(0.3)
    assert skew(rank_loads(Placement(found.phy2log, 256, 64), weight)).max() < 1.15


WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "none": ((None, *SIZES), "weight is None, but it is needed"),
    "list": (([[1.0]], *SIZES), "weight is .*, but it must be a torch.Tensor or a numpy.ndarray"),
    "one layer": ((torch.ones(12), *SIZES), r"weight is of shape \(12,\), but it must have 2 dimensions"),
    "no experts": ((torch.ones(1, 0), *SIZES), r"weight is of shape \(1, 0\)"),
    "bool": ((torch.ones(1, 12) > 0, *SIZES), "weight is of dtype bool, but loads must be integers or"),
    "complex": ((torch.ones(1, 12) * 1j, *SIZES), "weight is of dtype torch.complex64, but it must be real"),
    "objects": ((np.full((1, 12), None), *SIZES), "weight is of dtype object"),
    "meta": ((torch.ones(1, 12, device="meta"), *SIZES), "weight is a tensor without memory"),
    "negative": ((PUBLISHED - 5, *SIZES), "weight is -1 for expert 7 in layer 0, but loads must be finite"),
    "nan": ((PUBLISHED / 0 - torch.inf, *SIZES), "weight is nan for expert 0 in layer 0"),
    "beyond float32": (
        (PUBLISHED * 1e37, *SIZES),
        "weight is inf for expert 0 in layer 0.*finite in float32",
    ),
    "sum": ((PUBLISHED * 1e36, *SIZES), "weight is 1.* in all in layer 1, but the loads of a layer"),
    "few replicas": ((PUBLISHED, 8, *SIZES[1:]), "num_replicas is 8, but there are 12 experts"),
    "odd replicas": ((PUBLISHED, 17, *SIZES[1:]), "num_replicas is 17.*multiple of num_gpus, 8. Pass 24"),
    "odd ranks": ((PUBLISHED, 18, 4, 2, 9), "num_gpus is 9, but it must be a multiple of num_nodes, 2"),
    "odd groups": ((PUBLISHED, 16, 8, 2, 8), "num_groups is 8, but it must divide the 12 experts"),
    "no ranks": ((PUBLISHED, 16, 4, 2, 0), "num_gpus is 0, but it must be at least 1. Pass 1 or more"),
    "matrix": ((np.ones((1, 12)).view(np.matrix), *SIZES), "weight is a matrix.*Pass numpy.array"),
    "masked": ((np.ma.masked_less(np.ones((1, 12)), 2), *SIZES), r"weight is a MaskedArray.*\.filled\(0\)"),
    "a bit": (
        (torch.empty(1, 12, dtype=torch.uint1), *SIZES),
        "weight is of dtype torch.uint1, but it must be real, of one byte or more. Convert it",
    ),
    "halves of a byte": ((torch.empty(1, 12, dtype=torch.float4_e2m1fn_x2), *SIZES), "float4_e2m1fn_x2"),
    "bits": ((torch.empty(1, 12, dtype=torch.bits8), *SIZES), "weight is of dtype torch.bits8"),
    "any number of replicas": (
        (PUBLISHED, 10**12, *SIZES[1:]),
        r"num_replicas is 10+ .*replicas in each of 2 layers may be 65536 at most. Pass a smaller",
    ),
    "any number of ranks": ((PUBLISHED, 16, 4, 2, 10**12), "num_gpus is 10+ .*may be 16 at most"),
    "a number of any length": ((PUBLISHED, 16, 4, 2, 10**5000), "num_gpus is .*may be 16 at most"),
    "float": ((PUBLISHED, 16.0, 4, 2, 8), r"num_replicas is 16.0 \(a float\), but it must be an integer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_placed_is_refused(name: str) -> None:
    arguments, said = WRONG[name]
    with pytest.raises(ArgumentError, match=said):
        rebalance_experts(*arguments)


def test_one_server_needs_no_division_by_servers() -> None:
    """As EPLB: groups and servers that do not fit each other are left out of account."""
    found = rebalance_experts(PUBLISHED, 18, 5, 2, 9)
    assert found.phy2log.tolist() == rebalance_experts(PUBLISHED, 18, 1, 1, 9).phy2log.tolist()
