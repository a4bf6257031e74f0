"""The way in which serving frameworks call A3: everything by name, and no tensor parallelism spelt out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_triton import reference
from moe_triton import torch_npu_ops as ops
from moe_triton.core.row_formats import BY_QUANT_MODE
from moe_triton.processes import RankGroup
from tests.torch_npu_ops.setting import HIDDEN, experts_of, fresh

Groups = Callable[[int], RankGroup]
RANKS, TOKENS, TOPK, EXPERTS = 4, 6, 2, 8
OPTIONS = (
    "plain",
    "mask",
    "3-D shared_expert_x",
    "batches differ",
    "no tokens, empty mask",
    "redundant experts",
)
DIFFER = "batches differ", "no tokens, empty mask"
Tensors = dict[str, torch.Tensor]


def num_experts_of(option: str) -> int:
    """With redundant experts the group holds more of them than the model routes to."""
    return EXPERTS + RANKS if option == "redundant experts" else EXPERTS


def tensors_of(rank: int, option: str) -> Tensors:
    generator = torch.Generator().manual_seed(100 + rank)
    batch = 1 + (rank + 2) % TOKENS if option in DIFFER else TOKENS
    if "no tokens" in option and rank == 1:
        batch = 0
    popularity = torch.rand(batch, EXPERTS, generator=generator)
    given = {
        "x": torch.randn(batch, HIDDEN, generator=generator).bfloat16(),
        "expert_ids": popularity.topk(TOPK).indices.int(),
        "weights": torch.rand(batch, TOPK, generator=generator),
        "shared": torch.randn(batch, HIDDEN, generator=generator).bfloat16(),
    }
    if option == "mask":
        active = 1 + rank
        given["mask"] = torch.arange(batch) < active
        given["expert_ids"][active:] = 0  # padding repeats an id
    if batch == 0:
        given["mask"] = torch.empty(0, dtype=torch.bool)
    return given


def call_like_a_framework(rank: int, num_ranks: int, option: str, quant_mode: int, comm_alg: str) -> Tensors:
    given = tensors_of(rank, option)
    with fresh():
        name = ops.group_name()
        common: dict[str, Any] = {
            "group_ep": name,
            "ep_world_size": num_ranks,
            "ep_rank_id": rank,
            "moe_expert_num": num_experts_of(option),
            "group_tp": name,
            "tp_world_size": 1,
            "tp_rank_id": 0,
            "expert_shard_type": 0,
            "shared_expert_rank_num": 0,
            "global_bs": TOKENS * num_ranks if option in DIFFER else 0,
            "x_active_mask": given.get("mask"),
            "comm_alg": comm_alg,
        }
        rows, scales, assist, nums, counts, tp_counts, _ = ops.npu_moe_distribute_dispatch_v2(
            x=given["x"],
            expert_ids=given["expert_ids"],
            scales=None,
            quant_mode=quant_mode,
            expert_token_nums_type=1,
            **common,
        )
        y = experts_of(rows, scales if quant_mode else None)
        shared = given["shared"].view(2, TOKENS // 2, HIDDEN) if "3-D" in option else None
        results = [
            ops.npu_moe_distribute_combine_v2(
                expand_x=y,
                expert_ids=given["expert_ids"],
                assist_info_for_combine=assist,
                expert_scales=given["weights"],
                ep_send_counts=counts,
                tp_send_counts=tp_send_counts,
                expand_scales=None,
                shared_expert_x=shared,
                **common,
            )
            for tp_send_counts in (tp_counts, torch.empty(1, dtype=torch.int32))
        ]
        assert torch.equal(*(result[: given_rows(given)] for result in results))
        total = int(counts[-1])
        return {"rows": rows[:total], "scales": scales[:total], "nums": nums, "out": results[0]}


def given_rows(given: Tensors) -> int:
    """Tokens whose outputs are written."""
    return int(given["mask"].sum()) if "mask" in given else len(given["x"])


@pytest.mark.parametrize("comm_alg", ["", "fullmesh_v2"])
@pytest.mark.parametrize("quant_mode", [0, 2])
@pytest.mark.parametrize("option", OPTIONS)
def test_calls_of_serving_frameworks(ranks: Groups, option: str, quant_mode: int, comm_alg: str) -> None:
    found = ranks(RANKS).run(call_like_a_framework, option, quant_mode, comm_alg)
    everyone = [tensors_of(rank, option) for rank in range(RANKS)]
    deployment = reference.Deployment(ep_world_size=RANKS, moe_expert_num=num_experts_of(option))
    dispatched = reference.dispatch_all(
        deployment,
        [
            reference.DispatchInputs(
                x=given["x"], expert_ids=given["expert_ids"], x_active_mask=given.get("mask")
            )
            for given in everyone
        ],
        row_format=BY_QUANT_MODE[quant_mode],
    )
    combined = reference.combine_all(
        deployment,
        dispatched,
        [
            reference.CombineInputs(
                expand_x=experts_of(own.expand_x, own.dynamic_scales),
                expert_ids=given["expert_ids"],
                expert_scales=given["weights"],
                x_active_mask=given.get("mask"),
                shared_expert_x=given["shared"] if "3-D" in option else None,
            )
            for given, own in zip(everyone, dispatched, strict=True)
            if own is not None
        ],
    )
    for given, out, own, end in zip(everyone, found, dispatched, combined, strict=True):
        assert own is not None
        assert end is not None
        assert torch.equal(out["rows"], own.expand_x)
        if own.dynamic_scales is not None:
            assert torch.equal(out["scales"], own.dynamic_scales)
        assert torch.equal(out["nums"], own.expert_token_nums)
        assert torch.equal(out["out"][: given_rows(given)], end.x)
