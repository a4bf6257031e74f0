"""torch_npu's functions as on an Atlas A2: what its pages say otherwise, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_triton import ArgumentError, reference
from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankGroup
from tests.distributed.failures import not_refused
from tests.patience import seconds
from tests.torch_npu_ops.setting import TOKENS, TOPK, experts_of, make_round

Groups = Callable[[int], RankGroup]


def third_output(rank: int, num_ranks: int, version: int) -> list[str]:
    """What is wrong: V1's and V2's third output hold the same, and combine takes it whole."""
    ops.configure(product="A2", relaxed=True, timeout_s=seconds(20.0))
    r = make_round(rank, num_ranks)
    r.ids[1, 0] = -1
    dispatch, combine = (
        (ops.npu_moe_distribute_dispatch, ops.npu_moe_distribute_combine)
        if version == 1
        else (ops.npu_moe_distribute_dispatch_v2, ops.npu_moe_distribute_combine_v2)
    )
    wrong = []
    rows, _, index, _, counts, _, _ = dispatch(r.x, r.ids, *r.group, expert_scales=r.weights)
    if not torch.equal(index[: TOKENS * TOPK], reference.expand_index(r.ids, r.group[-1])):
        wrong.append(f"index {index[: TOKENS * TOPK].tolist()}")
    capacity = TOKENS * num_ranks * TOPK
    if len(index) != (TOKENS * TOPK if version == 1 else capacity * 128):
        wrong.append(f"{len(index)} elements")
    # one server, of up to 8 ranks
    if len(counts) != num_ranks * 2 + 2 * TOKENS * num_ranks * TOPK:
        wrong.append(f"{len(counts)} counts")
    numbers = index[: TOKENS * TOPK]
    # published host checks want a number for each id: V1's may have their shape, V2's words may follow
    taken = [index, numbers, numbers.view(TOKENS, TOPK)] if version == 1 else [index, numbers]
    found = [combine(experts_of(rows), r.ids, each, counts, r.weights, *r.group) for each in taken]
    name = "expand_idx" if version == 1 else "assist_info_for_combine"
    with pytest.raises(ArgumentError, match=f"{name} is of") as caught:
        combine(experts_of(rows), r.ids, numbers[:-1], counts, r.weights, *r.group)
    if version == 2 and f"at least {TOKENS} * {TOPK} = {TOKENS * TOPK}" not in caught.value.rule:
        wrong.append(str(caught.value))
    # results are 1.5 x + 0.25 wherever they were computed
    result = (r.x.float() * 1.5 + 0.25).bfloat16().float()
    weights = torch.where(r.ids >= 0, r.weights, 0.0)
    expected = sum(result * weights[:, k : k + 1] for k in range(TOPK)).bfloat16()  # type: ignore[union-attr]
    wrong += [
        f"sums by {each.shape}"
        for each, sums in zip(taken, found, strict=True)
        if not torch.equal(sums, expected)
    ]
    ops.release(ops.group_name())
    ops.configure()
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("version", [1, 2])
def test_the_third_output_numbers_entries(ranks: Groups, version: int, num_ranks: int) -> None:
    assert ranks(num_ranks).run(third_output, version) == [[]] * num_ranks


def tails(rank: int, num_ranks: int) -> list[str]:
    """Servers by whose number the counts are not longer: in a plan, or in a trace."""
    r, wrong = make_round(rank, num_ranks), []
    pairs = r.group[-1]  # of a local expert and a source rank
    for servers, given in [(1, None), (2, 2), (4, 1), (2, [3, 1]), (3, [1, 1, 2])]:
        ops.configure(product="A2", relaxed=True, ranks_per_server=given)
        expected = pairs + 2 * TOKENS * num_ranks * TOPK * servers
        for call in (ops.npu_moe_distribute_dispatch, ops.npu_moe_distribute_dispatch_v2):
            plan = call.plan(r.x, r.ids, *r.group, expert_scales=r.weights)
            with FakeTensorMode(allow_non_fake_inputs=True):
                traced = call(*map(torch.empty_like, (r.x, r.ids)), *r.group, expert_scales=r.weights)
            found = plan.symbols.specs()[4][0], tuple(traced[4].shape)
            if found != ((expected,), (expected,)):
                wrong.append(f"{given}: {found} and not {expected}")
    ops.configure()
    return wrong


def test_counts_have_room_for_what_each_server_sends_back(ranks: Groups) -> None:
    assert ranks(4).run(tails) == [[]] * 4


def refused(rank: int, num_ranks: int) -> list[str]:
    """Calls of A3 that were taken, or refused for another reason."""
    ops.configure(product="A2", relaxed=True, timeout_s=seconds(20.0))
    r, wrong = make_round(rank, num_ranks), []
    v2, setup = ops.npu_moe_distribute_dispatch_v2, ops.npu_moe_distribute_dispatch_setup
    mask = torch.ones(TOKENS, TOPK, 1, dtype=torch.bool)
    calls: dict[str, Callable[[], Any]] = {
        "comm_alg is '', but torch_npu's halves are those of A3": lambda: setup(r.x, r.ids, *r.group),
        # inside one server it is fullmesh, whose rules hold
        "comm_quant_mode is 2": lambda: ops.npu_moe_distribute_combine_v2(
            *(r.x, r.ids, torch.zeros(9, dtype=torch.int32), torch.zeros(9, dtype=torch.int32), r.weights),
            *r.group,
            comm_quant_mode=2,
            comm_alg="hierarchy",
        ),
        "comm_alg is 'fullmesh_v1'": lambda: v2(r.x, r.ids, *r.group, comm_alg="fullmesh_v1"),
        "x_active_mask is of 3 dimensions": lambda: v2(r.x, r.ids, *r.group, x_active_mask=mask),
        # published host checks refuse both on A2 too: without quantisation there is no row for each scale
        "scales is given, but only quantised rows": lambda: v2(
            r.x, r.ids, *r.group, scales=torch.ones(r.group[-1], r.x.shape[1])
        ),
        "tp_world_size is 2": lambda: v2(r.x, r.ids, *r.group, group_tp=r.group[0], tp_world_size=2),
        "elastic_info is given": lambda: v2(
            r.x, r.ids, *r.group, elastic_info=torch.zeros(4 + 2 * num_ranks, dtype=torch.int32)
        ),
        "shared_expert_num is 1": lambda: v2(
            r.x, r.ids, *r.group[:3], num_ranks, shared_expert_num=1, shared_expert_rank_num=1
        ),
    }
    wrong += not_refused(calls.items())
    ops.configure()
    return wrong


def test_what_a2_has_not_is_refused_by_name(ranks: Groups) -> None:
    assert ranks(2).run(refused) == [[], []]
