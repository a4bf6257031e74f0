"""Weights that move on an NPU, whose host is ahead of it: by checkpoints, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_triton.balance.weights import Side
from moe_triton.processes import RankGroup
from tests.npu.device import POLICIES
from tests.npu.moves_workers import moving, rearranging, side_copies, training

Ranks = Callable[[int], RankGroup]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("side", "held"), [("layer", "allocated"), ("double", "allocated"), ("layer", "adopted")]
)
def test_rounds_are_those_of_the_models_experts_while_weights_move(
    ranks: Ranks, policy: str, side: Side, held: str
) -> None:
    for wrong, switches in ranks(2).run(moving, policy, 1, side, held, 90):
        assert wrong == []
        assert switches >= 2


@pytest.mark.parametrize("policy", POLICIES)
def test_experts_go_where_a_framework_sends_them(ranks: Ranks, policy: str) -> None:
    assert ranks(2).run(rearranging, policy, 1, 6) == [[]] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_redundant_experts_are_filled_and_their_gradients_come_back(ranks: Ranks, policy: str) -> None:
    assert ranks(2).run(training, policy, 1, 4) == [[]] * 2


@pytest.mark.parametrize(("follows", "found"), [(True, 1), (False, 2)])
def test_side_copies_have_a_stream_of_their_own(ranks: Ranks, follows: bool, found: int) -> None:
    for marks, before, after in ranks(2).run(side_copies, follows):
        assert marks == [False, False, False, True, True]
        assert (before, after) == ([3] * 4, [found] * 4)
