"""A rank that dies behind a certain phase of a call, where others go on without it (``on_lost="mask"``)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moe_triton import EPBuffer
from moe_triton.core.plan import Plan
from moe_triton.runtime.executables import Key
from moe_triton.schemes.rank_context import Operator
from tests.distributed.cases import Case
from tests.distributed.masked import round_in_chaos, wrong_in_chaos
from tests.distributed.workers import make_buffer
from tests.patience import seconds

WARM, LEFT = 2, 3
"""Rounds before the one in which the rank dies, for a plan of each zone; and rounds from it on."""


@dataclass(frozen=True)
class CutShort:
    """A case of which a rank dies in the middle of a call.

    Attributes:
        case: whose inputs rounds have.
        victim: the rank.
        operator: in which it dies, of the first round that is looked at.
        phases: that it still does of it, from the first one on.
        options: of the buffers.
    """

    case: Case
    victim: int
    operator: Operator
    phases: int
    options: Mapping[str, Any] = field(default_factory=dict)


def rounds_with_a_death(
    rank: int, num_ranks: int, of: CutShort
) -> tuple[list[str], list[list[int]], list[str]]:
    """Runs rounds, in the first of which that count a rank dies.

    Returns:
        What is wrong; of each of these rounds how many entries are lost, by the ranks that they were for; and
        the steps after which the rank dies.
    """
    case, wrong, lost = of.case, [], []
    options = {"on_lost": "mask", "timeout_s": seconds(300.0), **of.options}
    with make_buffer(case, **options) as buffer:
        for number in range(WARM):
            wrong += wrong_in_chaos(buffer, case, rank, number)
        plans = _plans(buffer, of.operator)
        steps = [launch.step for launch in plans[0][1].launches[: of.phases]]
        if rank == of.victim:
            _die_in(buffer, plans, of.phases)
        for number in range(WARM, WARM + LEFT):
            said, ids = round_in_chaos(buffer, case, rank, number)
            wrong += said
            owners = torch.tensor([case.config.rank_of_expert(expert) for expert in ids.tolist()])
            lost.append(owners.long().bincount(minlength=num_ranks).tolist())
    return wrong, lost, steps


def _plans(buffer: EPBuffer, operator: Operator) -> list[tuple[Key, Plan]]:
    """Those of an operator that have run, with what they are known by."""
    executables = buffer._communicator._executables
    made = [(key, executables.plan(key)) for key in executables.keys()]  # noqa: SIM118
    return [(key, plan) for key, plan in made if plan.operator == operator]


def _die_in(buffer: EPBuffer, plans: list[tuple[Key, Plan]], phases: int) -> None:
    """Has this process killed when it has done the first phases of a plan, each as its own launch."""
    for key, plan in plans:
        launches = [replace(launch, joined=False, fused=None) for launch in plan.launches[:phases]]
        cut = replace(plan, launches=tuple(launches))
        executable: Any = buffer._communicator._executables.put(key, cut)

        def run(bindings: object, run: Callable[[object], int] = executable.run) -> int:
            run(bindings)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("nobody survives that")

        executable.run = run
