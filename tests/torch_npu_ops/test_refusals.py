"""Bad arguments of the public functions: argument and code, before anything is sent, and no harm done."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_triton import torch_npu_ops as ops
from moe_triton.core.errors import ArgumentError
from moe_triton.processes import RankGroup
from tests.patience import seconds
from tests.torch_npu_ops.setting import HIDDEN, TOKENS, TOPK, experts_of, fresh, make_round

Groups = Callable[[int], RankGroup]
NULL, INVALID, TILING = 161001, 161002, 561002
# What the message begins with, the code, and the call that it is about.
Case = tuple[str, int, Callable[[], Any]]


def bad_dispatches(rank: int, num_ranks: int) -> list[Case]:
    r = make_round(rank, num_ranks)
    name, size, _, experts = r.group
    v1, v2 = ops.npu_moe_distribute_dispatch, ops.npu_moe_distribute_dispatch_v2
    ones = torch.ones
    twice, beyond = r.ids.clone(), r.ids.clone()
    twice[1], beyond[2, 1] = 3, experts
    placeholders = torch.tensor([True, False, True, False])
    elastic = torch.zeros(4 + 2 * size, dtype=torch.int32)
    elastic[0], elastic[1] = 1, 1
    strided = torch.zeros(2 * size, dtype=torch.int64)[::2]

    def d(**options: Any) -> Callable[[], Any]:
        return lambda: v2(r.x, r.ids, *r.group, **options)

    return [
        ("x is None", NULL, lambda: v2(None, r.ids, *r.group)),
        ("expert_ids is None", NULL, lambda: v2(r.x, None, *r.group)),
        ("x is a list", INVALID, lambda: v2([1], r.ids, *r.group)),
        ("x is of dtype torch.float32", INVALID, lambda: v2(r.x.float(), r.ids, *r.group)),
        ("x is on meta", INVALID, lambda: v2(r.x.to("meta"), r.ids, *r.group)),
        ("x is of shape (64,)", TILING, lambda: v2(r.x[0], r.ids, *r.group)),
        ("expert_ids is of dtype torch.int16", INVALID, lambda: v2(r.x, r.ids.short(), *r.group)),
        ("expert_ids is of shape (3, 2)", TILING, lambda: v2(r.x, r.ids[:3], *r.group)),
        (f"expert_ids is {experts} at token 2, k 1", TILING, lambda: v2(r.x, beyond, *r.group)),
        ("expert_ids is 3 at token 1, k 1", TILING, lambda: v2(r.x, twice, *r.group)),
        ("scales is of shape", TILING, d(quant_mode=2, scales=ones(1, HIDDEN))),
        ("scales is of dtype", INVALID, d(quant_mode=2, scales=ones(experts, HIDDEN).half())),
        ("scales is", TILING, d(scales=ones(experts, HIDDEN))),
        ("x_active_mask is of dtype", INVALID, d(x_active_mask=placeholders.int())),
        ("x_active_mask is True at token 2", TILING, d(x_active_mask=placeholders)),
        ("x_active_mask is of shape", TILING, d(x_active_mask=placeholders[:2])),
        ("x_active_mask is", TILING, lambda: v1(r.x, r.ids, *r.group, x_active_mask=placeholders)),
        ("expert_scales is of dtype", INVALID, d(expert_scales=r.weights.double())),
        ("expert_scales is of shape", TILING, d(expert_scales=r.weights[:, :1])),
        ("elastic_info is of shape", TILING, d(elastic_info=elastic[:5])),
        (f"elastic_info is of shape (2, {2 + size})", TILING, d(elastic_info=elastic.view(2, -1))),
        ("elastic_info is of dtype", INVALID, d(elastic_info=elastic.long())),
        ("elastic_info is one with 1", TILING, d(elastic_info=elastic)),
        ("performance_info is of dtype", INVALID, d(performance_info=ones(size))),
        ("performance_info is of shape", TILING, d(performance_info=ones(size + 1).long())),
        ("performance_info is strided", TILING, d(performance_info=strided)),
        ("group_ep is 7", INVALID, lambda: v2(r.x, r.ids, 7, *r.group[1:])),
        ("group_ep is ''", NULL, lambda: v2(r.x, r.ids, "", *r.group[1:])),
        (f"group_ep is {'g' * 128!r}", NULL, lambda: v2(r.x, r.ids, "g" * 128, *r.group[1:])),
        ("group_ep is 'nobody'", INVALID, lambda: v2(r.x, r.ids, "nobody", *r.group[1:])),
        ("ep_world_size is 4", TILING, lambda: v2(r.x, r.ids, name, 4, rank, experts)),
        ("ep_rank_id is", TILING, lambda: v2(r.x, r.ids, name, size, 1 - rank, experts)),
        ("ep_rank_id is -1", TILING, lambda: v2(r.x, r.ids, name, size, -1, experts)),
        ("moe_expert_num is 5", TILING, lambda: v2(r.x, r.ids, name, size, rank, 5)),
        ("tp_world_size is 3", TILING, d(tp_world_size=3)),
        ("group_tp is", INVALID, d(tp_world_size=2, group_tp="")),
        ("group_tp is 7", INVALID, d(tp_world_size=2, group_tp=7)),
        ("expert_scales is None, but hierarchy sums", NULL, d(comm_alg="hierarchy")),
        ("expert_shard_type is 1", TILING, d(expert_shard_type=1)),
        ("shared_expert_num is 5", TILING, d(shared_expert_num=5, shared_expert_rank_num=1)),
        ("shared_expert_rank_num is", TILING, d(shared_expert_rank_num=2)),
        ("quant_mode is 4", TILING, d(quant_mode=4)),
        ("global_bs is 7", TILING, d(global_bs=7)),
        ("expert_token_nums_type is 2", TILING, d(expert_token_nums_type=2)),
        ("comm_alg is", TILING, d(comm_alg="ring")),
        ("comm_alg is 'direct', but torch_npu's functions", TILING, d(comm_alg="direct")),
        ("x_active_mask is True at token 2", TILING, d(comm_alg="fullmesh_v2", x_active_mask=placeholders)),
        ("elastic_info is given", TILING, d(comm_alg="fullmesh_v2", elastic_info=elastic * 0)),
        ("y_dtype is", INVALID, d(y_dtype=15)),
    ]


def bad_combines(rank: int, num_ranks: int, out: tuple[torch.Tensor, ...], z: torch.Tensor) -> list[Case]:
    r = make_round(rank, num_ranks)
    _, _, index, _, counts, _, _ = out
    v2, norm = ops.npu_moe_distribute_combine_v2, ops.npu_moe_distribute_combine_add_rms_norm
    many = counts.clone()
    many[-1] = len(z) + 1
    shared, residual, gamma = torch.zeros_like(r.x), r.x[:, None], torch.ones_like(r.x[0])

    def c(**options: Any) -> Callable[[], Any]:
        return lambda: v2(z, r.ids, index, counts, r.weights, *r.group, **options)

    def n(residual: Any = residual, gamma: Any = gamma, **options: Any) -> Callable[[], Any]:
        return lambda: norm(z, r.ids, index, counts, r.weights, residual, gamma, *r.group, **options)

    group, w = r.group, r.weights
    alpha = torch.zeros(1, HIDDEN).bfloat16()

    def const(alpha1: torch.Tensor, alpha2: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
        names = {"const_expert_alpha_1": alpha1, "const_expert_alpha_2": alpha2, "const_expert_v": v}
        return c(const_expert_num=1, ori_x=shared, **names)

    return [
        ("expand_x is None", NULL, lambda: v2(None, r.ids, index, counts, w, *group)),
        ("assist_info_for_combine is None", NULL, lambda: v2(z, r.ids, None, counts, w, *group)),
        ("ep_send_counts is None", NULL, lambda: v2(z, r.ids, index, None, w, *group)),
        ("ep_send_counts is one with a total", TILING, lambda: v2(z, r.ids, index, many, w, *group)),
        ("ep_send_counts is of 1 elements", TILING, lambda: v2(z, r.ids, index, counts[:1], w, *group)),
        ("assist_info_for_combine is of dtype", INVALID, lambda: v2(z, r.ids, z[0], counts, w, *group)),
        ("expert_scales is a float", INVALID, lambda: v2(z, r.ids, index, counts, 1.0, *group)),
        ("expert_scales is of shape", TILING, lambda: v2(z, r.ids, index, counts, w[:2], *group)),
        ("shared_expert_x is of shape", TILING, c(shared_expert_x=shared[:1])),
        ("shared_expert_x is of shape", TILING, c(shared_expert_x=shared.view(1, 2, -1))),
        ("shared_expert_x is of shape", TILING, c(shared_expert_x=shared[1:, None])),
        ("shared_expert_x is of shape", TILING, c(shared_expert_x=shared.view(2, TOKENS // 2, 1, HIDDEN))),
        ("assist_info_for_combine is of", TILING, lambda: v2(z, r.ids, index[:-1], counts, w, *group)),
        ("expand_x is of", TILING, lambda: v2(z[:-1], r.ids, index, counts, w, *group)),
        (
            "expand_idx is of",
            TILING,
            lambda: norm(z, r.ids, index[:-1], counts, w, residual, gamma, *group),
        ),
        ("const_expert_alpha_1 is of shape", TILING, const(alpha.view(1, 1, HIDDEN), alpha, alpha)),
        ("const_expert_alpha_2 is of shape", TILING, const(alpha, alpha[0, :1], alpha)),
        ("const_expert_v is of shape", TILING, const(alpha, alpha, alpha[0])),
        ("ori_x is", NULL, c(copy_expert_num=1)),
        ("ori_x is of dtype", INVALID, c(copy_expert_num=1, ori_x=shared.float())),
        ("const_expert_alpha_1", NULL, c(const_expert_num=1, ori_x=shared)),
        ("comm_quant_mode is 1", TILING, c(comm_quant_mode=1)),
        ("performance_info is of shape", TILING, c(performance_info=torch.zeros(7).long())),
        ("residual_x is None", NULL, n(residual=None)),
        ("residual_x is of shape", TILING, n(residual=r.x)),
        ("gamma is of dtype", INVALID, n(gamma=gamma.float())),
        ("norm_eps is 0", TILING, n(norm_eps=0.0)),
        ("activation_scale is", TILING, n(activation_scale=gamma)),
        ("out_dtype is 1", TILING, n(out_dtype=1)),
        ("group_list_type is 1", TILING, n(group_list_type=1)),
        (
            "shared_expert_x is",
            TILING,
            lambda: ops.npu_moe_distribute_combine(
                z, r.ids, index[: TOKENS * TOPK], counts, w, *group, shared_expert_x=shared
            ),
        ),
        (
            "expand_idx is of shape",
            TILING,
            lambda: ops.npu_moe_distribute_combine(z, r.ids, index[: TOKENS * TOPK - 1], counts, w, *group),
        ),
    ]


def failures(cases: list[Case]) -> list[str]:
    wrong = []
    for start, code, call in cases:
        try:
            call()
        except ArgumentError as error:
            if not str(error).startswith(start) or error.code != code:
                wrong.append(f"expected {start!r} with {code}, got {error}")
            elif not (error.rule and error.remedy and re.search(r"\[\d{6}\]$", str(error))):
                wrong.append(f"{error!r} lacks rule, remedy or code")
        else:
            wrong.append(f"{start!r} was taken")
    return wrong


def refuse_everything(rank: int, num_ranks: int) -> list[str]:
    with fresh():
        wrong = failures(bad_dispatches(rank, num_ranks))
        r = make_round(rank, num_ranks)
        out = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)
        z = experts_of(out[0])
        # once more with plans that are cached by now
        wrong += failures(bad_dispatches(rank, num_ranks))
        wrong += failures(bad_combines(rank, num_ranks, out, z))
        combined = ops.npu_moe_distribute_combine_v2(z, r.ids, out[2], out[4], r.weights, *r.group)
        wrong += failures(bad_combines(rank, num_ranks, out, z))
        acc = sum(experts_of(r.x).float() * r.weights[:, k : k + 1] for k in range(TOPK))
        if not torch.equal(combined, acc.bfloat16()):
            wrong.append("other numbers after bad input")
    return wrong


def test_every_bad_argument_is_named_and_the_calls_after_it_work(ranks: Groups) -> None:
    assert ranks(2).run(refuse_everything) == [[], []]


def plan_alone(rank: int, num_ranks: int) -> list[str]:
    """One rank plans what no other knows of: good calls, and bad ones; then all make a call."""
    wrong = []
    with fresh():
        r = make_round(rank, num_ranks)
        dispatch, setup = ops.npu_moe_distribute_dispatch_v2, ops.npu_moe_distribute_dispatch_setup
        if rank == 0:
            plan = dispatch.plan(r.x, r.ids, *r.group, quant_mode=2)
            if plan.window_bytes <= 0 or plan.workspace_bytes <= 0 or plan.config.hidden != HIDDEN:
                wrong.append(f"{plan}")
            for call, code in (
                (lambda: dispatch.plan(r.x, r.ids, *r.group, quant_mode=1), TILING),
                (lambda: dispatch.plan(None, r.ids, *r.group), NULL),
                (lambda: dispatch.plan(r.x.double(), r.ids, *r.group), INVALID),
                (
                    lambda: setup.plan(r.x, r.ids, *r.group, comm_type=2),
                    TILING,
                ),
            ):
                with pytest.raises(ArgumentError) as caught:
                    call()
                if caught.value.code != code:
                    wrong.append(str(caught.value))
        out = dispatch(r.x, r.ids, *r.group)
        if len(out) != 7:
            wrong.append("a call after a plan")
    return wrong


def test_a_plan_is_made_without_the_other_ranks(ranks: Groups) -> None:
    assert ranks(2).run(plan_alone) == [[], []]


def small_window(rank: int, num_ranks: int) -> str:
    with fresh(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HCCL_BUFFSIZE", "1")
        x = torch.zeros(64, 7168).bfloat16()
        ids = torch.arange(8, dtype=torch.int32).expand(64, 8)
        with pytest.raises(ArgumentError, match="HCCL_BUFFSIZE is 1 MB") as caught:
            ops.npu_moe_distribute_dispatch_v2(x, ids, ops.group_name(), num_ranks, rank, 16)
        patch.setenv("HCCL_BUFFSIZE", "many")
        with pytest.raises(ArgumentError, match="positive number of megabytes"):
            ops.npu_moe_distribute_dispatch_v2(x, ids, ops.group_name(), num_ranks, rank, 16)
        needed = re.search(r"Set HCCL_BUFFSIZE=(\d+)", str(caught.value))
        assert needed
        patch.setenv("HCCL_BUFFSIZE", needed[1])
        out = ops.npu_moe_distribute_dispatch_v2(x, ids, ops.group_name(), num_ranks, rank, 16)
        return "taken" if int(out[4][-1]) == (1 - rank) * 64 * 8 * num_ranks else "wrong"


def test_a_small_window_is_found_with_the_plan_and_the_message_says_what_to_set(ranks: Groups) -> None:
    assert ranks(2).run(small_window) == ["taken", "taken"]


def generations(rank: int, num_ranks: int) -> list[str]:
    """What only one generation of the limits takes, and what either takes where none is chosen."""
    wrong = []
    r = make_round(rank, num_ranks)
    dispatch = ops.npu_moe_distribute_dispatch_v2
    mask = torch.ones(TOKENS).bool()
    elastic = torch.zeros(4 + 2 * num_ranks, dtype=torch.int32)
    for options, refuses in (
        ({"comm_alg": "fullmesh_v2", "x_active_mask": mask}, "v3"),
        ({"comm_alg": "fullmesh_v2", "zero_expert_num": 1}, "v3"),
        ({"comm_alg": "fullmesh_v2", "global_bs": 2 * TOKENS * num_ranks}, "v3"),
        ({"elastic_info": elastic}, "v4"),
    ):
        for generation in ("v3", "v4", None):
            ops.configure(relaxed=True, timeout_s=seconds(20.0), generation=generation)
            try:
                dispatch.plan(r.x, r.ids, *r.group, **options)
            except ArgumentError as error:
                if generation != refuses or refuses not in error.rule:
                    wrong.append(f"{options} with {generation}: {error}")
            else:
                if generation == refuses:
                    wrong.append(f"{options} with {generation} was taken")
    ops.configure()
    return wrong


def test_the_generation_of_limits_is_a_setting(ranks: Groups) -> None:
    assert ranks(2).run(generations) == [[], []]
    with pytest.raises(ArgumentError, match="generation is 'v5'"):
        ops.configure(generation="v5")  # type: ignore[arg-type]
