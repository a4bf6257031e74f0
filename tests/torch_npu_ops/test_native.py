"""Usual calls of torch_npu's functions are one native call each; the rest takes Python's path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_triton import torch_npu_ops as ops
from moe_triton.core.errors import ArgumentError
from moe_triton.processes import RankGroup
from tests.distributed.test_whole_calls import pythons_runs
from tests.headers import needs_headers
from tests.patience import seconds
from tests.torch_npu_ops.setting import fresh

pytestmark = needs_headers

Groups = Callable[[int], RankGroup]
TOKENS, HIDDEN, TOPK, EXPERTS = 6, 64, 2, 4
ROUNDS = 3  # until each zone has its plan, and its call is native


class Layer:
    """Dispatch and combine of one rank; each expert returns what it is given."""

    def __init__(self, rank: int, num_ranks: int, version: int, norm: bool) -> None:
        ops.configure(relaxed=True, timeout_s=seconds(20.0))
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
        self.ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in self.x]).int()
        self.weights = torch.rand(TOKENS, TOPK, generator=generator)
        self.group = ops.group_name(), num_ranks, rank, EXPERTS
        self.version, self.norm = version, norm

    def dispatch(self, ids: torch.Tensor) -> Any:
        function = (
            ops.npu_moe_distribute_dispatch if self.version == 1 else ops.npu_moe_distribute_dispatch_v2
        )
        return function(self.x, ids, *self.group, shared_expert_num=int(self.version == 1))

    def combine(self, rows: torch.Tensor, out: Any) -> Any:
        common = rows, self.ids, out[2], out[4], self.weights, *self.group
        options = {"shared_expert_num": int(self.version == 1)}
        if self.norm:
            residual, gamma = self.x[:, None], torch.ones(HIDDEN).bfloat16()
            function = ops.npu_moe_distribute_combine_add_rms_norm
            return function(
                rows,
                self.ids,
                out[2],
                out[4],
                self.weights,
                residual,
                gamma,
                *self.group,
                shared_expert_num=0,
            )
        if self.version == 1:
            return ops.npu_moe_distribute_combine(*common, **options)
        return ops.npu_moe_distribute_combine_v2(*common, **options)

    def both(self) -> tuple[Any, Any]:
        out = self.dispatch(self.ids)
        return out, self.combine(out[0].clone(), out)


def usual(rank: int, num_ranks: int, version: int, norm: bool) -> tuple[int, bool]:
    """Python's runs once all is native, and whether the results of all rounds are the same."""
    fresh()
    layer = Layer(rank, num_ranks, version, norm)
    first = layer.both()
    for _ in range(ROUNDS):
        layer.both()
    with pythons_runs() as seen:
        rounds = [layer.both() for _ in range(4)]
    total = int(first[0][4][-1])
    same = all(
        torch.equal(out[0][:total], first[0][0][:total])
        and torch.equal(torch.as_tensor(sums[0]), torch.as_tensor(first[1][0]))
        for out, sums in rounds
    )
    return len(seen), same


@pytest.mark.parametrize(("version", "norm"), [(1, False), (2, False), (2, True)])
def test_usual_calls_are_native(ranks: Groups, version: int, norm: bool) -> None:
    assert ranks(2).run(usual, version, norm) == [(0, True)] * 2


def unusual(rank: int, num_ranks: int) -> list[str]:
    """What bad and rare calls come to between native ones."""
    fresh()
    layer, said = Layer(rank, num_ranks, 2, norm=False), []
    for _ in range(ROUNDS):
        layer.both()
    out = layer.dispatch(layer.ids)
    bad = layer.ids.clone()
    bad[1, 0] = EXPERTS
    with pythons_runs() as seen:
        for ids, rows, counts in ((bad, None, None), (None, out[0][:0].clone(), None), (None, out[0], -1)):
            given = list(out)
            if counts is not None:
                given[4] = torch.full_like(out[4], counts)
            try:
                layer.dispatch(ids) if ids is not None else layer.combine(rows, given)
                said.append("nothing")
            except ArgumentError as error:
                said.append(error.argument)
        assert not seen
        sums = layer.combine(out[0].clone(), out)
        _, more = layer.both()
    assert torch.equal(sums, more)
    assert not seen
    return said


def test_what_is_wrong_is_refused_between_native_calls(ranks: Groups) -> None:
    first, second = ranks(2).run(unusual)
    assert first == second == ["expert_ids", "expand_x", "ep_send_counts"]
