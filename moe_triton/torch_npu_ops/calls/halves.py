"""Calls of the halves: setup sends, teardown waits and arranges or sums.

What a setup returns besides is a ticket: teardown takes only that of the setup in flight. Everything else
that teardown needs is in the windows, so the buffers that torch_npu's setup packs its rows into have their
documented shapes here and no contents. Where the host does not read device memory, the ticket has none
either: which setup is in flight is known without it.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_triton.core.checks import check_tensor
from moe_triton.core.errors import ArgumentError, BufferStateError
from moe_triton.layout import TRAILER_MARK, TRAILER_WORDS
from moe_triton.runtime.communicator import Communicator
from moe_triton.torch_npu_ops.calls.combine import plan_combine
from moe_triton.torch_npu_ops.calls.common import ready
from moe_triton.torch_npu_ops.calls.dispatch import plan_dispatch
from moe_triton.torch_npu_ops.plans import halves
from moe_triton.torch_npu_ops.plans.base import OperatorPlan
from moe_triton.torch_npu_ops.plans.tensors import CombineTensors

Tensor = torch.Tensor

TICKET_WORDS = 2


def run_dispatch_setup(
    x: Tensor,
    expert_ids: Tensor,
    scales: Tensor | None,
    x_active_mask: Tensor | None,
    attributes: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Sends a dispatch's rows and flags."""
    plan = plan_dispatch(
        2, "dispatch_setup", x, expert_ids, scales, x_active_mask, None, None, None, attributes
    )
    communicator = plan.communicator
    shapes = halves.dispatch_setup(
        (plan.batch, plan.config.hidden, plan.config.num_topk),
        plan.attributes.x[1],
        plan.config.num_ranks,
        plan.config.experts_on(plan.attributes.ep_rank_id),
        plan.attributes.shared_expert_num,
        plan.variant.quantize,
    )
    if scales is not None:
        # Those of shared experts that no rank holds have no row in our tables.
        scales = scales[plan.attributes.num_shared_scales - plan.config.num_shared_experts :]
    empty = communicator.backend.empty
    y, expand_idx, _ = (empty(shape, dtype) for shape, dtype in shapes)
    info = _ticket(communicator, "dispatch", shapes[2][0][0])
    bindings = plan.sending(
        communicator, x.contiguous(), expert_ids.contiguous(), ready(scales), ready(x_active_mask), None
    )
    communicator.run(plan.variant, {**bindings, "expand_idx": expand_idx}, "setup")
    return y, expand_idx, info


