"""Calls of combine, whole and with a norm at the end."""

from __future__ import annotations

from typing import Any

import torch

from moe_triton.core import plain_tensors
from moe_triton.core.checks import check_number
from moe_triton.core.errors import ArgumentError
from moe_triton.torch_npu_ops import settings
from moe_triton.torch_npu_ops.calls.common import (
    NOT_GIVEN,
    check_input,
    check_optional,
    check_plain,
    check_required,
    check_token_matrix,
    find,
    keep,
    output_key,
    ready,
    shape_key,
)
from moe_triton.torch_npu_ops.declared import check_attributes
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

MIN_EPS, MAX_EPS = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max
UNUSED = (False, False, False)
# Tensors that are given and not looked at; tp_send_counts is not where there is no peer.
UNREAD = ("tp_send_counts", "expand_scales")

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
    unread: tuple[torch.Tensor | None, ...] = (),
) -> CombinePlan:
    """The plan of a combine, from the cache where its shape has come before.

    Args:
        version: of the operator, 1 or 2.
        operator: "combine", "combine_add_rms_norm" or a half of combine.
        index_name: what the caller knows ``tensors.routes`` as.
        tensors: as in the call.
        attributes: the call's attributes, in the order of `CombineAttributes` from group_ep on.
        unused_given: whether activation_scale, weight_scale and group_list were given.
        unread: those of `UNREAD`, as in the call.

    Raises:
        ArgumentError: an argument breaks a rule; it has the status code.
    """
    described = settings.host().describe(*tensors, *unread)
    if described is None:
        _check_given(operator, index_name, tensors)
        check_plain([*_by_name(index_name, tensors).items(), *zip(UNREAD, unread, strict=False)])
        described = plain_tensors.describe(*tensors)
    words = None if tensors.elastic_info is None else words_of(tensors.elastic_info)
    shapes = (version, operator, described, words, unused_given)
    plan = find(_plans, shapes, attributes)
    if plan is not None:
        return settled(plan)
    _check_given(operator, index_name, tensors)
    attributes = check_attributes(attributes, CombineAttributes)
    plan = find(_plans, shapes, attributes)  # now that numpy's integers are Python's
    if plan is not None:
        return settled(plan)
    output = NOT_GIVEN if tensors.performance_info is None else output_key(tensors.performance_info)
    keys = map(shape_key, tensors[:-2])
    given = (version, operator, *keys, output, words, unused_given, *attributes, settings.number())
    made = CombineAttributes(*given)
    check_token_matrix("expand_x", tensors.expand_x)
    if operator == "combine_add_rms_norm":
        check_input("expand_x", tensors.expand_x, ("A", "H"), torch.bfloat16)
    check_input("expert_ids", tensors.expert_ids, ("BS", "K"), torch.int32)
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
    keep(_plans, shapes, attributes, plan)
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
    unread: tuple[torch.Tensor | None, ...],
    unused_given: tuple[bool, bool, bool] = UNUSED,
) -> torch.Tensor:
    """Plans and executes a whole combine. Args as for `plan_combine`."""
    plan = plan_combine(version, "combine", index_name, tensors, attributes, unused_given, unread)
    return plan.execute(tensors)


def run_add_rms_norm(
    tensors: CombineTensors,
    attributes: tuple[Any, ...],
    unread: tuple[torch.Tensor | None, ...],
    unused_given: tuple[bool, bool, bool],
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plans and executes a combine that ends in a residual and a norm."""
    check_required(expand_x=tensors.expand_x)
    norm_eps = check_number("norm_eps", norm_eps)
    if not MIN_EPS <= norm_eps <= MAX_EPS:
        rule = "it must be positive, and a number of fp32"
        raise ArgumentError("norm_eps", norm_eps, rule, "Pass 1e-6.")
    plan = plan_combine(2, "combine_add_rms_norm", "expand_idx", tensors, attributes, unused_given, unread)
    empty, batch, hidden = plan.communicator.backend.empty, plan.batch, plan.config.hidden
    y, rstd = empty((batch, 1, hidden), torch.bfloat16), empty((batch, 1, 1), torch.float32)
    x = empty((batch, 1, hidden), torch.bfloat16)
    plan.execute(tensors, {"normed": y, "rstd": rstd, "eps": plan.eps(norm_eps)}, x)
    return y, rstd, x
