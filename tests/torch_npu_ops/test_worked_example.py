"""Ascend's worked example of the first version's dispatch, on that version itself: K is 12 there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankGroup
from tests.test_reference import CUMULATIVE, EXPAND_IDX, RECV_COUNTS, ints, worked_example
from tests.torch_npu_ops.setting import fresh

HIDDEN = 64


def run_example(rank: int, num_ranks: int) -> dict[str, list[int]]:
    _, ids = worked_example()
    with fresh():
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(4, HIDDEN, generator=generator).bfloat16()
        weights = torch.rand(4, 12, generator=generator)
        group = (ops.group_name(), num_ranks, rank, 32)
        out = ops.npu_moe_distribute_dispatch(x, ids[rank], *group, expert_token_nums_type=0)
        back = ops.npu_moe_distribute_combine(out[0], ids[rank], out[2], out[4], weights, *group)
        acc = torch.zeros(x.shape)
        for k in range(12):
            acc += x.float() * weights[:, k : k + 1]
        assert torch.equal(back, acc.bfloat16())
        return {"expand_idx": out[2].tolist(), "counts": out[4].tolist(), "nums": out[3].tolist()}


def test_the_worked_example_to_the_digit(ranks: Callable[[int], RankGroup]) -> None:
    found = ranks(2).run(run_example)[0]
    assert found == {
        "expand_idx": ints(EXPAND_IDX),
        "counts": ints(RECV_COUNTS),
        "nums": ints(CUMULATIVE),
    }
