"""What stands between the public functions and the plans: plans by shape, tensors made ready, outputs.

Functions here take every argument of the newest generation; a public function passes what its own
generation lacks as the default.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_triton.checks import check_tensor
from moe_triton.errors import INVALID_ARGUMENT, ArgumentError
from moe_triton.torch_npu_ops import combine as combines
from moe_triton.torch_npu_ops import dispatch as dispatches
from moe_triton.torch_npu_ops import settings

FLOATS = (torch.bfloat16, torch.float16)
# More shapes than a server has; a plan is a few small objects.
MAX_PLANS = 4096

_dispatch_plans: dict[tuple[Any, ...], dispatches.DispatchPlan] = {}
_combine_plans: dict[tuple[Any, ...], combines.CombinePlan] = {}


def clear_plans() -> None:
    """Forgets every plan, as when a group's windows are given back."""
    _dispatch_plans.clear()
    _combine_plans.clear()


def _key(tensor: Any) -> Any:
    """Shape and dtype of a tensor, None for none. The shape stays a torch.Size, which equals its tuple."""
    return None if tensor is None else (tensor.shape, tensor.dtype)


def _ready(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def _check_required(**tensors: Any) -> None:
    for name, value in tensors.items():
        check_tensor_type(name, value)


def check_tensor_type(name: str, value: Any) -> None:
    """Checks that a required argument is a tensor.

    Raises:
        ArgumentError: it is None (161001) or something else (161002).
    """
    if not isinstance(value, torch.Tensor):
        check_tensor(name, value, shape=(), dtypes=())


def _check_optional(**tensors: Any) -> None:
    for name, value in tensors.items():
        if value is not None:
            check_tensor_type(name, value)


def _check_token_matrix(name: str, value: torch.Tensor) -> None:
    check_tensor(name, value.contiguous(), shape=("BS", "H"), dtypes=FLOATS)


def _check_group(name: Any, argument: str) -> None:
    if not isinstance(name, str):
        raise ArgumentError(
            argument,
            repr(name),
            "it is the name of a group",
            "Pass group_name(group).",
            code=INVALID_ARGUMENT,
        )


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
) -> dispatches.DispatchPlan:
    """The plan of a dispatch, from the cache where its shape has come before.

    Args:
        version: generation of the operator.
        operator: "dispatch", or a half of it.
        x, expert_ids, scales, x_active_mask, expert_scales, elastic_info, performance_info: as in the call.
        attributes: the call's attributes, in the order of `DispatchAttributes` from group_ep on.

    Raises:
        ArgumentError: an argument breaks a rule; it has the status code.
    """
    key = (
        version,
        operator,
        _key(x),
        _key(expert_ids),
        _key(scales),
        _key(x_active_mask),
        _key(expert_scales),
        None if elastic_info is None else tuple(elastic_info.tolist()),
        performance_info is not None,
        *attributes,
        settings.current(),
    )
    plan = _dispatch_plans.get(key)
    if plan is not None:
        return plan
    _check_required(x=x, expert_ids=expert_ids)
    _check_token_matrix("x", x)
    check_tensor("expert_ids", expert_ids.contiguous(), shape=(x.shape[0], "K"), dtypes=(torch.int32,))
    made = dispatches.DispatchAttributes(*key)
    _check_group(made.group_ep, "group_ep")
    _check_group(made.group_tp, "group_tp")
    plan = dispatches.make_plan(made, elastic_info)
    tensors = {
        "scales": scales,
        "x_active_mask": x_active_mask,
        "expert_scales": expert_scales,
        "performance_info": performance_info,
    }
    dispatches.check_tensors(made, {name: _ready(t) for name, t in tensors.items()})
    if len(_dispatch_plans) < MAX_PLANS:
        _dispatch_plans[key] = plan
    return plan


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
    _check_optional(
        scales=scales,
        x_active_mask=x_active_mask,
        expert_scales=expert_scales,
        elastic_info=elastic_info,
        performance_info=performance_info,
    )
    _check_required(x=x, expert_ids=expert_ids)
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
        scales=_ready(scales),
        mask=_ready(x_active_mask),
        expert_scales=_ready(expert_scales),
        performance_info=performance_info,
    )


