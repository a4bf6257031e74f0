"""Chains of calls, whose arguments are all given: what a bad call differs from in one of them.

Every rank makes the calls of a chain in order. What a step returns goes into the arguments of the next ones,
and the last one's result depends on everything that was passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_triton import EPBuffer
from moe_triton import torch_npu_ops as ops
from moe_triton.tools.selftest.cases import experts_of, inputs_of, smooth_scales_of
from tests.distributed.cases import small_case
from tests.distributed.workers import make_buffer
from tests.patience import seconds

HIDDEN = 64
Outputs = list[Any]
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One call of a chain.

    Attributes:
        function: what is called.
        arguments: all that it takes, by name, from what the steps before it returned.
        accepted: argument and label of what is no bad value here, by the documentation.
    """

    function: Callable[..., Any]
    arguments: Callable[[Outputs], Arguments]
    accepted: frozenset[tuple[str, str]] = frozenset()

    @property
    def name(self) -> str:
        """For labels."""
        return self.function.__qualname__.removeprefix("_")


Chain = Sequence[Step]


def accepted(**labels: str) -> frozenset[tuple[str, str]]:
    """Argument and label, from labels by argument, separated by semicolons."""
    return frozenset((name, label) for name, text in labels.items() for label in text.split("; "))


# -1 and more where there is no tensor-parallel peer.
NO_PEER = {"tp_rank_id": "-1; huge", "group_tp": "unknown; over-long"}
ANY_SHAPE = "flat; with a dimension in front; with a dimension behind; longer; shorter; wider"
ANY_DTYPE = "of torch.float64; of torch.int16; of torch.complex64; of torch.uint8; quantised"
# Given, and not looked at but for whether it is a tensor.
UNREAD = dict.fromkeys(("tp_send_counts", "expand_scales"), f"{ANY_SHAPE}; {ANY_DTYPE}")
# More experts per token, where nothing contradicts it: a call of other sizes, on all ranks.
OTHER_SIZES = {"expert_ids": "wider"}
# What a combine's rows and indices may have more of.
MORE = {"ep_send_counts": "longer; wider", "expand_x": "longer"}


def chains(rank: int, num_ranks: int, buffer: EPBuffer) -> dict[str, Chain]:
    """Every chain that moves tokens, by name."""
    return {
        "EPBuffer": _of_buffer(rank, num_ranks, buffer),
        "V1": _of_version_1(rank, num_ranks),
        "V2": _of_version_2(rank, num_ranks),
        "norm": _of_norm(rank, num_ranks),
        "halves": _of_halves(rank, num_ranks),
        "group": _of_group(num_ranks),
    }


def new_buffer(num_ranks: int) -> EPBuffer:
    """What "EPBuffer" calls."""
    return make_buffer(small_case(num_ranks), timeout_s=seconds(20.0))


def _of_buffer(rank: int, num_ranks: int, buffer: EPBuffer) -> Chain:
    case = small_case(num_ranks, quantize="int8", smooth=True)
    own = inputs_of(case, rank, 0)

    def dispatch(outputs: Outputs) -> Arguments:
        return {
            "x": own.x,
            "topk_idx": own.topk_idx,
            "topk_weights": own.topk_weights,
            "quantize": "int8",
            "smooth_scales": smooth_scales_of(case),
        }

    def combine(outputs: Outputs) -> Arguments:
        y = experts_of(case, rank, outputs[0].tokens)
        return {"y": y, "topk_weights": own.topk_weights, "handle": outputs[0].handle}

    # A count of rows larger than those received is kept to, and legal.
    counts = accepted(num_recv_tokens="7")
    # Rows beyond those received need not be there, and may be.
    fits = accepted(y="longer; shorter")
    return [Step(buffer.dispatch, dispatch, counts), Step(buffer.combine, combine, fits)]


def _tensors(rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    own = inputs_of(small_case(num_ranks), rank, 0)
    return {"x": own.x, "ids": own.topk_idx, "weights": own.topk_weights}


def _group(rank: int, num_ranks: int) -> Arguments:
    return {
        "group_ep": ops.group_name(),
        "ep_world_size": num_ranks,
        "ep_rank_id": rank,
        "moe_expert_num": 2 * num_ranks,
    }


def _scales(num_ranks: int, shared: int = 0) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, (shared + 2 * num_ranks) * HIDDEN).view(-1, HIDDEN)


