"""The functions as torch.library operators, so that FakeTensor, torch.compile and export know them.

An eager call goes straight to its Python function: the dispatcher would only add its own cost. A traced call
goes through the operator `torch.ops.moe_triton.<name>`, whose schema is the function's own signature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import has_side_effect

from moe_triton.core.errors import ArgumentError
from moe_triton.torch_npu_ops.dtypes import number_of

Tensor = torch.Tensor
P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "moe_triton"
_library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_is_compiling = torch.compiler.is_compiling
_num_modes = torch._C._len_torch_dispatch_stack


def operator(
    fake: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes an operator of a function, and of the function what calls the operator where it is traced.

    Args:
        fake: has the function's arguments and returns empty tensors of the right shapes and dtypes.
        mutates: names of the tensors that the function writes to.
    """

    def define(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__.lstrip("_")
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _library.define(f"{name}{schema}")  # type: ignore[no-untyped-call]
        _library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        traced = getattr(getattr(torch.ops, NAMESPACE), name).default
        # Peers wait for what a call sends: it must run even where nobody reads what it returns.
        has_side_effect(traced)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            first = args[0] if args else None
            is_fake = type(first) is not Tensor and isinstance(first, FakeTensor)
            if not (_is_compiling() or _num_modes() or is_fake):
                try:
                    return function(*args, **kwargs)
                except ArgumentError:  # no fake tensor has memory; to look for them in every call takes long
                    if not any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values())):
                        raise
            # A schema has integers where torch_npu takes dtypes as well.
            numbers = {
                name: number_of(name, value) if isinstance(value, torch.dtype) else value
                for name, value in kwargs.items()
            }
            return traced(*args, **numbers)  # type: ignore[no-any-return]

        return call

    return define
