"""Calls of combine, whole, in halves, and with a norm at the end."""

from __future__ import annotations

from typing import Any

import torch

from moe_triton.checks import check_tensor
from moe_triton.errors import ArgumentError
from moe_triton.torch_npu_ops import settings
from moe_triton.torch_npu_ops.calls.common import (
    MAX_PLANS,
    check_group,
    check_optional,
    check_required,
    check_token_matrix,
    output_key,
    ready,
    shape_key,
    values_key,
)
from moe_triton.torch_npu_ops.plans.combine import CombineAttributes, CombinePlan, check_tensors, make_plan

Tensors = dict[str, torch.Tensor | None]

# torch_npu's arguments, in the order of `CombineAttributes`, by the hole of the plan that they fill.
HOLES = {
    "expert_scales": "topk_weights",
    "tp_send_counts": "exchange_counts",
    "x_active_mask": "mask",
    "shared_expert_x": "shared_x",
    "ori_x": "ori_x",
    "const_expert_alpha_1": "alpha1",
    "const_expert_alpha_2": "alpha2",
    "const_expert_v": "const_v",
    "residual_x": "residual",
    "gamma": "gamma",
}

_plans: dict[tuple[Any, ...], CombinePlan] = {}


def clear_plans() -> None:
    """Forgets every plan, as when a group's windows are given back."""
    _plans.clear()


def plan_combine(
    version: int,
    operator: str,
    index_name: str,
    tensors: Tensors,
    unused_given: tuple[bool, bool, bool],
    attributes: tuple[Any, ...],
) -> CombinePlan:
    """The plan of a combine, from the cache where its shape has come before.

    Args:
        version: generation of the operator.
        operator: "combine", "combine_add_rms_norm" or a half of combine.
        index_name: "assist_info_for_combine" or "expand_idx".
        tensors: by torch_npu's argument name.
        unused_given: whether activation_scale, weight_scale and group_list were given.
        attributes: the call's attributes, in the order of `CombineAttributes` from group_ep on.

    Raises:
        ArgumentError: an argument breaks a rule; it has the status code.
    """
    t = tensors.get
    required = _required(operator, index_name)
    try:
        key = (
            version,
            operator,
            shape_key(t("expand_x")),
            shape_key(t("expert_ids")),
            shape_key(t(index_name)),
            shape_key(t("ep_send_counts")),
            *(shape_key(t(name)) for name in HOLES),
            values_key(t("elastic_info")),
            output_key(t("performance_info")),
            unused_given,
            *attributes,
            settings.current(),
        )
    except AttributeError:  # not a tensor: say which
        check_required(**{name: t(name) for name in required})
        check_optional(**tensors)
        raise
    plan = _plans.get(key)
    if plan is not None:
        return plan
    check_required(**{name: t(name) for name in required})
    made = CombineAttributes(*key)
    expand_x, ids = tensors["expand_x"], tensors["expert_ids"]
    assert expand_x is not None
    assert ids is not None
    check_token_matrix("expand_x", expand_x)
    check_tensor("expert_ids", ids.contiguous(), shape=("BS", "K"), dtypes=(torch.int32,))
    check_group(made.group_ep, "group_ep")
    check_group(made.group_tp, "group_tp")
    plan = make_plan(made, tensors.get("elastic_info"))
    not_ours = ("expand_x", "elastic_info")
    checked = {name: ready(tensor) for name, tensor in tensors.items() if name not in not_ours}
    checked["performance_info"] = t("performance_info")
    check_tensors(made, checked)
    if plan.variant.exchange:
        check_required(tp_send_counts=t("tp_send_counts"))
    if len(_plans) < MAX_PLANS:
        _plans[key] = plan
    return plan


def _required(operator: str, index_name: str) -> tuple[str, ...]:
    if operator in ("combine_setup", "combine_teardown"):
        return ("expand_x", "expert_ids", index_name)
    if operator == "combine_add_rms_norm":
        return ("expand_x", "expert_ids", index_name, "ep_send_counts", "residual_x", "gamma")
    return ("expand_x", "expert_ids", index_name, "ep_send_counts")


def bindings_of(tensors: Tensors) -> dict[str, torch.Tensor | int]:
    """What fills the holes of a combine's plan, from torch_npu's arguments."""
    bindings: dict[str, torch.Tensor | int] = {}
    for name, hole in HOLES.items():
        tensor = ready(tensors.get(name))
        if tensor is not None:
            bindings[hole] = tensor
    recorded = tensors.get("performance_info")
    if recorded is not None:
        bindings["performance_info"] = recorded
    return bindings


def run_combine(
    version: int,
    index_name: str,
    tensors: Tensors,
    unused_given: tuple[bool, bool, bool],
    attributes: tuple[Any, ...],
) -> torch.Tensor:
    """Plans and executes a whole combine. Args as for `plan_combine`."""
    plan = plan_combine(version, "combine", index_name, tensors, unused_given, attributes)
    return _execute(plan, index_name, tensors)


def _execute(
    plan: CombinePlan,
    index_name: str,
    tensors: Tensors,
    extra: dict[str, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Executes a plan. Extra are bindings that are no argument of the caller's; out is None for a new one."""
    bindings = bindings_of(tensors)
    if extra:
        bindings.update(extra)
    expand_x, ids = tensors["expand_x"], tensors["expert_ids"]
    index, counts = tensors[index_name], tensors["ep_send_counts"]
    assert expand_x is not None
    assert ids is not None
    assert index is not None
    assert counts is not None
    return plan.execute(
        expand_x.contiguous(), ids.contiguous(), index.contiguous(), counts.contiguous(), bindings, out
    )


def run_add_rms_norm(
    tensors: Tensors,
    unused_given: tuple[bool, bool, bool],
    attributes: tuple[Any, ...],
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plans and executes a combine that ends in a residual and a norm."""
    check_required(expand_x=tensors["expand_x"])
    expand_x = tensors["expand_x"]
    assert expand_x is not None
    check_tensor("expand_x", expand_x.contiguous(), shape=("A", "H"), dtypes=(torch.bfloat16,))
    if not norm_eps > 0:
        raise ArgumentError("norm_eps", norm_eps, "it must be positive", "Pass 1e-6.")
    plan = plan_combine(2, "combine_add_rms_norm", "expand_idx", tensors, unused_given, attributes)
    empty, batch, hidden = plan.communicator.backend.empty, plan.batch, plan.config.hidden
    y, rstd = empty((batch, 1, hidden), torch.bfloat16), empty((batch, 1, 1), torch.float32)
    x = empty((batch, 1, hidden), torch.bfloat16)
    eps = torch.tensor([norm_eps], dtype=torch.float32)
    _execute(plan, "expand_idx", tensors, {"normed": y, "rstd": rstd, "eps": eps}, x)
    return y, rstd, x
