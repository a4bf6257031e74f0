"""The functions as torch.library operators, so that FakeTensor, torch.compile and export know them.

An eager call goes straight to its Python function: the dispatcher would only add its own cost. A traced call
goes through the operator `torch.ops.moe_triton.<name>`, whose schema is the function's own signature.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import has_side_effect

from moe_triton.core.errors import ArgumentError
from moe_triton.operators.description import Operator
from moe_triton.runtime.operator_plan import Named, OperatorPlan
from moe_triton.torch_npu_ops.calls import Calls
from moe_triton.torch_npu_ops.check import symbols_of
from moe_triton.torch_npu_ops.dtypes import dtype_of, number_of

Tensor = torch.Tensor
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

NAMESPACE = "moe_triton"
_library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_is_compiling = torch.compiler.is_compiling
_num_modes = torch._C._len_torch_dispatch_stack


class PlannedOperator(Protocol[P, R_co]):
    """A function of torch_npu's, and its plan."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Plans and executes."""
        ...

    def run(self, named: Named) -> R_co:
        """Plans and executes a call that is given as all of its arguments by name: the function's body."""
        ...

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> OperatorPlan:
        """Checks the arguments of a call by every rule that does not depend on data.

        Nothing is sent, nothing is made, and no other rank has to do the same.

        Returns:
            The plan: ``window_bytes``, ``workspace_bytes``, and the group's ``config``.

        Raises:
            ArgumentError: an argument breaks a rule; it has the status code.

        Examples:
            >>> plan = torch_npu.npu_moe_distribute_dispatch_v2.plan(x, expert_ids, *group)
            >>> plan.window_bytes
            18874368
        """
        ...


def planned(kind: Operator, plan: type[OperatorPlan]) -> Callable[[Callable[P, R]], PlannedOperator[P, R]]:
    """Makes an operator of a function, and gives it its ``plan``, and the ``run`` that it returns.

    Args:
        kind: what it does.
        plan: the kind of its plans.
    """

    def define(function: Callable[P, R]) -> PlannedOperator[P, R]:
        named = functools.partial(_named, inspect.signature(function))
        calls = Calls(kind, plan, function)
        call = operator(lambda *args, **kwargs: fake(calls, named(*args, **kwargs)), calls.written)(function)
        call.plan = lambda *args, **kwargs: calls.plan(named(*args, **kwargs))  # type: ignore[attr-defined]
        call.run = calls.run  # type: ignore[attr-defined]
        return cast(PlannedOperator[P, R], call)

    return define


def _named(signature: inspect.Signature, *args: Any, **kwargs: Any) -> Named:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def fake(calls: Calls, named: Named) -> Any:
    """What a call returns, by shapes and dtypes alone. Sizes may be symbolic.

    Where an argument breaks a rule the shapes are those of the nearest call that does not: the rules are for
    the plan, which knows the product and the group. So y_dtype counts here, although A2 and A3 refuse it.
    """
    symbols = symbols_of(calls.operator, named)
    specs = symbols.specs()
    if named.get("y_dtype") is not None:
        specs[0] = specs[0][0], dtype_of("y_dtype", named["y_dtype"])
    like = named[calls.operator.tensors[0].name]
    outputs = tuple(like.new_empty(shape, dtype=dtype) for shape, dtype in specs)
    return outputs if len(outputs) > 1 else outputs[0]


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