def _results(rank: int, expand_x: torch.Tensor, dynamic_scales: torch.Tensor) -> torch.Tensor:
    rows = expand_x.float() * dynamic_scales[:, None]
    # Rows that were not received are undefined, and may be anything that is not read.
    return torch.nan_to_num(rows * (0.25 + rank) + rank, 0.0, 0.0, 0.0).bfloat16()


def _elastic(num_ranks: int) -> torch.Tensor:
    return torch.zeros(4 + 2 * num_ranks, dtype=torch.int32)


def _of_version_1(rank: int, num_ranks: int) -> Chain:
    own, group = _tensors(rank, num_ranks), _group(rank, num_ranks)

    def dispatch(outputs: Outputs) -> Arguments:
        tensors = {"x": own["x"], "expert_ids": own["ids"], "expert_scales": own["weights"]}
        return {**tensors, **group, "scales": _scales(num_ranks), "quant_mode": 2}

    def combine(outputs: Outputs) -> Arguments:
        rows, scales, index, _, counts, _, _ = outputs[0]
        return {
            "expand_x": _results(rank, rows, scales),
            "expert_ids": own["ids"],
            "expand_idx": index,
            "ep_send_counts": counts,
            "expert_scales": own["weights"],
            **group,
        }

    return [
        Step(ops.npu_moe_distribute_dispatch, dispatch, accepted(**NO_PEER)),
        Step(
            ops.npu_moe_distribute_combine,
            combine,
            accepted(**{**NO_PEER, **MORE, **UNREAD, "expand_x": "longer; shorter"}),
        ),
    ]


def _of_version_2(rank: int, num_ranks: int) -> Chain:
    own, group = _tensors(rank, num_ranks), _group(rank, num_ranks)
    x, mask = own["x"], torch.ones(len(own["x"]), dtype=torch.bool)
    special = {"zero_expert_num": 1, "copy_expert_num": 1, "const_expert_num": 1}

    def common() -> Arguments:
        return {
            **group,
            **special,
            "x_active_mask": mask,
            "elastic_info": _elastic(num_ranks),
            "performance_info": torch.zeros(num_ranks, dtype=torch.int64),
        }

    def dispatch(outputs: Outputs) -> Arguments:
        tensors = {"x": x, "expert_ids": own["ids"], "expert_scales": own["weights"]}
        return {**tensors, **common(), "scales": _scales(num_ranks), "quant_mode": 2}

    def combine(outputs: Outputs) -> Arguments:
        rows, scales, index, _, counts, _, expand_scales = outputs[0]
        return {
            "expand_x": _results(rank, rows, scales),
            "expert_ids": own["ids"],
            "assist_info_for_combine": index,
            "ep_send_counts": counts,
            "expert_scales": own["weights"],
            **common(),
            "shared_expert_x": x.clone(),
            "ori_x": x.clone(),
            "const_expert_alpha_1": torch.ones(1, HIDDEN).bfloat16(),
            "const_expert_alpha_2": torch.ones(1, HIDDEN).bfloat16(),
            "const_expert_v": torch.ones(1, HIDDEN).bfloat16(),
            "expand_scales": expand_scales,
        }

    def lost(outputs: Outputs) -> Arguments:
        asked = {"name": ops.group_name(), "expert_ids": own["ids"], "moe_expert_num": 2 * num_ranks}
        return {**asked, "x_active_mask": mask, "elastic_info": _elastic(num_ranks)}

    return [
        Step(ops.npu_moe_distribute_dispatch_v2, dispatch, accepted(**NO_PEER)),
        Step(ops.lost, lost),
        Step(ops.npu_moe_distribute_combine_v2, combine, _accepted_by_combine()),
    ]


def _accepted_by_combine(**more: str) -> frozenset[tuple[str, str]]:
    return accepted(
        **{
            **NO_PEER,
            **MORE,
            "assist_info_for_combine": "longer; wider",
            "expand_idx": "longer; wider",
            "shared_expert_x": "with a dimension in front",
            **UNREAD,
            **more,
        }
    )


