"""Outputs that callers give: checked, and cut to the size that a call writes.

Each check raises `ArgumentError` before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_triton.backends.base import TensorSpec
from moe_triton.core.checks import check_tensor
from moe_triton.core.errors import NULL_ARGUMENT, ArgumentError
from moe_triton.core.handle import DispatchOutput
from moe_triton.core.plain_tensors import fault_of

# What makes a dispatch give what it otherwise leaves out.
_MADE_WITH = {"scales": "the same quantize", "weights": "topk_weights"}
# The fields of a dispatch that hold tensors. What its handle keeps is each call's own: combine reads it.
_TENSORS = tuple(name for name in DispatchOutput._fields if name != "handle")


def of_dispatch(
    out: object,
    specs: Mapping[str, TensorSpec],
    inputs: Mapping[str, Any],
    device: torch.device,
    contiguous: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Where outputs of a dispatch are to go, by their names.

    Args:
        out: rows alone, or an earlier dispatch's output. What the call does not make is left alone.
        specs: shape and dtype of what it makes, by name.
        inputs: tensors that it takes, by name.
        device: of the buffer.
        contiguous: what stands for tokens of an earlier dispatch in checks: where rows are padded they have
            gaps.

    Raises:
        ArgumentError: one is missing, too small, of another kind, or in the memory of another one.
    """
    if not isinstance(out, DispatchOutput):
        found = {"tokens": sized("out", out, specs["tokens"], device)}
        check_apart({"out": found["tokens"]}, inputs)
        return found
    found = {}
    for name in _TENSORS:
        if name not in specs:
            continue
        called, value = f"out.{name}", getattr(out, name)
        if value is None:
            rule = f"this dispatch gives {name}"
            remedy = f"Pass the output of a dispatch with {_MADE_WITH.get(name, 'these sizes')}, or None."
            raise ArgumentError(called, None, rule, remedy, code=NULL_ARGUMENT)
        if name == "tokens" and _is_plain(value):
            sized(called, contiguous(value), specs[name], device)
            rows = specs[name][0][0]
            found[name] = value if len(value) == rows else value[:rows]
        else:
            found[name] = sized(called, value, specs[name], device)
    check_apart({f"out.{name}": tensor for name, tensor in found.items()}, inputs)
    return found


def sized(name: str, value: Any, spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """The first rows of an output that may have more of them than a call writes.

    Raises:
        ArgumentError: it has fewer, or is of another kind.
    """
    (rows, *columns), dtype = spec
    if _is_plain(value) and value.dim() == len(columns) + 1 and len(value) >= rows:
        checked = check_tensor(name, value, shape=("rows", *columns), dtypes=(dtype,), device=device)
        return checked if len(checked) == rows else checked[:rows]
    return check_tensor(name, value, shape=spec[0], dtypes=(dtype,), device=device)


def check_apart(outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, Any]) -> None:
    """Checks that no output shares memory with an input or with another output.

    Raises:
        ArgumentError: one does.
    """
    others = [(name, _extent(tensor), "read") for name, tensor in inputs.items() if tensor is not None]
    for name, tensor in outputs.items():
        begin, end = own = _extent(tensor)
        for other, (first, last), used in others:
            if max(begin, first) < min(end, last):
                rule = f"it must not lie in {other}, which is {used} while it is written"
                value = f"in the memory of {other}"
                raise ArgumentError(name, value, rule, "Pass a tensor of its own.")
        others.append((name, own, "written"))


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and fault_of(value) is None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and behind its last one; of one without elements, an empty range."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
