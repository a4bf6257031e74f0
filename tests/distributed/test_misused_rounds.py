"""A combine whose ids are not those of its dispatch: what comes unasked changes no later round."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankGroup
from moe_triton.tools.selftest.cases import expected_round
from tests.distributed.cases import experts_of, inputs_of, small_case
from tests.distributed.workers import make_buffer
from tests.torch_npu_ops.setting import fresh

Groups = Callable[[int], RankGroup]
ROUNDS, LATE_S = 6, 0.05


def written_handles(rank: int, num_ranks: int, scheme: str) -> list[bool]:
    """Whether each round's sums are the reference's, but for the first one's of rank 0; rank 1 is late."""
    case, good = small_case(num_ranks, scheme), []
    with make_buffer(case) as buffer:
        for number in range(ROUNDS):
            own = inputs_of(case, rank, number)
            output = buffer.dispatch(own.x, own.topk_idx, own.topk_weights)
            y = experts_of(case, rank, output.tokens)
            if number == 0 and rank == 0:
                output.handle.topk_idx.fill_(-1)
            elif rank == 1:
                time.sleep(LATE_S)
            sums = buffer.combine(y, output.handle, own.topk_weights)
            if number > 0 or rank > 0:
                good.append(torch.equal(sums, expected_round(case, number)[1][rank]))
    return good


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct"])
def test_handles_that_were_written_to(ranks: Groups, scheme: str) -> None:
    assert ranks(2).run(written_handles, scheme) == [[True] * (ROUNDS - 1), [True] * ROUNDS]


def other_ids(rank: int, num_ranks: int, comm_alg: str) -> list[bool]:
    """The same of torch_npu's functions; experts add a number of the round."""
    tokens, hidden, experts, good = 4, 64, 4, []
    ids = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]], dtype=torch.int32)
    x = torch.arange(tokens * hidden).view(tokens, hidden).remainder(7).bfloat16() + rank
    weights = torch.full((tokens, 2), 0.5)
    with fresh():
        group: tuple[Any, ...] = (ops.group_name(), num_ranks, rank, experts)
        options = {"comm_alg": comm_alg}
        for number in range(ROUNDS):
            rows, _, assist, _, counts, tp_counts, _ = ops.npu_moe_distribute_dispatch_v2(
                x, ids, *group, **options
            )
            is_misused = number == 0 and rank == 0
            if rank == 1 and number > 0:
                time.sleep(LATE_S)
            out = ops.npu_moe_distribute_combine_v2(
                rows + number,
                torch.full_like(ids, -1) if is_misused else ids,
                assist,
                counts,
                weights,
                *group,
                tp_send_counts=tp_counts,
                **options,
            )
            if not is_misused:
                good.append(torch.equal(out, x + number))
    return good


@pytest.mark.parametrize("comm_alg", ["fullmesh_v1", "fullmesh_v2"])
def test_ids_of_torch_npus_functions(ranks: Groups, comm_alg: str) -> None:
    assert ranks(2).run(other_ids, comm_alg) == [[True] * (ROUNDS - 1), [True] * ROUNDS]
