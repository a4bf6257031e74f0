"""`run`: prices the candidates of all tasks with several workers, and says what was found.

Workers are processes. Each begins at another task, and helps with those of the others when it is through.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from autotune.search.study import Studies, Trial, start_of
from autotune.search.task import Outcome, Task, WrongBitsError
from moe_triton.core.errors import MoeTritonError
from moe_triton.core.space import text_of
from moe_triton.processes import MAIN, main_hidden

GRACE_S = 60.0  # for a worker to end what it is at
POLL_S = 0.2
PRELOAD = ["torch", "autotune.model.clusters.group", "autotune.model.kernel_costs.kernel_cost"]
"""What a process that workers are forked from imports once."""

Tasks = Callable[[], Sequence[Task]]
"""Makes the tasks; each worker calls it, so it must be one that can be pickled."""
Report = Callable[[str, dict[str, int], Outcome], None]
"""Told each candidate: the task's name, the settings, and what they came to."""


class SearchError(MoeTritonError):
    """A worker failed; what was found before is kept."""


LEAST_GAIN = 0.03
"""The share of the default's time that settings must save: half of the model's mean error (docs/model.md)."""


@dataclass(frozen=True)
class Options:
    """How to search.

    Attributes:
        study: the file that keeps candidates and outcomes.
        resume: go on with what is in it.
        workers: processes.
        seed: of the sampler.
        budget: most candidates of one task.
    """

    study: Path
    resume: bool = False
    workers: int = 1
    seed: int = 0
    budget: int = 64


@dataclass(frozen=True)
class Found:
    """What was found out about one task.

    Attributes:
        task: the task.
        trials: its candidates, its own settings first.
    """

    task: Task
    trials: tuple[Trial, ...]

    @property
    def ranking(self) -> list[Trial]:
        """Those that were priced to the end, the best first; of as good ones the earlier in the space."""
        exact = [trial for trial in self.trials if trial.outcome.is_exact]
        return sorted(exact, key=lambda trial: trial.outcome.value or 0.0)

    @property
    def default(self) -> Trial | None:
        """The task's own settings."""
        return next((t for t in self.trials if t.settings == dict(self.task.own)), None)

    @property
    def best(self) -> Trial | None:
        """What to choose: the default where nothing is clearly better."""
        first, own = next(iter(self.ranking), None), self.default
        if first is None or own is None or own.outcome.value is None or not own.outcome.is_exact:
            return first
        return first if (first.outcome.value or 0.0) <= (1 - LEAST_GAIN) * own.outcome.value else own


def run(tasks_of: Tasks, options: Options, report: Report = lambda *_: None) -> list[Found]:
    """Searches all tasks.

    Args:
        tasks_of: makes them.
        options: how.
        report: told each candidate, in this process.

    Raises:
        WrongBitsError: a candidate gives other results than the default.
        SearchError: a worker failed, or cannot import the tasks.
        ArgumentError: another process works on the study, and this one is to begin anew.
        KeyboardInterrupt: with everything kept.
    """
    studies = Studies(options.study, options.seed, options.budget)
    try:
        tasks = tasks_of()
        studies.begin(tasks, resume=options.resume)
        if options.workers > 1:
            _in_processes(tasks_of, options, report)
        else:
            _work(studies, tasks, report, lambda: False)
        return [Found(task, tuple(studies.trials(task))) for task in tasks]
    finally:
        studies.close()


def _work(studies: Studies, tasks: Sequence[Task], report: Report, is_over: Callable[[], bool]) -> None:
    for task in tasks:
        while not is_over():
            settings = studies.next(task)
            if settings is None:
                break
            try:
                outcome = task.evaluate(settings, studies.best(task))
            except BaseException:
                studies.give_back(task, settings)
                raise
            studies.tell(task, settings, outcome)
            report(task.name, settings, outcome)


def _in_processes(tasks_of: Tasks, options: Options, report: Report) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    told: multiprocessing.Queue[tuple[str, Any]] = context.Queue()
    over = context.Event()
    owner = os.getpid(), start_of(os.getpid())
    processes = [
        context.Process(target=_worker, args=(tasks_of, options, number, told, over, owner))
        for number in range(options.workers)
    ]
    try:
        with contextlib.nullcontext() if _is_of_main(tasks_of) else main_hidden():
            for process in processes:
                process.start()
        _listen(processes, told, report)
    finally:
        over.set()
        _end(processes, told)


def _is_of_main(tasks_of: Tasks) -> bool:
    """Whether workers have to import the script that is run: what they call is defined there.

    Raises:
        SearchError: it is, and they cannot: it came from standard input or was typed in.
    """
    if MAIN.encode() not in pickle.dumps(tasks_of):
        return False
    main = sys.modules[MAIN]
    if not (main.__spec__ or Path(getattr(main, "__file__", "")).is_file()):
        raise SearchError("workers cannot import the tasks: put them in a module, or pass workers=1")
    return True


def _listen(processes: Sequence[Any], told: Any, report: Report) -> None:
    """Until every worker has said that it is through."""
    working = len(processes)
    while working:
        try:
            what, message = told.get(timeout=POLL_S)
        except queue.Empty:
            dead = [process for process in processes if process.exitcode not in (None, 0)]
            if dead:
                said = ", ".join(f"worker {process.pid} with {process.exitcode}" for process in dead)
                raise SearchError(f"{said} ended without a word; --resume goes on with the others") from None
            continue
        if what == "trial":
            report(*message)
        elif what == "through":
            working -= 1
        else:
            raise WrongBitsError(message) if what == "bits" else SearchError(message)


def _end(processes: Sequence[Any], told: Any) -> None:
    """Waits for the workers; those that do not end are ended."""
    deadline = time.monotonic() + GRACE_S
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        try:  # a worker does not end while the queue holds what it said
            told.get(timeout=POLL_S)
        except queue.Empty:
            continue
    for process in processes:
        if process.is_alive():
            process.kill()
        if process.pid is not None:
            process.join(GRACE_S)


def _worker(
    tasks_of: Tasks, options: Options, number: int, told: Any, over: Event, owner: tuple[int, int]
) -> None:
    """Prices candidates until none is left, or the process that asked for them is gone.

    That process is not the parent, a fork server, which stays as long as a worker does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides
    try:
        tasks = list(tasks_of())
        begin = len(tasks) * number // options.workers
        studies = Studies(options.study, options.seed + number, options.budget)
        _work(
            studies,
            tasks[begin:] + tasks[:begin],
            lambda *message: told.put(("trial", message)),
            lambda: over.is_set() or start_of(owner[0]) != owner[1],
        )
        studies.close()
        told.put(("through", None))
    except WrongBitsError as error:
        told.put(("bits", str(error)))
    except MoeTritonError as error:
        told.put(("failed", str(error)))
    except Exception:
        told.put(("failed", traceback.format_exc()))


def described(settings: dict[str, int], outcome: Outcome) -> str:
    """A candidate in a line."""
    figure = "not possible" if outcome.value is None else f"{outcome.value:.4g}"
    return f"{text_of(settings)}: {figure}{f' ({outcome.reason})' if outcome.reason else ''}"
