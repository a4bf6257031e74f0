"""Bad values for an argument, from its declaration and a good value.

A `Mutation` passes a bad value on: some exist only while a transform of torch.func runs.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_triton.core.handle import DispatchHandle
from moe_triton.torch_npu_ops.declared import Argument

Use = Callable[[Any], None]
Mutation = Callable[[Any, Use], None]

HUGE = 2**70
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Wrapper(torch.Tensor):
    """Has a shape and no memory, and fails whatever is done with it."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("nobody calls this")


class Observed(torch.Tensor):
    """Has memory, and functions of its own."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("nobody calls this")


class Number(float):
    """A float that is equal to an integer, and hashes like it."""


def always(value: Any) -> Mutation:
    """Passes the same value, whatever the good one is."""
    return lambda good, use: use(value)


def changed(make: Callable[[Any], Any]) -> Mutation:
    """Passes what is made of the good value."""
    return lambda good, use: use(make(good))


def bad_values(argument: Argument, good: Any) -> Iterator[tuple[str, bool, Mutation]]:
    """Label, whether the error must be about this very argument, and the mutation."""
    if argument.kind is torch.Tensor:
        yield from _bad_tensors(argument, good)
        return
    if argument.kind is DispatchHandle and not argument.optional:
        yield from _bad_handles(good)
        return
    makers: dict[type, Callable[[Any], dict[str, Any]]] = {
        int: _bad_integers,
        float: _bad_floats,
        str: _bad_strings,
        bool: _bad_flags,
        torch.dtype: _bad_dtypes,
    }
    values = {**makers.get(argument.kind, lambda good: {})(good), **_objects(argument)}
    for label, value in values.items():
        yield label, label not in ("-1", "huge"), always(value)


def _objects(argument: Argument) -> dict[str, Any]:
    """Of types that no argument has."""
    values = {
        "an object": object(),
        "a list": [1],
        "a dict": {},
        "bytes": b"1",
        "a complex": 1j,
        "an array": np.zeros(2),
        "a tensor": torch.zeros(2),
        "a type": int,
    }
    return values if argument.optional else {**values, "None": None}


def _bad_integers(good: Any) -> dict[str, Any]:
    number = 1 if good is None else good
    return {
        "as a float": float(number),
        "as numpy's float": np.float64(number),
        "as a float by another name": Number(number),
        "True": True,
        "numpy's True": np.True_,
        "as a string": str(number),
        "nan": float("nan"),
        "inf": float("inf"),
        "-1": -1,
        "huge": HUGE,
    }


def _bad_floats(good: Any) -> dict[str, Any]:
    return {
        "nan": float("nan"),
        "inf": float("inf"),
        "-inf": -float("inf"),
        "negative": -1e-6,
        "0": 0.0,
        "too small": 1e-60,
        "too large": 1e60,
        "larger than any float": 10**400,
        "True": True,
        "as a string": "1e-6",
    }


def _bad_strings(good: Any) -> dict[str, Any]:
    return {"7": 7, "a float": 1.0, "True": True, "unknown": "nobody", "over-long": "g" * 5000}


def _bad_flags(good: Any) -> dict[str, Any]:
    return {"1": 1, "0.0": 0.0, "a string": "yes"}


def _bad_dtypes(good: Any) -> dict[str, Any]:
    return {"float64": torch.float64, "int8": torch.int8, "a string": "bfloat16", "0": 0, "False": False}


def _bad_tensors(argument: Argument, good: torch.Tensor) -> Iterator[tuple[str, bool, Mutation]]:
    for label, value in _objects(argument).items():
        if label != "a tensor":
            yield label, True, always(value)
    yield "a string", True, always("x")
    yield "7", True, always(7)
    for dtype in (torch.float64, torch.int16, torch.complex64, torch.uint8):
        yield f"of {dtype}", True, changed(lambda good, dtype=dtype: good.to(dtype))
    yield from ((label, False, mutation) for label, mutation in SHAPES.items())
    for label, (applies, mutation) in MEMORY.items():
        if applies(good):
            yield label, True, mutation


SHAPES: dict[str, Mutation] = {
    "flat": changed(lambda good: good.reshape(-1) if good.dim() != 1 else good.reshape(1, 1, -1)),
    "with a dimension in front": changed(lambda good: good[None]),
    "with a dimension behind": changed(lambda good: good[..., None]),
    "longer": changed(lambda good: torch.cat([good, good[:1]])),
    "shorter": changed(lambda good: good[:-1].contiguous()),
    "wider": changed(lambda good: torch.cat([good, good[..., :1]], dim=-1)),
}


def _any(good: torch.Tensor) -> bool:
    return True


def _is_matrix(good: torch.Tensor) -> bool:
    return good.dim() == 2


def _is_float(good: torch.Tensor) -> bool:
    return good.dtype in FLOATS


def _is_number(good: torch.Tensor) -> bool:
    return good.dtype is not torch.bool


def _resized(num_bytes: Callable[[torch.Tensor], int]) -> Mutation:
    def mutate(good: torch.Tensor, use: Use) -> None:
        tensor = good.clone()
        tensor.untyped_storage().resize_(num_bytes(tensor))
        use(tensor)

    return mutate


def _mapped(good: torch.Tensor, use: Use) -> None:
    def inside(batched: torch.Tensor) -> torch.Tensor:
        use(batched)
        return batched

    torch.func.vmap(inside)(good[None])


def _differentiated(good: torch.Tensor, use: Use) -> None:
    def inside(wrapped: torch.Tensor) -> torch.Tensor:
        use(wrapped)
        return wrapped.float().sum()

    torch.func.grad(inside)(good)


def _functionalised(good: torch.Tensor, use: Use) -> None:
    def inside(functional: torch.Tensor) -> torch.Tensor:
        use(functional)
        return functional

    torch.func.functionalize(inside)(good)


def _distributed(good: torch.Tensor) -> DTensor:
    mesh = DeviceMesh("cpu", [dist.get_rank()], _init_backend=False, _rank=0)
    return DTensor.from_local(good, mesh, run_check=False)


def _fake(good: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(good)


def _sparse(good: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return good.to_sparse_csr()


FAKE = "fake"
Applies = Callable[[torch.Tensor], bool]
MEMORY: dict[str, tuple[Applies, Mutation]] = {
    "meta": (_any, changed(lambda good: good.to("meta"))),
    "sparse": (_any, changed(lambda good: good.to_sparse())),
    "sparse rows": (_is_matrix, changed(_sparse)),
    "mkldnn": (lambda good: good.dtype is torch.float32, changed(lambda good: good.to_mkldnn())),
    "quantised": (
        lambda good: good.dtype is torch.float32,
        changed(lambda good: torch.quantize_per_tensor(good, 0.1, 0, torch.qint8)),
    ),
    "nested": (_is_matrix, changed(lambda good: torch.nested.nested_tensor(list(good)))),
    "negated": (_is_number, changed(lambda good: torch._neg_view(good))),
    "of zeros without memory": (
        _any,
        changed(lambda good: torch._efficientzerotensor(good.shape, dtype=good.dtype)),  # type: ignore[attr-defined]
    ),
    "storage of 0": (_any, _resized(lambda tensor: 0)),
    "storage too short": (_any, _resized(lambda tensor: tensor.nbytes - 1)),
    "functional": (_any, changed(lambda good: torch._to_functional_tensor(good))),
    "in functionalize": (_any, _functionalised),
    "in vmap": (_any, _mapped),
    "in grad": (_is_float, _differentiated),
    "a wrapper": (_any, changed(Wrapper)),
    "with functions of its own": (_any, changed(lambda good: good.as_subclass(Observed))),
    "distributed": (_any, changed(_distributed)),
    FAKE: (_any, changed(_fake)),
    "requires grad": (_is_float, changed(lambda good: good.clone().requires_grad_())),
    "computed from what requires grad": (_is_float, changed(lambda good: good.clone().requires_grad_() * 1)),
    "a parameter": (_is_float, changed(lambda good: torch.nn.Parameter(good.clone()))),
}


def _bad_handles(good: DispatchHandle) -> Iterator[tuple[str, bool, Mutation]]:
    for label, value in {"None": None, "an object": object(), "7": 7, "a dict": {}}.items():
        yield label, True, always(value)
    replacements: dict[str, dict[str, Any]] = {
        name: {"None": None, "a float": 1.0, "a tensor": torch.zeros(3), "a string": "x", "huge": HUGE}
        for name in ("buffer_id", "number", "dtype")
    }
    tensors = ("topk_idx", "expand_idx", "recv_offsets", "assist_info")
    for name in tensors:
        replacements[name] = {"None": None, "a list": [1], "of another shape": torch.zeros(7, 7)}
    for name, values in replacements.items():
        for label, value in values.items():
            yield f"{name} {label}", True, _tampered(name, value)
        yield f"without {name}", True, _tampered(name)
    for name in tensors:
        for label in ("storage of 0", "functional", "negated", "a wrapper", FAKE, "meta", "in vmap"):
            yield f"{name} {label}", True, _strange(name, MEMORY[label][1])


def _tampered(name: str, *value: Any) -> Mutation:
    def mutate(good: DispatchHandle, use: Use) -> None:
        handle = copy.copy(good)
        handle.__dict__.pop(name)
        if value:
            handle.__dict__[name] = value[0]
        use(handle)

    return mutate


def _strange(name: str, mutation: Mutation) -> Mutation:
    def mutate(good: DispatchHandle, use: Use) -> None:
        mutation(getattr(good, name), lambda value: _tampered(name, value)(good, use))

    return mutate
