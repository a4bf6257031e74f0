"""Public functions that no other rank takes part in, and the constructor, as chains of one step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_triton import EPBuffer, Tuning
from moe_triton import torch_npu_ops as ops
from tests.bad_calls.chains import HIDDEN, Arguments, Outputs, Step, accepted

GROUP_NAME = "experts of the bad calls"


def steps(num_ranks: int, buffer: EPBuffer, folder: str) -> list[Step]:
    """Each of them. The buffer has dispatched and combined.

    Args:
        num_ranks: of the group.
        buffer: whose methods are called.
        folder: for a trace.
    """

    def step(function: Any, good: Arguments, **labels: str) -> Step:
        return Step(function, lambda outputs: good, accepted(**labels))

    sizes = {"num_max_tokens_per_rank": 4, "hidden": 7168, "num_topk": 2, "num_experts": 2 * num_ranks}
    shared = {"num_shared_experts": 0, "num_shared_ranks": 0, "comm_alg": "fullmesh_v1"}
    settings = {
        "relaxed": True,
        "timeout_s": 20.0,
        "num_blocks": 1,
        "tuning": Tuning(),
        "trace": f"{folder}/trace.json",
    }
    return [
        step(EPBuffer.get_buffer_size_hint, {"num_ranks": num_ranks, **sizes, **shared}),
        step(buffer.expert_output, {"dtype": torch.bfloat16}),
        step(buffer.durations_us, {"operator": "dispatch"}),
        step(buffer.measure, {"on": True}),
        step(ops.configure, settings, timeout_s="too small", trace="unknown", ranks_per_server="a list"),
        step(ops.register_group, {"name": GROUP_NAME, "group": dist.group.WORLD}, name="unknown"),
        step(ops.group_name, {"group": dist.group.WORLD}),
        step(ops.process_group, {"name": ops.group_name()}),
        # Of a group without windows there is nothing to wait for, or to give back.
        step(ops.synchronize, {"name": ops.group_name()}, name="unknown; over-long"),
        step(ops.query_mask, {"name": ops.group_name(), "out": torch.zeros(num_ranks, dtype=torch.int32)}),
        step(ops.query_fault, {"name": ops.group_name()}),
        step(ops.status, {"name": ops.group_name()}),
        step(ops.flight, {"name": ops.group_name()}),
        step(ops.metrics, {"name": ops.group_name()}),
        step(ops.clean_mask, {"name": ops.group_name()}),
        step(ops.update_mask, {"name": ops.group_name(), "rank": dist.get_rank(), "masked": False}),
        step(ops.release, {"name": ops.group_name()}, name="unknown; over-long"),
    ]


def construction(num_ranks: int, folder: str) -> Step:
    """The constructor, with all that it takes."""

    def good(outputs: Outputs) -> Arguments:
        return {
            "group": dist.group.WORLD,
            "num_max_tokens_per_rank": 4,
            "hidden": HIDDEN,
            "num_topk": 2,
            "num_experts": 2 * num_ranks,
            "num_shared_experts": 0,
            "num_shared_ranks": 0,
            "num_bytes": 1 << 24,
            "product": "A3",
            "comm_alg": "",
            "relaxed": True,
            "backend": "cpu",
            "kernels": "triton",
            "num_blocks": 1,
            "tuning": Tuning(),
            "timeout_s": 20.0,
            "explicitly_destroy": False,
            "trace": f"{folder}/trace.json",
        }

    # A window may take any number of bytes, and rank 1 may be lost.
    labels = {"num_bytes": "huge", "trace": "unknown", "timeout_s": "too small", "lost_ranks": "a list"}
    return Step(EPBuffer, good, accepted(**labels))
