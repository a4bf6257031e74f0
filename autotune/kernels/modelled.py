"""What a candidate takes on an NPU, by the model: the launches of plans, replayed with it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from autotune.kernels.feasible import compiled, why_not
from autotune.kernels.tunables import Situation, Tunable
from autotune.kernels.versions import DIGITS, code_of, version_of
from autotune.model.constants import Machine
from autotune.model.cost import Cost, Table, Work
from autotune.model.floor import floor_of_cost
from autotune.model.kernel_costs.replay import ReplayError, replay_of
from autotune.search.task import FAR_WORSE, Outcome, Task
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.space import Settings


@dataclass(frozen=True)
class Timed:
    """A candidate on the slowest rank of one situation.

    Attributes:
        ns: of all its launches.
        parts: of these by what they went to.
        busy: nanoseconds that each pipe of the slowest core is occupied.
        num_bytes: read and written.
    """

    ns: float
    parts: Mapping[str, float]
    busy: Mapping[str, float]
    num_bytes: int


def timed(kernel: TritonKernel, situation: Situation, chip: str, machine: Machine) -> Timed:
    """Replays a situation.

    Raises:
        ToolchainError, ReplayError: see `replay_of`.
    """
    each = (_of_rank(kernel, works, chip, machine) for works in situation.works)
    return max(each, key=lambda of_rank: of_rank.ns)


def _of_rank(kernel: TritonKernel, works: Sequence[Work], chip: str, machine: Machine) -> Timed:
    parts: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    num_bytes = 0
    for work in works:
        blocks = min(work.blocks, kernel.programs or work.blocks)
        launch = replay_of(kernel, chip, _arguments(work), blocks, machine)
        parts.update({name: cycles / machine.clock_ghz for name, cycles in launch.slowest.parts.items()})
        busy.update({name: cycles / machine.clock_ghz for name, cycles in launch.slowest.busy.items()})
        num_bytes += launch.read + launch.written
    return Timed(sum(parts.values()), dict(parts), dict(busy), num_bytes)


def _arguments(work: Work) -> Mapping[str, int | Table]:
    arguments = {name: value for name, value in work.arguments.items() if not isinstance(value, tuple)}
    assert len(arguments) == len(work.arguments), f"{work.kernel.name} takes a region"
    return arguments


@dataclass(frozen=True)
class ModelledTask(Task):
    """A kernel's settings, priced by the model. A value is nanoseconds, the mean over the situations.

    Attributes:
        tunable: the kernel and its launches.
        chip: that it is compiled for.
        machine: the model's constants.
    """

    tunable: Tunable = field(kw_only=True)
    chip: str = field(kw_only=True)
    machine: Machine = field(kw_only=True)

    def evaluate(self, settings: Settings, best: float | None) -> Outcome:
        """Prices a candidate by the model: its mean nanoseconds over the situations."""
        default = self.tunable.kernel
        kernel = default.with_settings(settings)
        if self._unpriced:  # no other settings could be better than what is not known
            return Outcome.infeasible(self._unpriced)
        if kernel != default and (reason := why_not(kernel, default, self.chip)):
            return Outcome(None, reason, {"ub_bytes": compiled(kernel, self.chip).ub_bytes})
        try:
            return self._priced(kernel, best)
        except (ToolchainError, ReplayError) as error:
            return Outcome.infeasible(str(error).partition("\n")[0])

    @functools.cached_property
    def _unpriced(self) -> str:
        """Why the kernel cannot be priced with its own settings; empty if it can."""
        try:
            timed(self.tunable.kernel, self.tunable.situations[0], self.chip, self.machine)
        except (ToolchainError, ReplayError) as error:
            return str(error).partition("\n")[0]
        return ""

    def _priced(self, kernel: TritonKernel, best: float | None) -> Outcome:
        times: list[Timed] = []
        number = len(self.tunable.situations)
        for situation in self.tunable.situations:
            times.append(timed(kernel, situation, self.chip, self.machine))
            at_least = sum(each.ns for each in times) / number
            if best is not None and at_least > FAR_WORSE * best and len(times) < number:
                return Outcome(
                    at_least, f"given up: more than {FAR_WORSE:g} times the best", {"ns": at_least}
                )
        return Outcome(sum(each.ns for each in times) / number, facts=self._facts(kernel, times))

    def _facts(self, kernel: TritonKernel, times: Sequence[Timed]) -> dict[str, Any]:
        number = len(times)

        def mean(of: str) -> dict[str, float]:
            total: Counter[str] = Counter()
            for each in times:
                total.update(getattr(each, of))
            return {name: ns / number for name, ns in total.items()}

        return {
            "ns": sum(each.ns for each in times) / number,
            "parts": mean("parts"),
            "busy": mean("busy"),
            "bytes": sum(each.num_bytes for each in times) / number,
            "ub_bytes": compiled(kernel, self.chip).ub_bytes,
        }


def task_of(tunable: Tunable, chip: str, machine: Machine) -> ModelledTask:
    """The task of a tunable, named by all that decides its outcomes."""
    kernel = tunable.kernel
    assert kernel.space is not None
    decides = (
        version_of(machine),
        chip,
        code_of(kernel),
        kernel.args,
        (kernel.multibuffer, kernel.programs),
        sorted(kernel.constants.items(), key=str),
        [situation.content() for situation in tunable.situations],
    )
    digest = sha256(repr(decides).encode()).hexdigest()[:DIGITS]
    name = f"{chip}: {tunable.label} [{digest}]"
    return ModelledTask(name, kernel.space, kernel.settings, tunable=tunable, chip=chip, machine=machine)


def floor_ns(num_bytes: float, machine: Machine) -> float:
    """Nanoseconds that so many bytes, read and written, take at the machine's bandwidth."""
    return 1e3 * floor_of_cost(Cost({}, read=round(num_bytes))).us(machine)
