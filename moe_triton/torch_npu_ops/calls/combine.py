"""Calls of combine, whole and with a norm at the end."""

from __future__ import annotations

from typing import Any

import torch

from moe_triton.errors import ArgumentError
from moe_triton.torch_npu_ops import settings
from moe_triton.torch_npu_ops.calls.common import (
    MAX_PLANS,
    NOT_GIVEN,
    check_group,
    check_input,
    check_optional,
    check_required,
    check_token_matrix,
    output_key,
    ready,
)
from moe_triton.torch_npu_ops.planning import settled
from moe_triton.torch_npu_ops.plans.combine import (
    CombineAttributes,
    CombinePlan,
    check_room,
    check_tensors,
    make_plan,
)
from moe_triton.torch_npu_ops.plans.elastic import words_of
from moe_triton.torch_npu_ops.plans.tensors import CombineTensors

UNUSED = (False, False, False)

_plans: dict[tuple[Any, ...], CombinePlan] = {}


def clear_plans() -> None:
    """Forgets every plan, as when a group's windows are given back."""
    _plans.clear()


def plan_combine(
    version: int,
    operator: str,
    index_name: str,
    tensors: CombineTensors,
    attributes: tuple[Any, ...],
    unused_given: tuple[bool, bool, bool] = UNUSED,
) -> CombinePlan:
    """The plan of a combine, from the cache where its shape has come before.

    Args:
        version: generation of the operator.
        operator: "combine", "combine_add_rms_norm" or a half of combine.
        index_name: what the caller knows ``tensors.routes`` as.
        tensors: as in the call.
        attributes: the call's attributes, in the order of `CombineAttributes` from group_ep on.
        unused_given: whether activation_scale, weight_scale and group_list were given.

    Raises:
        ArgumentError: an argument breaks a rule; it has the status code.
    """
    try:
        key = (
            version,
            operator,
            *[None if t is None else (t.shape, t.dtype, t.is_cpu) for t in tensors[:-2]],
            NOT_GIVEN if tensors[-2] is None else output_key(tensors[-2]),
            None if tensors[-1] is None else words_of(tensors[-1]),
            unused_given,
            *attributes,
            settings.number(),
        )
        plan = _plans.get(key)
    except (AttributeError, TypeError):  # not a tensor, or an attribute of another type: say which
        _check_given(operator, index_name, tensors)
        raise
    if plan is not None:
        return settled(plan)
    _check_given(operator, index_name, tensors)
    made = CombineAttributes(*key)
    check_token_matrix("expand_x", tensors.expand_x)
    if operator == "combine_add_rms_norm":
        check_input("expand_x", tensors.expand_x, ("A", "H"), torch.bfloat16)
    check_input("expert_ids", tensors.expert_ids, ("BS", "K"), torch.int32)
    check_group(made.group_ep, "group_ep")
    if made.tp_world_size == 2:
        check_group(made.group_tp, "group_tp")
    plan = make_plan(made)
    named = _by_name(index_name, tensors)
    others = {name: ready(t) for name, t in named.items() if name not in ("expand_x", "elastic_info")}
    check_tensors(made, {**others, "performance_info": tensors.performance_info})
    check_room(made, index_name)
    if tensors.send_counts is not None and tensors.send_counts.numel() < plan.num_entries:
        raise ArgumentError(
            "ep_send_counts",
            f"of {tensors.send_counts.numel()} elements",
            f"this rank has {plan.num_entries} pairs of local expert and source rank",
            "Pass ep_recv_counts of the matching dispatch.",
        )
    if plan.variant.exchange:
        check_required(tp_send_counts=tensors.tp_send_counts)
    if len(_plans) < MAX_PLANS:
        _plans[key] = plan
    return settled(plan)


def _by_name(index_name: str, tensors: CombineTensors) -> dict[str, torch.Tensor | None]:
    named = tensors._asdict()
    named[index_name], named["ep_send_counts"] = named.pop("routes"), named.pop("send_counts")
    return named


def _check_given(operator: str, index_name: str, tensors: CombineTensors) -> None:
    named = _by_name(index_name, tensors)
    required = ["expand_x", "expert_ids", index_name]
    if operator not in ("combine_setup", "combine_teardown"):
        required.append("ep_send_counts")
    if operator == "combine_add_rms_norm":
        required += ["residual_x", "gamma"]
    check_required(**{name: named[name] for name in required})
    check_optional(**named)


def run_combine(
    version: int,
    index_name: str,
    tensors: CombineTensors,
    attributes: tuple[Any, ...],
    unused_given: tuple[bool, bool, bool] = UNUSED,
) -> torch.Tensor:
    """Plans and executes a whole combine. Args as for `plan_combine`."""
    return plan_combine(version, "combine", index_name, tensors, attributes, unused_given).execute(tensors)


def run_add_rms_norm(
    tensors: CombineTensors,
    attributes: tuple[Any, ...],
    unused_given: tuple[bool, bool, bool],
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plans and executes a combine that ends in a residual and a norm."""
    check_required(expand_x=tensors.expand_x)
    if not norm_eps > 0:
        raise ArgumentError("norm_eps", norm_eps, "it must be positive", "Pass 1e-6.")
    plan = plan_combine(2, "combine_add_rms_norm", "expand_idx", tensors, attributes, unused_given)
    empty, batch, hidden = plan.communicator.backend.empty, plan.batch, plan.config.hidden
    y, rstd = empty((batch, 1, hidden), torch.bfloat16), empty((batch, 1, 1), torch.float32)
    x = empty((batch, 1, hidden), torch.bfloat16)
    plan.execute(tensors, {"normed": y, "rstd": rstd, "eps": plan.eps(norm_eps)}, x)
    return y, rstd, x
