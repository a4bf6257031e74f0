"""Calls: the plan of a shape that has come before, or a new one; and its execution."""

from __future__ import annotations

import marshal
from collections.abc import Callable
from operator import itemgetter
from typing import Any, cast

import torch

from moe_triton.core import plain_tensors
from moe_triton.core.checks import check_number, not_plain_error
from moe_triton.core.errors import ArgumentError
from moe_triton.operators.description import Operator
from moe_triton.runtime.operator_plan import Named, OperatorPlan
from moe_triton.torch_npu_ops import registry, settings
from moe_triton.torch_npu_ops.check import make_plan
from moe_triton.torch_npu_ops.declared import arguments_of, check_attribute
from moe_triton.torch_npu_ops.elastic import words_of

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

    def __init__(self, operator: Operator, kind: type[OperatorPlan], function: Callable[..., Any]) -> None:
        self.operator, self._kind = operator, kind
        described = {t.name: t for t in operator.tensors}
        arguments = arguments_of(function)
        self._tensors = [(a, described[a.name]) for a in arguments if a.kind is torch.Tensor]
        self._attributes = [a for a in arguments if a.kind is not torch.Tensor]
        self._get_tensors = itemgetter(*(a.name for a, _ in self._tensors))
        self._get_attributes = itemgetter(*(a.name for a in self._attributes))
        self._elastic = "elastic_info" if any(t.mode == "elastic" for _, t in self._tensors) else None
        self.written = tuple(t.name for _, t in self._tensors if t.is_written)

    def run(self, named: Named) -> Any:
        """Plans and executes a call.

        Args:
            named: all of its arguments.
        """
        plan = self._find(named)
        try:
            return plan.execute(named)
        except registry.StalePlanError:
            registry.plans.clear()
            return self._find(named).execute(named)

    def plan(self, named: Named) -> OperatorPlan:
        """The plan of a call, which nothing is executed of.

        Raises:
            ArgumentError: an argument breaks a rule; it has the status code.
        """
        plan = self._find(named)
        try:
            cast(registry.Access, plan.access).check_current()
        except registry.StalePlanError:
            registry.plans.clear()
            return self._find(named)
        return plan

    def _find(self, named: Named) -> OperatorPlan:
        """The plan of a call, from the cache where its shape has come before.

        The key lacks HCCL's variables, which every call would have to read: `execute` refuses a plan that was
        made under others.
        """
        described = settings.host().describe(*self._get_tensors(named))
        if described is None:
            self._check_plain(named)
            described = plain_tensors.describe(*self._get_tensors(named))
        words = None
        if self._elastic and named[self._elastic] is not None:
            words = words_of(named[self._elastic])
        shapes = self, described, words, settings.number()
        try:
            plan = registry.plans.get((shapes, exactly(self._get_attributes(named))))
        except ValueError:  # an attribute of another type
            plan = None
        return self._make_plan(named, shapes, words) if plan is None else plan

    def _make_plan(
        self, named: Named, shapes: tuple[Any, ...], words: tuple[int, ...] | None
    ) -> OperatorPlan:
        named = {**named, **{a.name: check_attribute(a, named[a.name]) for a in self._attributes}}
        try:
            key = shapes, exactly(self._get_attributes(named))
        except ValueError:  # a dtype, which is refused
            key = None
        plan = registry.plans.get(key) if key else None  # now that numpy's integers are Python's
        if plan is None:
            self._check_plain(named)
            if "norm_eps" in named:
                check_eps(named["norm_eps"])
            plan = make_plan(self.operator, self._kind, named, words)
            if key:
                registry.plans.put(key, plan)
        return plan

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
