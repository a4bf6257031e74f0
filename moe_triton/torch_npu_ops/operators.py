"""The functions as torch.library operators, so that FakeTensor, torch.compile and export know them.

An eager call goes straight to its Python function: the dispatcher would only add its own cost. It has the
plan of a shape that has come before, or a new one. A traced call goes through the operator
`torch.ops.moe_triton.<name>`, whose schema is the function's own signature.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import marshal
from collections.abc import Callable
from operator import itemgetter
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import has_side_effect

from moe_triton.core import plain_tensors
from moe_triton.core.checks import check_number, not_plain_error
from moe_triton.core.errors import ArgumentError
from moe_triton.operators.description import Operator
from moe_triton.runtime.prepared_call import Named
from moe_triton.torch_npu_ops import registry, servers, settings
from moe_triton.torch_npu_ops.check import in_our_words, make_plan, symbols_of
from moe_triton.torch_npu_ops.declared import arguments_of, check_attribute, dtype_of, number_of
from moe_triton.torch_npu_ops.elastic import members_of, words_of
from moe_triton.torch_npu_ops.names import NAMES
from moe_triton.torch_npu_ops.plans import FunctionPlan

MIN_EPS, MAX_EPS = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max


def exactly(attributes: tuple[Any, ...]) -> bytes:
    """What stands for attributes in the key of a plan: other bytes for 16, 16.0 and True, which are equal.

    Raises:
        ValueError: there is an object among them of a type that is not one of Python's own.
    """
    # Half as long as a tuple of types. Marshal's later formats write the same string in several ways.
    return marshal.dumps(attributes, 2)


class Calls:
    """The calls of one function.

    Args:
        operator: what it does.
        kind: of its plans.
        function: whose signature says which arguments there are.

    Attributes:
        written: names of the tensors that it writes to.
    """

    def __init__(self, operator: Operator, kind: type[FunctionPlan], function: Callable[..., Any]) -> None:
        self.operator, self._kind = operator, kind
        described = {NAMES.get(t.name, t.name): t for t in operator.tensors}
        arguments = arguments_of(function)
        self._tensors = [(a, described[a.name]) for a in arguments if a.kind is torch.Tensor]
        self._attributes = [a for a in arguments if a.kind is not torch.Tensor]
        self._get_tensors = itemgetter(*(a.name for a, _ in self._tensors))
        self._get_attributes = itemgetter(*(a.name for a in self._attributes))
        self._elastic = "elastic_info" if any(t.mode == "elastic" for _, t in self._tensors) else None
        self.written = tuple(a.name for a, t in self._tensors if t.is_written)

    def run(self, named: Named) -> Any:
        """Plans and executes a call.

        Args:
            named: all of its arguments.
        """
        plan = self._find_where_ranks_are(named)
        try:
            return plan.execute(named)
        except registry.StalePlanError:
            registry.plans.clear()
            return self._find(named).execute(named)

    def _find_where_ranks_are(self, named: Named) -> FunctionPlan:
        """The plan of a call. Where only servers could allow the call, ranks first find those that they have.

        Collective in this case alone: a call that breaks another rule is refused without the other ranks.
        """
        try:
            return self._find(named)
        except ArgumentError:
            if not registry.may_be_on_hosts(named["group_ep"]):
                raise
            if not self._could_be_on_hosts(named):
                raise
        group, size = named["group_ep"], int(named["ep_world_size"])
        registry.find_hosts(group, members_of(self._words(named), size))
        return self._find(named)

    def _could_be_on_hosts(self, named: Named) -> bool:
        """Whether a call keeps every rule on some hosts of equally many ranks."""
        size = registry.group_of(named["group_ep"], "group_ep").size()
        for per_host in (each for each in range(1, size // 2 + 1) if size % each == 0):
            with contextlib.suppress(ArgumentError), servers.supposing_hosts(per_host):
                self._checked(self._of_plain_types(named), self._words(named))
                return True
        return False

    def plan(self, named: Named) -> FunctionPlan:
        """The plan of a call, which nothing is executed of.

        Raises:
            ArgumentError: an argument breaks a rule; it has the status code.
        """
        plan = self._find(named)
        try:
            plan.context.access.check_current()
        except registry.StalePlanError:
            registry.plans.clear()
            return self._find(named)
        return plan

    def _find(self, named: Named) -> FunctionPlan:
        """The plan of a call, from the cache where its shape has come before.

        The key lacks HCCL's variables, which every call would have to read: `execute` refuses a plan that was
        made under others.
        """
        described = settings.host().describe(*self._get_tensors(named))
        if described is None:
            self._check_plain(named)
            described = plain_tensors.describe(*self._get_tensors(named))
        words = self._words(named)
        shapes = self, described, words, settings.number()
        try:
            plan = registry.plans.get((shapes, exactly(self._get_attributes(named))))
        except ValueError:  # an attribute of another type
            plan = None
        return self._make_plan(named, shapes, words) if plan is None else plan

    def _words(self, named: Named) -> tuple[int, ...] | None:
        """Contents of elastic_info, where there is one."""
        if self._elastic and named[self._elastic] is not None:
            return words_of(named[self._elastic])
        return None

    def _make_plan(
        self, named: Named, shapes: tuple[Any, ...], words: tuple[int, ...] | None
    ) -> FunctionPlan:
        named = self._of_plain_types(named)
        try:
            key = shapes, exactly(self._get_attributes(named))
        except ValueError:  # a dtype, which is refused
            key = None
        plan = registry.plans.get(key) if key else None  # now that numpy's integers are Python's
        if plan is None:
            plan = self._checked(named, words)
            if key:
                registry.plans.put(key, plan)
        return plan

    def _of_plain_types(self, named: Named) -> Named:
        return {**named, **{a.name: check_attribute(a, named[a.name]) for a in self._attributes}}

    def _checked(self, named: Named, words: tuple[int, ...] | None) -> FunctionPlan:
        self._check_plain(named)
        if "norm_eps" in named:
            check_eps(named["norm_eps"])
        return make_plan(self.operator, self._kind, named, words)

    def _check_plain(self, named: Named) -> None:
        """Checks that arguments are tensors with memory, on the back end's device, where they must be given.

        Raises:
            ArgumentError: one is None (161001) or something else (161002).
        """
        device = settings.host().device
        for argument, described in self._tensors:
            value = named[argument.name]
            if value is not None or not argument.optional:
                where = None if described.on_any_device or not described.shape else device
                error = not_plain_error(argument.name, value, where)
                if error is not None:
                    raise error


def check_eps(value: float) -> None:
    """Checks a norm's epsilon.

    Raises:
        ArgumentError: it is not positive, or no number of fp32.
    """
    if not MIN_EPS <= check_number("norm_eps", value) <= MAX_EPS:
        raise ArgumentError("norm_eps", value, "it must be positive, and a number of fp32", "Pass 1e-6.")


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

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> FunctionPlan:
        """Checks the arguments of a call by every rule that does not depend on data.

        Nothing is sent, nothing is made, and no other rank has to do the same. Until a group has met in a
        call its ranks count as on one host, unless `configure` names servers.

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


def planned(kind: Operator, plan: type[FunctionPlan]) -> Callable[[Callable[P, R]], PlannedOperator[P, R]]:
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
    given = in_our_words(named)
    symbols = symbols_of(calls.operator, given)
    specs = symbols.specs()
    if named.get("y_dtype") is not None:
        specs[0] = specs[0][0], dtype_of("y_dtype", named["y_dtype"])
    like = given[calls.operator.tensors[0].name]
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
