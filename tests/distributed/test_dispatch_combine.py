"""Dispatch and combine between real processes, bit for bit against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton import Tuning
from moe_triton.core.config import Config
from moe_triton.processes import RankGroup
from moe_triton.schemes import product_of
from tests.distributed.cases import SCHEMES, Case, as_on_npu, cases, small_case
from tests.distributed.workers import bits_of_a_round, compare_rounds, make_buffer, many_rounds
from tests.patience import seconds
from tests.test_reference import CUMULATIVE, EXPAND_IDX, RECV_COUNTS, ints, worked_example

Groups = Callable[[int], RankGroup]


def assert_bit_equal(ranks: Groups, case: Case, tuning: Tuning | None = None) -> None:
    results = ranks(case.config.num_ranks).run(compare_rounds, case, tuning, timeout_s=seconds(120.0))
    assert results == [[]] * case.config.num_ranks


@settings(max_examples=40)
@given(case=cases(2))
def test_two_ranks(ranks: Groups, case: Case) -> None:
    assert_bit_equal(ranks, case)


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=10)
@given(data=st.data())
def test_four_ranks(ranks: Groups, data: st.DataObject, scheme: str) -> None:
    assert_bit_equal(ranks, data.draw(cases(4, scheme)))


@settings(max_examples=12)
@given(case=cases(8))
def test_eight_ranks(ranks: Groups, case: Case) -> None:
    assert_bit_equal(ranks, case)


@pytest.mark.parametrize("num_ranks", [2, 4])
@settings(max_examples=10)
@given(data=st.data(), num_blocks=st.sampled_from([2, 3, 4]))
def test_as_an_npu_does_by_default(
    ranks: Groups, data: st.DataObject, num_ranks: int, num_blocks: int
) -> None:
    case = replace(data.draw(cases(num_ranks)), num_blocks=num_blocks)
    assert_bit_equal(ranks, case, as_on_npu(case))


@settings(max_examples=6)
@given(case=cases(3))
def test_torch_kernels_give_the_same_bits(ranks: Groups, case: Case) -> None:
    assert_bit_equal(ranks, replace(case, kernels="torch"))


@pytest.mark.parametrize(("quantize", "hidden"), [*product([None, "int8"], [2880, 7168]), ("int8_128", 7168)])
def test_real_sizes(ranks: Groups, hidden: int, quantize: str | None) -> None:
    config = Config(4, 16, hidden, 8, 32)
    case = Case(config, seed=3, routing="uniform", tokens=(16, 15, 16, 1), quantize=quantize)
    assert_bit_equal(ranks, case)


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("hidden", [128, 608, 7168])
def test_a_scale_for_every_128_elements(ranks: Groups, scheme: str, smooth: bool, hidden: int) -> None:
    """Of 7168 elements, the scales lie in two of fullmesh_v2's blocks of 480 bytes."""
    product_ = product_of(scheme)
    shared = (4, 1, 1) if product_ == "A3" else (6,)
    config = Config(3, 5, hidden, 2, *shared, product=product_, scheme=scheme, relaxed=True)
    case = Case(config, 11, "sparse", (5, 0, 3), "int8_128", smooth=smooth, rounds=4)
    assert_bit_equal(ranks, case)


def test_largest_fan_out(ranks: Groups) -> None:
    config = Config(4, 8, 1024, 16, 64, num_shared_experts=2, num_shared_ranks=2)
    assert_bit_equal(ranks, Case(config, seed=5, routing="uniform", tokens=(8, 0, 3, 8)))


def dispatch_worked_example(rank: int, num_ranks: int) -> tuple[list[int], list[int], list[int]]:
    config, ids = worked_example()
    case = Case(config, seed=0, routing="uniform", tokens=(4, 4))
    with make_buffer(case) as buffer:
        output = buffer.dispatch(torch.zeros(4, config.hidden, dtype=torch.bfloat16), ids[rank])
        handle = output.handle
        counts = output.tokens_per_expert.cumsum(0)
        return handle.expand_idx.tolist(), handle.recv_offsets.tolist(), counts.tolist()


def test_worked_example_to_the_digit(ranks: Groups) -> None:
    expand_idx, recv_offsets, cumulative = ranks(2).run(dispatch_worked_example)[0]
    assert expand_idx == ints(EXPAND_IDX)
    assert recv_offsets == ints(RECV_COUNTS)
    assert cumulative == ints(CUMULATIVE)


def test_two_thousand_rounds_with_stragglers(ranks: Groups) -> None:
    case = small_case(4, rounds=2000, tokens=(4, 0, 3, 1), quantize="int8")
    results = ranks(4).run(many_rounds, case, 40, timeout_s=seconds(240.0))
    assert results == [[]] * 4


@settings(max_examples=5)
@given(delays=st.lists(st.floats(0, 0.02), min_size=4, max_size=4))
def test_order_of_arrival_does_not_change_a_bit(ranks: Groups, delays: list[float]) -> None:
    case = small_case(4, dtype=torch.float16)
    assert ranks(4).run(bits_of_a_round, case, delays) == ranks(4).run(bits_of_a_round, case, [0.0] * 4)
