"""The times of steps in a selftest's report, and what the model says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autotune.model.constants import Machine
from autotune.model.cost import KernelCost, Place, Work, work_of
from autotune.model.kernel_costs.counted.run import standing_for
from autotune.model.topology import tiers
from autotune.model.traffic import Traffic, traffic_of
from autotune.selftest_reports.constants import bad, machine_of_report, read_document
from moe_triton.backends import CAPABILITIES
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.core.plan import Plan, synced_phases
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.schemes import make_scheme
from moe_triton.schemes.rank_context import RankContext
from moe_triton.tools.selftest.cases import inputs_of
from moe_triton.tools.selftest.checks import timing
from moe_triton.tools.selftest.checks.operators import SCHEMES

MOST_SIZE = 1 << 16  # tokens of a rank, or ranks
TIMEOUT_US = 60_000_000  # of a plan's waits: nothing depends on it here


@dataclass(frozen=True)
class StepTime:
    """How long a step of an operator took on rank 0.

    Attributes:
        scheme: how tokens travelled.
        rows: how they were quantised, or "bf16".
        tokens: of each rank.
        ranks: of the group.
        seed: of the routing.
        operator: "dispatch" or "combine".
        step: of its plan.
        us: the median.
    """

    scheme: str
    rows: str
    tokens: int
    ranks: int
    seed: int
    operator: str
    step: str
    us: float

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.scheme}, BS {self.tokens}, {self.rows}: {self.operator}, {self.step}"


@dataclass(frozen=True)
class Measured:
    """What a report says of a machine.

    Attributes:
        machine: with what was measured directly.
        where: SoC and date.
        times: of steps.
    """

    machine: Machine
    where: str
    times: tuple[StepTime, ...]


def read_report(path: Path) -> Measured:
    """Reads a selftest's report.

    Args:
        path: of its folder, or of its JSON.

    Raises:
        ArgumentError: there is none, it cannot be read, it is of a CPU, or it has no times.
    """
    document = read_document(path)
    machine = machine_of_report(document)
    try:
        where = f"{document['machine']['SoC']} {document['date'].partition('T')[0]}"
        seed = int(document["settings"]["seed"])
        if not 0 <= seed < 1 << 63:
            raise ValueError(f"the seed is {seed}")
        times = tuple(
            time for check in document["checks"] if _is_timing(check) for time in _times_of(check, seed)
        )
    except ArgumentError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise bad(str(path), f"it must be complete ({type(error).__name__}: {error})") from None
    if machine.name == "cpu":
        raise bad("of a CPU", "only an NPU has steps that the model describes")
    if not times:
        raise bad(str(path), f'its stage "{timing.STAGE}" must have passed: the times of steps are there')
    return Measured(machine, where, times)


def _is_timing(check: Mapping[str, Any]) -> bool:
    return bool(check["stage"] == timing.STAGE and check["status"] == "passed")


def _times_of(check: Mapping[str, Any], seed: int) -> list[StepTime]:
    """Those above 0: a clock may not see the shortest steps."""
    figures, facts = check["figures"], check["facts"]
    times = []
    for name, us in figures.items():
        operator, is_step, step = name.removesuffix("_us").partition(timing.STEP)
        if is_step and us > 0:
            sizes = int(figures[timing.TOKENS]), int(figures[timing.RANKS])
            scheme, rows = facts[timing.SCHEME], facts[timing.ROWS]
            is_known = scheme in SCHEMES and rows in (timing.BF16, *filter(None, ROW_FORMATS))
            if not (is_known and all(1 <= size <= MOST_SIZE for size in sizes) and math.isfinite(us)):
                raise ValueError(f"{check['name']} is of {scheme}, {rows}, {sizes}, {us} us")
            times.append(StepTime(scheme, rows, *sizes, seed, operator, step, us))
    return times


class StepModel:
    """What the model says of steps: the sum of the kernels' costs of a step's launches.

    Args:
        kernel_costs: of kernels.
        blocks: that each kernel ran on.
    """

    def __init__(
        self, kernel_costs: Callable[[AscendCKernel | TritonKernel], KernelCost], blocks: int
    ) -> None:
        self._kernel_costs, self._blocks = kernel_costs, blocks
        self._works: dict[tuple[object, ...], dict[tuple[str, str], list[_Phase]]] = {}

    def waits(self, time: StepTime) -> bool:
        """Whether a step takes as long as other ranks do, so that it says nothing of this one.

        Raises:
            ArgumentError: the plan has no such step.
        """
        return not self._of(time)

    def __call__(self, machine: Machine, time: StepTime) -> float:
        """Microseconds of a step that does not wait.

        Raises:
            ArgumentError: the plan has no such step.
        """
        total_us = 0.0
        for phase in self._of(time):
            cost = self._kernel_costs(phase.work.kernel)(phase.work, machine)
            total_us += (cost.after_sync(machine.sync_all_us) if phase.is_synced else cost).us
        return total_us

    def _of(self, time: StepTime) -> list[_Phase]:
        key = time.scheme, time.rows, time.tokens, time.ranks, time.seed
        if key not in self._works:
            self._works[key] = _works_of(time, self._blocks)
        phases = self._works[key].get((time.operator, time.step))
        if phases is None:
            names = [f"{operator}, {step}" for operator, step in self._works[key]]
            raise bad(f"with a step {time.name}", f"this moe_triton's plans have: {'; '.join(names)}")
        return phases


@dataclass(frozen=True)
class _Phase:
    """A launch or a phase of one with its placeholders filled, and whether it begins with a SyncAll."""

    work: Work
    is_synced: bool


def _works_of(time: StepTime, blocks: int) -> dict[tuple[str, str], list[_Phase]]:
    """By operator and step: its launches and phases; none for a step that waits."""
    plans, traffic = _plans_and_traffic(time, blocks)
    works: dict[tuple[str, str], list[_Phase]] = {}
    for plan in plans:
        synced, run = synced_phases(plan.launches), standing_for(plan, [traffic])
        for number, launch in enumerate(plan.launches):
            step = works.setdefault((plan.operator, launch.step), [])
            if not run.awaited(number, 0).launch.size:
                step.append(_Phase(work_of(launch, traffic, Place(run, number, 0)), number in synced))
    return works


def _plans_and_traffic(time: StepTime, blocks: int) -> tuple[list[Plan], Traffic]:
    """What the stage "timing" ran on rank 0."""
    quantize = None if time.rows == timing.BF16 else time.rows
    case = timing.timed_case(time.scheme, time.tokens, quantize, time.ranks, time.seed)
    config = case.config
    ids = np.stack([inputs_of(case, rank, 0).topk_idx.numpy() for rank in range(time.ranks)])
    traffic = traffic_of(config, 0, ids, tiers(config.product, time.ranks, 0))
    scheme = make_scheme(RankContext(config, 0, blocks, TIMEOUT_US, CAPABILITIES["npu"]))
    plain = DispatchVariant(case.dtype, ROW_FORMATS[quantize], local_bypass=scheme.local_bypass)
    dispatch = replace(plain, given_ids=torch.int32)
    in_place = scheme.place("results", case.dtype.itemsize) is not None
    combine = CombineVariant(case.dtype, weights=True, in_place=in_place, local_bypass=scheme.local_bypass)
    plans = [
        scheme.whole(dispatch, 0, scheme.context.parts("dispatch", time.tokens)),
        scheme.whole(combine, 0, scheme.context.parts("combine", time.tokens)),
    ]
    return plans, traffic
