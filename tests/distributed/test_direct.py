"""The direct scheme between real processes: bit for bit the reference, and bit for bit fullmesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton import EPBuffer
from moe_triton.core.config import Config
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.processes import RankFailedError, RankGroup, run_ranks
from moe_triton.schemes.direct.layout import DirectLayout
from tests.distributed.cases import Case, cases, small_case, with_scheme
from tests.distributed.direct_workers import (
    Moment,
    Way,
    combine_the_same_again,
    compare_schemes,
    leave,
    run_schedule,
    use_expert_output,
)
from tests.distributed.workers import bits_of_a_round
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
WAYS: list[Way] = list(get_args(Way))


def assert_equal(ranks: Groups, case: Case, ways: list[Way]) -> None:
    case = with_scheme(case, "direct")
    num_ranks = case.config.num_ranks
    assert ranks(num_ranks).run(compare_schemes, case, ways, timeout_s=seconds(120.0)) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=5)
@given(data=st.data())
def test_any_case(ranks: Groups, num_ranks: int, data: st.DataObject, way: Way) -> None:
    assert_equal(ranks, data.draw(cases(num_ranks)), [way])


@pytest.mark.parametrize("quantize", ROW_FORMATS)
@pytest.mark.parametrize("weights", [False, True])
def test_every_way_to_hold_results(ranks: Groups, quantize: str | None, weights: bool) -> None:
    case = small_case(3, quantize=quantize, weights=weights, num_blocks=2)
    assert_equal(ranks, replace(case, tokens=(4, 3, 2)), WAYS)


EDGES = {
    "no_tokens": {"tokens": (0, 0, 0)},
    "tokens_on_one_rank": {"tokens": (0, 4, 0)},
    "nobody_sends": {"routing": "none"},
    "one_set_of_experts": {"routing": "one expert set"},
    "sparse": {"routing": "sparse", "quantize": "int8", "smooth": True},
    "halves": {"dtype": torch.float16, "quantize": "int8"},
    "torch_kernels": {"kernels": "torch", "quantize": "int8", "routing": "sparse", "tokens": (4, 0, 2)},
    "torch_kernels_bf16": {"kernels": "torch", "tokens": (1, 4, 0)},
    "scales_in_blocks": {
        "num_blocks": 3,
        "quantize": "int8_128",
        "routing": "sparse",
        "dtype": torch.float16,
    },
    "three_blocks": {"num_blocks": 3, "quantize": "int8", "smooth": True},
}


@pytest.mark.parametrize("changes", list(EDGES.values()), ids=list(EDGES))
def test_edges(ranks: Groups, changes: dict[str, object]) -> None:
    assert_equal(ranks, small_case(3, **changes), ["in place", "elsewhere"])


# experts, shared experts, shared ranks
SHARED = {"one": (4, 1, 1), "one_on_two_ranks": (4, 1, 2), "two": (6, 2, 2)}


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("quantize", ROW_FORMATS)
@pytest.mark.parametrize("sizes", list(SHARED.values()), ids=list(SHARED))
def test_shared_experts(
    ranks: Groups, sizes: tuple[int, int, int], quantize: str | None, kernels: str
) -> None:
    experts, shared, shared_ranks = sizes
    num_ranks = 3 if shared_ranks == 1 else 4
    config = Config(num_ranks, 4, 128, 2, experts, shared, shared_ranks, relaxed=True)
    tokens = (4, 2, 0, 3)[:num_ranks]
    case = Case(
        config, 7, "uniform", tokens, quantize, smooth=quantize is not None, kernels=kernels, num_blocks=2
    )
    assert_equal(ranks, case, ["in place", "elsewhere"])


def test_all_tokens_to_one_expert(ranks: Groups) -> None:
    config = Config(4, 9, 160, 1, 4, relaxed=True)
    case = Case(config, 3, "one expert set", (9, 9, 9, 9), num_blocks=2)
    assert_equal(ranks, case, ["in place", "elsewhere"])


def test_real_sizes(ranks: Groups) -> None:
    config = Config(4, 16, 7168, 8, 32)
    for quantize in ROW_FORMATS:
        case = Case(config, seed=3, routing="uniform", tokens=(16, 15, 16, 1), quantize=quantize)
        assert_equal(ranks, case, ["in place", "elsewhere"])


@pytest.mark.parametrize("schedule", ["D", "DC", "DCC", "DDC", "DCCCCC", "DDDCCC"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_any_order_of_operators_with_stragglers(ranks: Groups, schedule: str, quantize: str | None) -> None:
    case = small_case(3, "direct", tokens=(4, 1, 3), quantize=quantize)
    long = schedule * (120 // len(schedule))
    assert ranks(3).run(run_schedule, case, long, 6, timeout_s=seconds(120.0)) == [[]] * 3


def test_many_rounds_with_stragglers(ranks: Groups) -> None:
    case = small_case(4, "direct", tokens=(4, 0, 3, 1), quantize="int8")
    assert ranks(4).run(run_schedule, case, "DC" * 700, 40, timeout_s=seconds(240.0)) == [[]] * 4


@settings(max_examples=8)
@given(tail=st.text("DC", max_size=24), seed=st.integers(0, 99))
def test_orders_that_nobody_thought_of(ranks: Groups, tail: str, seed: int) -> None:
    case = small_case(3, "direct", seed=seed, tokens=(2, 4, 3))
    assert ranks(3).run(run_schedule, case, "D" + tail, 4) == [[]] * 3


@pytest.mark.parametrize("way", WAYS)
def test_the_same_results_may_be_combined_again(ranks: Groups, way: Way) -> None:
    assert ranks(2).run(combine_the_same_again, way, 5) == [[], []]


@settings(max_examples=4)
@given(delays=st.lists(st.floats(0, 0.02), min_size=3, max_size=3))
def test_order_of_arrival_does_not_change_a_bit(ranks: Groups, delays: list[float]) -> None:
    case = small_case(3, "direct", dtype=torch.float16)
    on_time = ranks(3).run(bits_of_a_round, case, [0.0] * 3)
    assert ranks(3).run(bits_of_a_round, case, delays) == on_time


def test_expert_output(ranks: Groups) -> None:
    assert ranks(2).run(use_expert_output) == [[], []]


def test_the_size_hint_is_the_window_s() -> None:
    sizes = {"num_max_tokens_per_rank": 16, "hidden": 7168, "num_topk": 8, "num_experts": 64}
    layout = DirectLayout(Config(4, *sizes.values()))
    assert EPBuffer.get_buffer_size_hint(4, comm_alg="direct", **sizes) == layout.data_bytes


FAILED_IN = {
    "before counts": ("dispatch", 1, 1),
    "before rows": ("dispatch", 1, 1),
    "before results": ("combine", 1, 1),
}


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("moment", get_args(Moment))
def test_a_rank_that_does_not_come_is_named(moment: Moment, dies: bool) -> None:
    results = run_ranks(leave, 3, (moment, dies), allow_failures=True)
    assert isinstance(results[1], RankFailedError) if dies else results[1] is None
    assert results[0] == results[2] == (*FAILED_IN[moment], (1,))
