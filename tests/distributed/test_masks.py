"""Masked ranks: nothing is sent to them or awaited from them, and all others go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_triton.processes import run_ranks
from tests.distributed.cases import Case, small_case
from tests.distributed.masked import Masked, rounds_of_each_kind, rounds_with_masks
from tests.patience import seconds

SCHEMES = "fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"


@pytest.mark.parametrize("in_between", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_others_go_on(scheme: str, in_between: bool) -> None:
    case = small_case(4, scheme, rounds=5, weights=True)
    of = Masked(case, gone=(2,), before=1, in_between=in_between)
    assert run_ranks(rounds_with_masks, 4, (of, {})) == [[]] * 4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_rank_goes_on_alone(scheme: str) -> None:
    case = replace(small_case(3, scheme, "int8"), rounds=4, weights=True, num_blocks=2)
    of = Masked(case, gone=(0, 2), before=3)
    assert run_ranks(rounds_with_masks, 3, (of, {})) == [[]] * 3


def between_servers(scheme: str, ranks_per_server: int, num_ranks: int = 4) -> Case:
    case = small_case(num_ranks, scheme, rounds=4, weights=True)
    return replace(case, config=replace(case.config, ranks_per_server=ranks_per_server).normalized())


@pytest.mark.parametrize("in_between", [False, True])
@pytest.mark.parametrize(
    ("scheme", "gone"),
    [("fullmesh_v1", (2,)), ("fullmesh", (1,)), ("hierarchy", (2,)), ("hierarchy", (0, 3))],
)
def test_others_go_on_between_servers(scheme: str, gone: tuple[int, ...], in_between: bool) -> None:
    of = Masked(between_servers(scheme, 2), gone, in_between=in_between)
    assert run_ranks(rounds_with_masks, 4, (of, {})) == [[]] * 4


@pytest.mark.parametrize("tokens", [4, 9])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_calls_of_each_kind(scheme: str, tokens: int) -> None:
    case = small_case(4, scheme)
    if tokens > case.config.num_max_tokens_per_rank and scheme == "direct":
        pytest.skip("direct has no calls in rounds")
    assert run_ranks(rounds_of_each_kind, 4, (case, (1,), tokens)) == [[]] * 4


@pytest.mark.parametrize("in_between", [False, True])
@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "fullmesh"])
@pytest.mark.parametrize("before", [1, 3])
def test_a_wait_goes_on_without_who_is_masked(scheme: str, in_between: bool, before: int) -> None:
    case = small_case(4, scheme, rounds=before + 3, weights=True, num_blocks=2)
    of = Masked(case, (2,), before, in_between, while_waiting=0.2)
    assert run_ranks(rounds_with_masks, 4, (of, {})) == [[]] * 4


@pytest.mark.parametrize("in_between", [False, True])
@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "fullmesh"])
def test_who_does_not_come_is_masked(scheme: str, in_between: bool) -> None:
    case = small_case(4, scheme, rounds=5, weights=True)
    of = Masked(case, (2,), 2, in_between, by_itself=True)
    options = {"on_lost": "mask", "timeout_s": seconds(1.0)}
    assert run_ranks(rounds_with_masks, 4, (of, options)) == [[]] * 4
