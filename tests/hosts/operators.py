"""What ranks on several hosts do in tests of torch_npu's functions."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from moe_triton import MoeTritonError, torch_npu_ops
from tests.distributed.operator_cases import OperatorCase
from tests.distributed.operator_runs import run_rank
from tests.patience import seconds
from tests.torch_npu_ops import setting, test_hierarchy
from tests.torch_npu_ops.test_hierarchy import whole_round, with_switches

Fields = dict[str, Any]
UNNAMED: Fields = {"ranks_per_server": None}


def everything(rank: int, num_ranks: int, given: list[Fields]) -> dict[str, Any]:
    """What the functions below find, in one job; the first of them while ranks have not met."""
    first = plans_and_refusals(rank, num_ranks)
    wrong = with_switches(rank, num_ranks, whole_round_of_a2, 1) + whole_round_of_a2(rank, num_ranks, 2)
    return {"first": first, "cases": cases(rank, num_ranks, given), "wrong": wrong}


def of_published_sizes(rank: int, num_ranks: int, given: list[Fields]) -> dict[str, Any]:
    """What is wrong with a hierarchy on A3, and what this rank gets in each case.

    A3's own servers are whole machines: it is refused until ranks have found that they are on several hosts.
    """
    with mock.patch.multiple(setting, HIDDEN=1024), mock.patch.multiple(test_hierarchy, HIDDEN=1024):
        wrong = whole_round(rank, num_ranks, 2, "aiv", 0, "A3", relaxed=False, **UNNAMED)
    return {"wrong": wrong, "cases": cases(rank, num_ranks, given, relaxed=False)}


def cases(rank: int, num_ranks: int, given: list[Fields], relaxed: bool = True) -> list[str]:
    """What this rank gets in each case, saved."""
    got = [run_rank(rank, num_ranks, OperatorCase(**fields), relaxed=relaxed) for fields in given]
    return [base64.b64encode(each).decode() for each in got]


def whole_round_of_a2(rank: int, num_ranks: int, version: int) -> list[str]:
    """What is wrong in rounds of a version."""
    return whole_round(rank, num_ranks, version, "aicpu", 2, **UNNAMED)


def known_servers(rank: int, num_ranks: int) -> list[Any]:
    """The servers that a plan knows, before ranks have met and behind a barrier."""
    torch_npu_ops.configure(relaxed=True, timeout_s=seconds(20))
    r = setting.make_round(rank, num_ranks)
    known = []
    for _ in range(2):
        plan = torch_npu_ops.npu_moe_distribute_dispatch_v2.plan(r.x, r.ids, *r.group)
        known.append(plan.config.topology.sizes)
        torch_npu_ops._npu_distribute_barrier(r.x, *r.group[:2])
    torch_npu_ops.release(r.group[0])
    return known


def plans_and_refusals(rank: int, num_ranks: int) -> list[Any]:
    """`known_servers`; and what is said of servers across hosts, and of tensor parallelism between them."""
    known = known_servers(rank, num_ranks)

    def of_servers() -> Any:
        torch_npu_ops.configure(relaxed=True, timeout_s=seconds(20), ranks_per_server=3)
        r = setting.make_round(rank, num_ranks)
        return torch_npu_ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)

    hosts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    def of_pairs() -> Any:
        torch_npu_ops.configure(relaxed=True, timeout_s=seconds(20))
        r = setting.make_round(rank % 2, 2, num_experts=2)
        group, pair = (torch_npu_ops.group_name(each) for each in (hosts[rank // 2], pairs[rank % 2]))
        of_tp: Fields = {"group_tp": pair, "tp_world_size": 2, "tp_rank_id": rank // 2}
        ids = torch.tensor([[0, 1]] * len(r.x), dtype=torch.int32)
        return torch_npu_ops.npu_moe_distribute_dispatch_v2(r.x, ids, group, *r.group[1:], **of_tp)

    return [known, said_by(of_servers), said_by(of_pairs)]


def said_by(call: Callable[[], Any]) -> str:
    """The error of a call."""
    try:
        call()
    except MoeTritonError as error:
        return str(error)
    return ""