def plan_combine(
    version: int,
    operator: str,
    tensors: dict[str, torch.Tensor | None],
    unused_given: tuple[bool, bool, bool],
    attributes: tuple[Any, ...],
) -> combines.CombinePlan:
    """The plan of a combine, from the cache where its shape has come before.

    Args:
        version: generation of the operator.
        operator: "combine", "combine_add_rms_norm" or a half of combine.
        tensors: by torch_npu's argument name.
        unused_given: whether activation_scale, weight_scale and group_list were given.
        attributes: the call's attributes, in the order of `CombineAttributes` from group_ep on.

    Raises:
        ArgumentError: an argument breaks a rule; it has the status code.
    """
    t = tensors.get
    elastic_info = t("elastic_info")
    key = (
        version,
        operator,
        _key(t("expand_x")),
        _key(t("expert_ids")),
        _key(t("expert_scales")),
        _key(t("x_active_mask")),
        _key(t("shared_expert_x")),
        _key(t("ori_x")),
        _key(t("const_expert_alpha_1")),
        _key(t("const_expert_alpha_2")),
        _key(t("const_expert_v")),
        None if elastic_info is None else tuple(elastic_info.tolist()),
        t("performance_info") is not None,
        unused_given,
        *attributes,
        settings.current(),
    )
    plan = _combine_plans.get(key)
    if plan is not None:
        return plan
    expand_x, ids = tensors["expand_x"], tensors["expert_ids"]
    assert expand_x is not None
    assert ids is not None
    _check_token_matrix("expand_x", expand_x)
    check_tensor("expert_ids", ids.contiguous(), shape=("BS", "K"), dtypes=(torch.int32,))
    made = combines.CombineAttributes(*key)
    _check_group(made.group_ep, "group_ep")
    _check_group(made.group_tp, "group_tp")
    plan = combines.make_plan(made, elastic_info)
    if len(_combine_plans) < MAX_PLANS:
        _combine_plans[key] = plan
    return plan


HOLES = {
    "expert_scales": "topk_weights",
    "x_active_mask": "mask",
    "shared_expert_x": "shared_x",
    "ori_x": "ori_x",
    "const_expert_alpha_1": "alpha1",
    "const_expert_alpha_2": "alpha2",
    "const_expert_v": "const_v",
    "tp_send_counts": "exchange_counts",
    "performance_info": "performance_info",
    "residual_x": "residual",
    "gamma": "gamma",
}


def run_combine(
    version: int,
    operator: str,
    index_name: str,
    tensors: dict[str, torch.Tensor | None],
    unused_given: tuple[bool, bool, bool],
    attributes: tuple[Any, ...],
    extra: dict[str, torch.Tensor | None] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plans and executes a whole combine.

    Args:
        version, operator, tensors, unused_given, attributes: as for `plan_combine`.
        index_name: "assist_info_for_combine" or "expand_idx".
        extra: bindings that are no argument of the caller's, by hole.
        out: where the result goes, None for a new tensor.
    """
    required = ("expand_x", "expert_ids", index_name, "ep_send_counts")
    for name, tensor in tensors.items():
        if tensor is not None or name in required:
            check_tensor_type(name, tensor)
    plan = plan_combine(version, operator, tensors, unused_given, attributes)
    ready = {name: _ready(tensor) for name, tensor in tensors.items()}
    checked = {n: t for n, t in ready.items() if n not in ("expand_x", "elastic_info")}
    combines.check_tensors(plan.attributes, checked)
    if attributes[5] == 2 and ready.get("tp_send_counts") is None:
        check_tensor_type("tp_send_counts", None)
    expand_x, ids, index, counts = (ready[name] for name in required)
    assert expand_x is not None
    assert ids is not None
    assert index is not None
    assert counts is not None
    bindings = {hole: ready.get(name) for name, hole in HOLES.items()}
    return plan.execute(expand_x, ids, index, counts, tensors={**bindings, **(extra or {})}, out=out)


def run_add_rms_norm(
    tensors: dict[str, torch.Tensor | None],
    unused_given: tuple[bool, bool, bool],
    attributes: tuple[Any, ...],
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plans and executes a combine that ends in a residual and a norm."""
    for name in ("expand_x", "expert_ids", "residual_x", "gamma"):
        check_tensor_type(name, tensors[name])
    expand_x, ids, residual = tensors["expand_x"], tensors["expert_ids"], tensors["residual_x"]
    assert expand_x is not None
    assert ids is not None
    assert residual is not None
    check_tensor("expand_x", expand_x.contiguous(), shape=("A", "H"), dtypes=(torch.bfloat16,))
    if not norm_eps > 0:
        raise ArgumentError("norm_eps", norm_eps, "it must be positive", "Pass 1e-6.")
    batch, hidden = ids.shape[0], expand_x.shape[1]
    normed = torch.empty((batch, 1, hidden), dtype=torch.bfloat16)
    rstd = torch.empty((batch, 1, 1), dtype=torch.float32)
    x = torch.empty((batch, 1, hidden), dtype=torch.bfloat16)
    extra: dict[str, torch.Tensor | None] = {
        "normed": normed,
        "rstd": rstd,
        "eps": torch.tensor([norm_eps], dtype=torch.float32),
    }
    run_combine(2, "combine_add_rms_norm", "expand_idx", tensors, unused_given, attributes, extra, out=x)
    return normed, rstd, x
