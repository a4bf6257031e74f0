"""The first of the two phases of the C interface behind torch_npu: a call that ends with its plan."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from moe_triton.torch_npu_ops.plans.base import OperatorPlan

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Made = TypeVar("Made", bound=OperatorPlan[Any])


class _Mode(threading.local):
    plans_only = False


class _PlanMade(Exception):  # noqa: N818
    def __init__(self, plan: OperatorPlan[Any]) -> None:
        self.plan = plan


_mode = _Mode()


def settled(plan: Made) -> Made:
    """The plan, for execution; a call that was asked for no more ends here."""
    if _mode.plans_only:
        raise _PlanMade(plan)
    return plan


class PlannedOperator(Protocol[P, R_co]):
    """A function of torch_npu's, and its plan."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Plans and executes."""
        ...

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> OperatorPlan[Any]:
        """Checks the arguments of a call by every rule that does not depend on data.

        Nothing is sent, nothing is made, and no other rank has to do the same.

        Returns:
            The plan: ``window_bytes``, ``workspace_bytes``, and the group's ``config``.

        Raises:
            ArgumentError: an argument breaks a rule; it has the status code.
        """
        ...


def planned(function: Callable[P, R]) -> PlannedOperator[P, R]:
    """Gives a function its ``plan``."""
    eager: Callable[P, R] = getattr(function, "__wrapped__", function)

    def plan(*args: P.args, **kwargs: P.kwargs) -> OperatorPlan[Any]:
        _mode.plans_only = True
        try:
            eager(*args, **kwargs)
        except _PlanMade as made:
            return made.plan
        finally:
            _mode.plans_only = False
        raise AssertionError("a call that makes no plan")

    function.plan = plan  # type: ignore[attr-defined]
    return cast(PlannedOperator[P, R], function)
