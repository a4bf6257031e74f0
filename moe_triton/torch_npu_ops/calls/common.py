"""What calls of every kind need: keys of plans, tensors made ready, checks before there is a plan."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from moe_triton.core.checks import check_tensor, not_plain_error
from moe_triton.torch_npu_ops import settings
from moe_triton.torch_npu_ops.declared import exactly

FLOATS = (torch.bfloat16, torch.float16)
SIZED = (torch.Tensor, torch.nn.Parameter, FakeTensor)
READ_BY_HOST = ("elastic_info", "time_out")
# More shapes than a server has; a plan is a few small objects.
MAX_PLANS = 4096


TensorKey = tuple[torch.Size, torch.dtype, bool]


def shape_key(tensor: torch.Tensor | None) -> TensorKey | None:
    """Shape, dtype and whether it is in this machine's memory, of a tensor; None for none."""
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.is_cpu)


def output_key(tensor: torch.Tensor) -> tuple[TensorKey | None, bool]:
    """`shape_key`, and whether it is contiguous: a tensor that is written to cannot be replaced by a copy."""
    return shape_key(tensor), tensor.is_contiguous()


# The `output_key` of a tensor that is not given.
NOT_GIVEN: tuple[TensorKey | None, bool] = (None, True)


def ready(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor as kernels take it: contiguous."""
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def unless_empty(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """An optional tensor, None where it has no elements: the original takes such a one as absent."""
    # What is of another type is for `check_plain`.
    return None if type(tensor) in SIZED and tensor.numel() == 0 else tensor  # type: ignore[union-attr]


Plan = TypeVar("Plan")


def find(
    plans: dict[tuple[Any, ...], Plan], shapes: tuple[Any, ...], attributes: tuple[Any, ...]
) -> Plan | None:
    """The plan of a call whose shape has come before, or None."""
    try:
        return plans.get((shapes, exactly(attributes), settings.number()))
    except ValueError:  # an attribute of another type
        return None


def keep(
    plans: dict[tuple[Any, ...], Plan], shapes: tuple[Any, ...], attributes: tuple[Any, ...], plan: Plan
) -> None:
    """Keeps a plan for `find`, if there is room. Attributes are as `check_attributes` returned them."""
    if len(plans) < MAX_PLANS:
        plans[shapes, exactly(attributes), settings.number()] = plan


def has_peer(tp_world_size: object) -> bool:
    """Whether there is a tensor-parallel peer, of an attribute that has not been checked yet."""
    if type(tp_world_size) is int:
        return tp_world_size == 2
    return isinstance(tp_world_size, numbers.Integral) and int(tp_world_size) == 2


def check_required(**tensors: Any) -> None:
    """Checks that required arguments are tensors.

    Raises:
        ArgumentError: one is None (161001) or something else (161002).
    """
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            check_tensor(name, value, shape=(), dtypes=())


def check_optional(**tensors: Any) -> None:
    """Checks that optional arguments are tensors where they are given.

    Raises:
        ArgumentError: one is not (161002).
    """
    check_required(**{name: value for name, value in tensors.items() if value is not None})


def check_plain(tensors: Iterable[tuple[str, Any]]) -> None:
    """Checks that arguments are tensors with memory where they are given, on the back end's device.

    Args:
        tensors: name and value of each. Those that the host reads may be on any device.

    Raises:
        ArgumentError: one is not (161002).
    """
    device = settings.host().device
    for name, value in tensors:
        if value is not None:
            error = not_plain_error(name, value, None if name in READ_BY_HOST else device)
            if error is not None:
                raise error


def check_token_matrix(name: str, value: torch.Tensor) -> None:
    """Checks that a tensor is (tokens, H) in bf16 or fp16.

    Raises:
        ArgumentError: it is not.
    """
    check_input(name, value, ("BS", "H"), *FLOATS)


def check_input(name: str, value: Any, shape: tuple[int | str, ...], *dtypes: torch.dtype) -> None:
    """Checks a tensor that is made contiguous before it is used.

    Raises:
        ArgumentError: it is of another shape or dtype, or not on the back end's device.
    """
    check_tensor(name, value.contiguous(), shape=shape, dtypes=dtypes, device=settings.host().device)
