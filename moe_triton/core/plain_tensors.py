"""Whether a tensor is plain: memory that holds its values.

Kernels get addresses. A tensor may have none, like wrappers, fake and functional tensors; its values may
differ from its memory, like those of a negated view; or its storage may have been freed. All of these look
like tensors to Python: they have shapes, dtypes and devices.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_FUNCTIONS = (torch.Tensor.__torch_function__.__func__, torch.nn.Parameter.__torch_function__)  # type: ignore[attr-defined]
_grad_is_on = torch.is_grad_enabled
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor

OF_ITS_OWN = "it must be a plain tensor, with memory of its own"


class Fault(NamedTuple):
    """Why a tensor is not plain: the parts of an `ArgumentError`, where "{name}" stands for the argument."""

    value: str
    rule: str
    remedy: str


def fault_of(tensor: torch.Tensor) -> Fault | None:
    """What is wrong with a tensor's memory, on whatever device; None for a plain one.

    A subclass is plain where it leaves torch's operators as they are, as ``torch.nn.Parameter`` does.
    """
    try:
        return _fault(tensor)
    except Exception:  # wrappers may raise anything
        return Fault(f"a {_name_of(tensor)} without memory", OF_ITS_OWN, _remedy(tensor))


def describe(*tensors: object) -> Hashable | None:
    """Returns a key of a call's tensors, wherever they are, or None if one of them may not be plain."""
    described: list[Hashable] = []
    for tensor in tensors:
        if tensor is None:
            described.append(None)
        elif isinstance(tensor, torch.Tensor) and fault_of(tensor) is None:
            described.append((tensor.shape, tensor.dtype, tensor.device.type, tensor.is_contiguous()))
        else:
            return None
    return tuple(described)


def _is_plain_type(kind: type) -> bool:
    """Whether a subclass leaves torch's functions and operators as they are."""
    function = kind.__torch_function__  # type: ignore[attr-defined]
    return (
        kind.__torch_dispatch__ is _NO_DISPATCH  # type: ignore[attr-defined]
        and getattr(function, "__func__", function) in _FUNCTIONS
    )


def _last_byte(tensor: torch.Tensor) -> int:
    """Offset of the end of a tensor, with elements, in its storage."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in sizes)
    return int((last + 1) * tensor.element_size())


def _fault(tensor: torch.Tensor) -> Fault | None:
    """`fault_of` for a tensor that raises nothing."""
    if type(tensor) is not torch.Tensor and not _is_plain_type(type(tensor)):
        return Fault(f"a {_name_of(tensor)}", OF_ITS_OWN, _remedy(tensor))
    if tensor.layout is not torch.strided:
        return Fault(f"of layout {tensor.layout}", "it must be a dense tensor", "Pass {name}.to_dense().")
    if tensor.is_neg():
        return Fault(
            "a negated view of its memory", "its memory must hold its values", "Pass {name}.resolve_neg()."
        )
    if tensor.requires_grad and _grad_is_on():
        return Fault(
            "one that requires grad, in grad mode",
            "there are no gradients of dispatch and combine",
            "Call under torch.no_grad(), or pass {name}.detach().",
        )
    if tensor.numel() == 0:
        return None
    if tensor.data_ptr() == 0:
        return Fault(f"a {_name_of(tensor)} without memory", OF_ITS_OWN, _remedy(tensor))
    num_bytes, needed = tensor.untyped_storage().nbytes(), _last_byte(tensor)
    if num_bytes >= needed:
        return None
    return Fault(
        f"of shape {tuple(tensor.shape)} in a storage of {num_bytes} bytes",
        f"its storage must hold the {needed} bytes that it reaches to",
        "Pass a tensor whose storage was not resized.",
    )


def _name_of(tensor: torch.Tensor) -> str:
    """The kind of a tensor, for messages."""
    if type(tensor) is not torch.Tensor:
        return type(tensor).__name__
    if _is_wrapped(tensor):
        return "tensor of a torch.func transform"
    return "functionalised tensor" if torch._is_functional_tensor(tensor) else "tensor"


def _remedy(tensor: torch.Tensor) -> str:
    if isinstance(tensor, FakeTensor):
        return "Pass a real tensor."
    if _is_wrapped(tensor) or torch._is_functional_tensor(tensor):
        return "Call it outside of the transform."
    return "Pass {name}.to_local()." if hasattr(tensor, "to_local") else "Pass the tensor that it stands for."
