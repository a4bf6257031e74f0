"""Calls of dispatch, whole and in halves."""

from __future__ import annotations

from typing import Any

import torch

from moe_triton.core import plain_tensors
from moe_triton.torch_npu_ops import settings
from moe_triton.torch_npu_ops.calls.common import (
    NOT_GIVEN,
    check_input,
    check_plain,
    check_required,
    check_token_matrix,
    find,
    keep,
    output_key,
    ready,
    shape_key,
    unless_empty,
)
from moe_triton.torch_npu_ops.declared import check_attributes
from moe_triton.torch_npu_ops.planning import settled
from moe_triton.torch_npu_ops.plans.dispatch import DispatchAttributes, DispatchPlan, check_tensors, make_plan
from moe_triton.torch_npu_ops.plans.elastic import words_of

TENSORS = (
    "x",
    "expert_ids",
    "scales",
    "x_active_mask",
    "expert_scales",
    "elastic_info",
    "performance_info",
)

_plans: dict[tuple[Any, ...], DispatchPlan] = {}


def clear_plans() -> None:
    """Forgets every plan, as when a group's windows are given back."""
    _plans.clear()


def plan_dispatch(
    version: int,
    operator: str,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scales: torch.Tensor | None,
    x_active_mask: torch.Tensor | None,
    expert_scales: torch.Tensor | None,
    elastic_info: torch.Tensor | None,
    performance_info: torch.Tensor | None,
    attributes: tuple[Any, ...],
) -> DispatchPlan:
    """The plan of a dispatch, from the cache where its shape has come before.

    Args:
        version: of the operator, 1 or 2.
        operator: "dispatch", or a half of it.
        x, expert_ids, scales, x_active_mask, expert_scales, elastic_info, performance_info: as in the call.
        attributes: the call's attributes, in the order of `DispatchAttributes` from group_ep on.

    Raises:
        ArgumentError: an argument breaks a rule; it has the status code.
    """
    described = settings.host().describe(
        x, expert_ids, scales, x_active_mask, expert_scales, elastic_info, performance_info
    )
    if described is None:
        named = (x, expert_ids, scales, x_active_mask, expert_scales, elastic_info, performance_info)
        check_required(x=x, expert_ids=expert_ids)
        check_plain(zip(TENSORS, named, strict=True))
        described = plain_tensors.describe(*named)
    words = None if elastic_info is None else words_of(elastic_info)
    shapes = (version, operator, described, words)
    plan = find(_plans, shapes, attributes)
    if plan is not None:
        return settled(plan)
    attributes = check_attributes(attributes, DispatchAttributes)
    plan = find(_plans, shapes, attributes)  # now that numpy's integers are Python's
    if plan is not None:
        return settled(plan)
    check_required(x=x, expert_ids=expert_ids)
    check_token_matrix("x", x)
    check_input("expert_ids", expert_ids, (x.shape[0], "K"), torch.int32)
    keys = map(shape_key, (x, expert_ids, scales, x_active_mask, expert_scales))
    output = NOT_GIVEN if performance_info is None else output_key(performance_info)
    given = (version, operator, *keys, words, output, *attributes, settings.number())
    made = DispatchAttributes(*given)
    plan = make_plan(made)
    check_tensors(
        made,
        {
            "scales": ready(scales),
            "x_active_mask": ready(x_active_mask),
            "expert_scales": ready(expert_scales),
            "performance_info": performance_info,
        },
    )
    keep(_plans, shapes, attributes, plan)
    return settled(plan)


def run_dispatch(
    version: int,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scales: torch.Tensor | None,
    x_active_mask: torch.Tensor | None,
    expert_scales: torch.Tensor | None,
    elastic_info: torch.Tensor | None,
    performance_info: torch.Tensor | None,
    attributes: tuple[Any, ...],
) -> tuple[torch.Tensor, ...]:
    """Plans and executes a whole dispatch."""
    expert_scales = unless_empty(expert_scales)
    plan = plan_dispatch(
        version,
        "dispatch",
        x,
        expert_ids,
        scales,
        x_active_mask,
        expert_scales,
        elastic_info,
        performance_info,
        attributes,
    )
    return plan.execute(
        x.contiguous(),
        expert_ids.contiguous(),
        scales=ready(scales),
        mask=ready(x_active_mask),
        expert_scales=ready(expert_scales),
        performance_info=performance_info,
    )
