"""What every call is checked by, whichever way it is spelled, and what kernels get of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from moe_triton.core.checks import check_tensor
from moe_triton.core.row_formats import AS_THEY_ARE
from moe_triton.limits import Call
from moe_triton.operators import Symbols, TensorArgument

# Fields of a `Call` that have another name than the argument that they are about.
ARGUMENTS = {
    "rank": "ep_rank_id",
    "num_zero": "zero_expert_num",
    "num_copy": "copy_expert_num",
    "num_const": "const_expert_num",
    "has_mask": "x_active_mask",
}
CONST_ARGUMENTS = {"const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v"}


def check_argument(s: Symbols, argument: TensorArgument, tensor: Any, device: torch.device) -> None:
    """Checks a tensor, where it is given and anybody looks at it. One that is not written to may be strided.

    Raises:
        ArgumentError: it is not as its description says.
    """
    if not s.is_given(argument.name) or not argument.shape or argument.of_setup:
        return
    tensor = tensor if argument.is_written else tensor.contiguous()
    name = s.operator.called(argument.name)
    check_tensor(name, tensor, shape=s.expected(argument), dtypes=s.dtypes(argument), device=device)


def inputs_of(
    s: Symbols, named: Mapping[str, Any]
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, torch.dtype], ...]]:
    """Hole and argument of each tensor that kernels read, and the holes of those to copy, by dtype."""
    given = [t for t in s.operator.tensors if s.is_given(t.name)]
    inputs = tuple((hole, t.name) for t in given for hole in t.holes)
    copied = []
    for argument in given:
        tensor = named[argument.name]
        dtype = argument.read_as or tensor.dtype
        if not tensor.is_contiguous() or tensor.dtype != dtype:
            copied += [(hole, dtype) for hole in argument.holes]
    return inputs, tuple(copied)


def call_of(s: Symbols) -> Call:
    """What the rules of calls are about."""
    given = {*s.given, *(name for name in ("y_dtype", "x_dtype", "scales_dtype") if s.get(name) is not None)}
    values = {
        "version": s.operator.version,
        "operator": s.operator.name,
        "batch": s["BS"],
        "quant_mode": s["quant_mode"] or s.get("row_format", AS_THEY_ARE).quant_mode,
        "mask_dims": len(s.given.get("x_active_mask", (1,))),
        "has_const_args": given >= CONST_ARGUMENTS,
    }
    for field in fields(Call):
        argument = ARGUMENTS.get(field.name, field.name.removeprefix("has_"))
        if field.name.startswith("has_"):
            values.setdefault(field.name, argument in given)
        elif argument in s:
            values.setdefault(field.name, s[argument])
    return Call(**values)