def _of_norm(rank: int, num_ranks: int) -> Chain:
    own, group = _tensors(rank, num_ranks), _group(rank, num_ranks)
    first = _of_version_2(rank, num_ranks)[0]

    def dispatch(outputs: Outputs) -> Arguments:
        return {"x": own["x"], "expert_ids": own["ids"], **group, "quant_mode": 2}

    def norm(outputs: Outputs) -> Arguments:
        rows, scales, index, _, counts, _, _ = outputs[0]
        return {
            "expand_x": _results(rank, rows, scales),
            "expert_ids": own["ids"],
            "expand_idx": index,
            "ep_send_counts": counts,
            "expert_scales": own["weights"],
            "residual_x": own["x"][:, None].clone(),
            "gamma": torch.ones(HIDDEN).bfloat16(),
            **group,
        }

    step = Step(ops.npu_moe_distribute_combine_add_rms_norm, norm, _accepted_by_combine())
    return [Step(first.function, dispatch, accepted(**NO_PEER, **OTHER_SIZES)), step]


def _of_halves(rank: int, num_ranks: int) -> Chain:
    own, group = _tensors(rank, num_ranks), _group(rank, num_ranks)
    tokens = {"x": own["x"], "expert_ids": own["ids"], **group}
    ids = own["ids"]

    def setup(outputs: Outputs) -> Arguments:
        scales = _scales(num_ranks, shared=1)  # with a row of the shared expert that there is not
        mask = torch.ones(len(ids), dtype=torch.bool)
        return {**tokens, "scales": scales, "x_active_mask": mask, "quant_mode": 2}

    def teardown(outputs: Outputs) -> Arguments:
        y, _, ticket = outputs[0]
        return {**tokens, "y": y, "comm_cmd_info": ticket, "quant_mode": 2}

    def results(outputs: Outputs) -> torch.Tensor:
        return _results(rank, outputs[1][0], outputs[1][1])

    def combine_setup(outputs: Outputs) -> Arguments:
        index = outputs[1][2]
        return {
            "expand_x": results(outputs),
            "expert_ids": ids,
            "assist_info_for_combine": index,
            **group,
        }

    def combine_teardown(outputs: Outputs) -> Arguments:
        packed, ticket = outputs[2]
        return {
            "expand_x": results(outputs),
            "quant_expand_x": packed,
            "expert_ids": ids,
            "expand_idx": outputs[0][1],
            "expert_scales": own["weights"],
            "comm_cmd_info": ticket,
            **group,
            "x_active_mask": torch.ones(len(ids), dtype=torch.bool),
            "shared_expert_x": own["x"].clone(),
        }

    any_length = "longer; shorter; wider"
    return [
        Step(ops.npu_moe_distribute_dispatch_setup, setup, accepted(**NO_PEER, **OTHER_SIZES)),
        Step(
            ops.npu_moe_distribute_dispatch_teardown,
            teardown,
            accepted(**{**NO_PEER, **OTHER_SIZES, "y": "wider", "comm_cmd_info": any_length}),
        ),
        Step(
            ops.npu_moe_distribute_combine_setup,
            combine_setup,
            _accepted_by_combine(expert_ids="wider; shorter"),
        ),
        Step(
            ops.npu_moe_distribute_combine_teardown,
            combine_teardown,
            _accepted_by_combine(
                quant_expand_x=any_length, comm_cmd_info=any_length, expand_idx="longer; wider; shorter"
            ),
        ),
    ]


def _of_group(num_ranks: int) -> Chain:
    def barrier(outputs: Outputs) -> Arguments:
        return {
            "x_ref": torch.zeros(2, 2),
            "group": ops.group_name(),
            "world_size": num_ranks,
            "time_out": torch.full((1,), 20_000_000, dtype=torch.int32),
            "elastic_info": _elastic(num_ranks),
        }

    def reset(outputs: Outputs) -> Arguments:
        return {
            "elastic_info": _elastic(num_ranks),
            "group_ep": ops.group_name(),
            "ep_world_size": num_ranks,
            "need_sync": 1,
        }

    return [
        Step(ops._npu_distribute_barrier, barrier),
        Step(ops.npu_moe_distribute_buffer_reset, reset),
    ]