def run_dispatch_teardown(
    x: Tensor, y: Tensor, expert_ids: Tensor, comm_cmd_info: Tensor, attributes: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Waits for a dispatch's rows and arranges them."""
    plan = plan_dispatch(2, "dispatch_teardown", x, expert_ids, None, None, None, None, None, attributes)
    communicator = _of_setup(plan, "dispatch", quantize=plan.variant.quantize, dtype=plan.variant.dtype)
    results = plan.config.num_topk + plan.attributes.shared_expert_num
    check_tensor(
        "y",
        y,
        shape=(plan.batch * results, "Hs"),
        dtypes=(x.dtype, torch.int8),
        device=communicator.backend.device,
    )
    _check_ticket(communicator, "dispatch", comm_cmd_info)
    outputs = plan.outputs(communicator)
    communicator.run(plan.variant, plan.arranging(outputs), "teardown")
    expand_x, dynamic_scales, index, nums, _, _, _ = outputs
    return expand_x, dynamic_scales, index, nums


def run_combine_setup(tensors: CombineTensors, attributes: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Sends a combine's rows and flags."""
    name = "assist_info_for_combine"
    plan = plan_combine(2, "combine_setup", name, tensors, attributes)
    communicator = plan.communicator
    expand_x, index = tensors.expand_x.contiguous(), tensors.routes.contiguous()
    first = 3 * communicator.capacity
    backend = communicator.backend
    if not backend.is_asynchronous and backend.read_int32(index, first) != TRAILER_MARK:
        raise ArgumentError(
            name,
            f"one of shape {tuple(index.shape)} without a number of rows",
            "it is dispatch_v2's or dispatch_teardown's output, unchanged",
            "Pass that tensor whole.",
        )
    counts = _counts_ending(communicator, index, first + TRAILER_WORDS)
    rows, hidden = expand_x.shape
    shapes = halves.combine_setup((rows, hidden), plan.config.num_ranks)
    info = _ticket(communicator, "combine", shapes[1][0][0])
    communicator.run(plan.variant, plan.sending(communicator, expand_x, index, counts), "setup")
    return communicator.backend.empty(*shapes[0]), info


def run_combine_teardown(
    tensors: CombineTensors, comm_cmd_info: Tensor, quant_expand_x: Tensor, attributes: tuple[Any, ...]
) -> Tensor:
    """Waits for a combine's rows and sums them."""
    plan = plan_combine(2, "combine_teardown", "expand_idx", tensors, attributes)
    quantized = plan.variant.block_quantize
    communicator = _of_setup(plan, "combine", block_quantize=quantized, dtype=plan.variant.dtype)
    device = communicator.backend.device
    check_tensor("quant_expand_x", quant_expand_x, shape=("A", "Hs"), dtypes=(torch.int8,), device=device)
    _check_ticket(communicator, "combine", comm_cmd_info)
    bindings = plan.summing(communicator, tensors, None)
    communicator.run(plan.variant, bindings, "teardown")
    return bindings["out"]  # type: ignore[no-any-return]


def _counts_ending(communicator: Communicator, index: Tensor, end: int) -> Tensor | int:
    """Running totals whose last one is that before ``end``: the plan reads that one, and no other."""
    entries = communicator.site.num_entries
    if communicator.backend.is_asynchronous:
        # Their address, as if they stood there: a copy would be one more launch.
        return index.data_ptr() + (end - entries) * index.element_size()
    counts = torch.zeros(entries, dtype=torch.int32)
    counts[-1] = index[end - 1]
    return counts


def _ticket(communicator: Communicator, operator: str, words: int) -> Tensor:
    if communicator.backend.is_asynchronous:
        return communicator.backend.empty((words,), torch.int32)
    info = torch.zeros(words, dtype=torch.int32)
    info[0], info[1] = TRAILER_MARK, communicator.counts[operator] & 0x7FFFFFFF
    return info


def _check_ticket(communicator: Communicator, operator: str, info: Tensor) -> None:
    backend = communicator.backend
    check_tensor("comm_cmd_info", info, shape=("n",), dtypes=(torch.int32,), device=backend.device)
    if backend.is_asynchronous:
        return
    number = communicator.counts[operator] & 0x7FFFFFFF
    have = info[:TICKET_WORDS].tolist()
    if have != [TRAILER_MARK, number]:
        raise ArgumentError(
            "comm_cmd_info",
            f"that of {operator} {have[1]}" if have[:1] == [TRAILER_MARK] else f"one that begins with {have}",
            f"{operator} {number} is in flight",
            f"Pass what its {operator}_setup returned.",
        )


def _of_setup(plan: OperatorPlan[Any], operator: str, **expected: object) -> Communicator:
    """The communicator of a plan, where a setup with the same attributes is in flight.

    None is made: its ranks would wait for those that call teardown as they set it up.

    Raises:
        BufferStateError: there is none.
        ArgumentError: it was made with others.
    """
    setup = plan.communicator.in_flight(operator) if plan.access.is_made else None
    if setup is None:
        raise BufferStateError(
            f"no {operator} of this group and shape is set up. Call {operator}_setup first, with the same "
            f"attributes and shapes."
        )
    names = {"quantize": "quant_mode", "block_quantize": "comm_quant_mode", "dtype": "x"}
    for field, value in expected.items():
        if getattr(setup, field) != value:
            raise ArgumentError(
                names[field],
                f"not what {operator}_setup had ({field} {getattr(setup, field)})",
                "both halves take the same attributes",
                "Pass the same to both.",
            )
    return plan.communicator
