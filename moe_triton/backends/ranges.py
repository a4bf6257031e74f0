"""Ranges in torch's profiler: what runs and steps are called there, and how Python's own launches show up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch._C import _autograd
from torch.autograd import profiler

from moe_triton.backends.phases import names_of
from moe_triton.core.plan import Phases, Plan


def is_profiled() -> bool:
    """Whether a profiler looks at this thread: torch's, or one that takes the ranges of torch's."""
    return profiler._is_profiler_enabled or _autograd._profiler_enabled()


def name_of(plan: Plan) -> str:
    """What a run of a plan is called, like "moe_triton::dispatch"."""
    return f"moe_triton::{plan.operator}{plan.half}"


def launch_names(plan: Plan, launches: Sequence[Phases]) -> list[str]:
    """What launches with all their phases are called, like "moe_triton::dispatch: send, wait"."""
    name = name_of(plan)
    return [f"{name}: {names_of(phases)}" for phases in launches]


def step_names(plan: Plan) -> list[str]:
    """What each phase is called, as the plan numbers them, like "moe_triton::dispatch: send"."""
    name = name_of(plan)
    return [f"{name}: {launch.step}" for launch in plan.launches]


def recorded(name: str) -> AbstractContextManager[object]:
    """What is inside, as a range."""
    return profiler.record_function(name)
