"""`tune`: searches the settings of all kernels of a scope, and makes a table of the best ones."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune import results
from autotune.kernels import measured, modelled, npu
from autotune.kernels.scope import Scope
from autotune.kernels.tunables import Tunable, tunables_of
from autotune.search import Found, Options, Task, run
from autotune.search.run import Report
from autotune.search.study import Studies
from moe_triton.backends.cpu.triton.cache import safe_folder
from moe_triton.core.errors import ArgumentError
from moe_triton.core.tables import Table

FOLDER = "autotune"
BUDGET = 64


@dataclass(frozen=True)
class Tuned:
    """What a search found.

    Attributes:
        scope: what was asked for.
        found: by kernel.
    """

    scope: Scope
    found: tuple[Found, ...]

    @property
    def table(self) -> Table:
        """The best settings of each kernel.

        Raises:
            ArgumentError: no kernel could be priced.
        """
        return results.table_of(self.scope, self.found)


def tasks_of(scope: Scope) -> Sequence[Task]:
    """The kernels of a scope as tasks: measured on a CPU, on an NPU if asked to be, and modelled otherwise.

    Raises:
        ArgumentError: see `tunables_of`, `Scope.priced_on` and `autotune.kernels.npu.device_of`.
    """
    if scope.measure and not scope.is_cpu:
        npu.device_of(scope.chip)  # rather than after plans are made
    tunables = _tunables_of(scope)
    if scope.is_cpu:
        return [measured.task_of(tunable) for tunable in tunables]
    if scope.measure:
        return [npu.task_of(tunable, scope.chip) for tunable in tunables]
    machine = scope.priced_on()
    return [modelled.task_of(tunable, scope.chip, machine) for tunable in tunables]


def _tunables_of(scope: Scope) -> list[Tunable]:
    """`tunables_of`, with an error that says which kernels there are."""
    try:
        return tunables_of(scope)
    except ArgumentError as error:
        if error.argument != "kernel" or not scope.kernels:
            raise
    there = sorted({tunable.keys[0] for tunable in tunables_of(replace(scope, kernels=()))})
    rule = f"in plans of these sizes the kernels with settings are {', '.join(there)}"
    raise ArgumentError("kernel", ", ".join(scope.kernels), rule, "Name one of them, or other sizes.")


def study_of(scope: Scope) -> Path:
    """The file that keeps what is known of a machine's kernels."""
    return safe_folder() / FOLDER / f"{scope.machine}.db"


def workers_of(scope: Scope) -> int:
    """Processes that suit a scope: stop-watches must not disturb each other."""
    return 1 if scope.is_measured else max(1, len(os.sched_getaffinity(0)))


def through(scope: Scope, budget: int = BUDGET, study: Path | None = None) -> Tuned:
    """What a study knows of the kernels of a scope that are through, all of their candidates priced.

    Args:
        scope, budget, study: as `tune` has them.
    """
    studies = Studies(study or study_of(scope), budget=budget)
    try:
        known = [Found(task, tuple(studies.trials(task))) for task in tasks_of(scope)]
    finally:
        studies.close()
    wanted = [min(len(search.task.candidates()), budget) for search in known]
    return Tuned(scope, tuple(f for f, number in zip(known, wanted, strict=True) if len(f.trials) >= number))


def tune(
    scope: Scope | None = None,
    *,
    budget: int = BUDGET,
    workers: int = 0,
    seed: int = 0,
    resume: bool = False,
    study: Path | None = None,
    report: Report = lambda *_: None,
) -> Tuned:
    """Searches the settings of all kernels of a scope. Nothing is written but the study.

    Args:
        scope: the machine and the sizes; those of `Scope` if None.
        budget: most candidates of one kernel: a space of no more is gone through, a larger one sampled.
        workers: processes; 0 for what suits the scope.
        seed: of the sampler.
        resume: keep what the study holds, and take part where others are at work on it.
        study: its file; by default in the user's cache.
        report: told each candidate: the task's name, the settings, and what they came to.

    Raises:
        ArgumentError: a size or a name is none, or another process works on the study.
        WrongBitsError: a candidate gives other results than the default.
        SearchError: a worker failed. What was found is kept.
    """
    scope = scope or Scope()
    workers = workers or workers_of(scope)
    options = Options(study or study_of(scope), resume, workers, seed, budget)
    return Tuned(scope, tuple(run(functools.partial(tasks_of, scope), options, report)))
