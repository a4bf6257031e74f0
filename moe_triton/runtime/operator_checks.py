"""What every call is checked by, whichever way it is spelled, and what kernels get of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch

from moe_triton.core.checks import check_tensor
from moe_triton.core.errors import ArgumentError
from moe_triton.core.row_formats import AS_THEY_ARE
from moe_triton.limits import Call
from moe_triton.operators import Symbols, TensorArgument
from moe_triton.runtime import arguments
from moe_triton.runtime.communicator import Communicator

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
        "has_mask": "x_active_mask" in given and bool(s["BS"] != 0),  # one of no tokens is none
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


def taken_ids(
    communicator: Communicator,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    num_ids: int,
    called: Callable[[str], str],
    keep: bool = False,
) -> torch.Tensor:
    """Ids as kernels read them, int32, once they are below their number and distinct in a row.

    A duplicate is refused for memory's sake: a source has as many slots per expert as it has tokens. A host
    whose device works on reads neither ids nor mask: kernels send no id that names no expert, and take the
    tokens up to a mask's first False.

    Args:
        communicator: which calls.
        ids: (T, K) int32 or int64.
        mask: (T,) or (T, K) bool, or None.
        num_ids: legal ids.
        called: what the caller calls an argument.
        keep: whether the caller may write over ``ids`` before they are read for the last time.

    Raises:
        ArgumentError: an id is not, or a mask of tokens has a True after a False.
    """
    backend, bad = communicator.backend, None
    taken = ids
    if keep or ids.dtype != torch.int32:
        taken, bad = backend.take_ids(ids, num_ids)
    elif mask is None:
        bad = backend.first_bad_id(ids, num_ids)
    if mask is not None and not backend.is_asynchronous:
        # What an inactive entry holds does not matter.
        active = taken[: _active_tokens(mask, called)] if mask.dim() == 1 else torch.where(mask, taken, -1)
        bad = backend.first_bad_id(active, num_ids)
    if bad is not None:
        raise arguments.bad_id_error(called("expert_ids"), ids, bad, num_ids)
    return taken


def other_ids_error(name: str, dispatch: str, remedy: str) -> ArgumentError:
    """What to say of a combine by other ids than its dispatch's, which waits for what nobody sends."""
    value = f"other than what {dispatch} had (entries that a mask leaves out aside)"
    rule = "combine takes the ids and the mask of its dispatch: it is their results that come"
    return ArgumentError(name, value, rule, remedy)


def _active_tokens(mask: torch.Tensor, called: Callable[[str], str]) -> int:
    """How many tokens a 1-D mask leaves.

    Raises:
        ArgumentError: they do not come first.
    """
    flags = mask.tolist()  # so few that torch's operators would take longer
    active = flags.count(True)
    if False in flags[:active]:
        token = flags.index(True, flags.index(False))
        raise ArgumentError(
            called("x_active_mask"),
            f"True at token {token} after a False",
            "active tokens come first in a 1-D mask",
            "Sort the tokens, or pass a (BS, K) mask.",
        )
    return active
