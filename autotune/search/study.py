"""`Studies`: candidates and their outcomes in an SQLite file, which any number of processes share.

A small space is gone through: each worker takes the next candidate that nobody has. A large one is sampled by
Optuna (tree-structured Parzen estimator), which is shown what the file holds, once those are priced that the
task names first (`sampled`). A candidate whose process is gone is anybody's again.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import writing
from autotune.search.task import Outcome, Task
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError, ToolchainError
from moe_triton.core.installing import install
from moe_triton.core.plain_files import check_plain, open_to_lock
from moe_triton.core.space import Settings, settings_of, text_of

STARTUP = 10  # candidates that are drawn at random before the sampler begins to learn
TRIES = 16  # for one that is allowed and nobody has
_FILES = "", "-journal", "-wal", "-shm"
"""What SQLite opens, and would wait for if it were a pipe."""
_TABLE = """
CREATE TABLE IF NOT EXISTS trials (
  task TEXT, settings TEXT, process INTEGER, started INTEGER, outcome TEXT, PRIMARY KEY (task, settings)
)"""


def sampled(
    task: Task, free: Sequence[dict[str, int]], known: Mapping[str, Outcome | None], seed: int
) -> dict[str, int]:
    """The next candidate: the same for the same seed and the same that is known.

    Args:
        task: whose.
        free: candidates that nobody has, at least one.
        known: outcomes by settings; None for those that are being priced.
        seed: of the sampler.

    Raises:
        ToolchainError: Optuna is not installed.
    """
    drawn = random.Random(f"{seed} {len(known)}")
    if len(known) < STARTUP:
        return drawn.choice(free)
    optuna, distributions = _optuna(), _distributions(task)
    sampler = optuna.samplers.TPESampler(
        seed=drawn.randrange(2**31), n_startup_trials=STARTUP, constant_liar=True
    )
    study = optuna.create_study(sampler=sampler)
    study.add_trials([_trial(text, outcome, distributions) for text, outcome in known.items()])
    texts = {text_of(each): each for each in free}
    for _ in range(TRIES):
        trial = study.ask(distributions)
        text = text_of({name: int(value) for name, value in trial.params.items()})
        if text in texts:
            return texts[text]
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return drawn.choice(free)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ToolchainError(f"optuna is missing: {error}. Run: {install('tune')}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _distributions(task: Task) -> dict[str, Any]:
    pools = task.choices().items()
    return {name: _optuna().distributions.CategoricalDistribution(values) for name, values in pools}


def _trial(text: str, outcome: Outcome | None, distributions: dict[str, Any]) -> Any:
    states = _optuna().trial.TrialState
    is_exact = outcome is not None and outcome.is_exact
    state = states.RUNNING if outcome is None else states.COMPLETE if is_exact else states.PRUNED
    return _optuna().trial.create_trial(
        state=state,
        params=settings_of(text),
        distributions=distributions,
        value=outcome.value if outcome is not None and is_exact else None,
    )


@dataclass(frozen=True)
class Trial:
    """A candidate that was priced.

    Attributes:
        settings: the candidate.
        outcome: what it came to.
    """

    settings: dict[str, int]
    outcome: Outcome


class Studies:
    """What is known of tasks, in one file.

    Args:
        path: of the file, made with its folder if absent.
        seed: of the sampler.
        budget: candidates of a space that is larger than that; a smaller one is gone through.

    Raises:
        ArgumentError: the file is no study, or cannot be read and written; of every method, too.
    """

    def __init__(self, path: Path, seed: int = 0, budget: int = 64) -> None:
        self.path, self.seed, self.budget = path, seed, budget
        self._candidates: dict[str, list[dict[str, int]]] = {}
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for suffix in _FILES:
                check_plain(path.with_name(path.name + suffix))
            self._lock = open_to_lock(path.with_suffix(".lock"))
        except (OSError, ValueError) as error:
            raise self._unusable(error) from None
        try:
            self._file = sqlite3.connect(path, timeout=writing.WAIT_S, isolation_level=None)
        except sqlite3.Error as error:
            self._lock.close()
            raise self._unusable(error) from None
        try:
            self._execute("PRAGMA journal_mode=WAL")
            self._execute("PRAGMA synchronous=NORMAL")  # what ends a process loses nothing
            self._execute(_TABLE)
        except ArgumentError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file; others may begin anew."""
        self._file.close()
        self._lock.close()

    def begin(self, tasks: Sequence[Task], *, resume: bool) -> None:
        """Goes on with what is known of tasks, or begins anew.

        Args:
            tasks: which ones.
            resume: keep what is known, and take part where others are at work.

        Raises:
            ArgumentError: others are at work, and what is known is not to be kept.
        """
        if resume:
            writing.lock_within(self._lock, fcntl.LOCK_SH, "study", self.path)
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            remedy = "Take part in it with --resume, or wait for its end."
            raise ArgumentError("study", self.path, "another process works on it", remedy) from None
        for task in tasks:
            self._execute("DELETE FROM trials WHERE task = ?", (task.name,))
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def next(self, task: Task) -> dict[str, int] | None:
        """Takes a candidate for this process; None if there is none any more."""
        candidates = self._all(task)
        while True:
            outcomes = self._rows(task)
            free = [each for each in candidates if text_of(each) not in outcomes]
            is_sampled = len(candidates) > self.budget
            if not free or (is_sampled and len(outcomes) >= self.budget):
                return None
            first = task.first(outcomes) if is_sampled else free
            begun = next((each for each in first if text_of(each) not in outcomes), None)
            settings = begun or sampled(task, free, outcomes, self.seed)
            if self._take(task, settings):
                return settings

    def tell(self, task: Task, settings: Settings, outcome: Outcome) -> None:
        """Keeps what a candidate came to."""
        text = json.dumps({**vars(outcome), "facts": dict(outcome.facts)})
        self._execute(
            "UPDATE trials SET outcome = ? WHERE task = ? AND settings = ?",
            (text, task.name, text_of(settings)),
        )

    def give_back(self, task: Task, settings: Settings) -> None:
        """Lets others price a candidate."""
        self._execute("DELETE FROM trials WHERE task = ? AND settings = ?", (task.name, text_of(settings)))

    def trials(self, task: Task) -> list[Trial]:
        """All that were priced, the task's own first, the others in the order of the space."""
        outcomes = self._rows(task)
        priced = ((each, outcomes.get(text_of(each))) for each in self._all(task))
        return [Trial(each, outcome) for each, outcome in priced if outcome]

    def best(self, task: Task) -> float | None:
        """The smallest value so far; None if there is none."""
        outcomes = self._rows(task).values()
        return min((o.value for o in outcomes if o and o.is_exact and o.value is not None), default=None)

    def _all(self, task: Task) -> list[dict[str, int]]:
        if task.name not in self._candidates:
            self._candidates[task.name] = task.candidates()
        return self._candidates[task.name]

    def _take(self, task: Task, settings: Settings) -> bool:
        """Whether nobody else has it."""
        row = task.name, text_of(settings), os.getpid(), start_of(os.getpid())
        return self._execute("INSERT OR IGNORE INTO trials VALUES (?, ?, ?, ?, NULL)", row).rowcount == 1

    def _rows(self, task: Task) -> Mapping[str, Outcome | None]:
        """Outcomes by settings; None for what a living process is at."""
        query = "SELECT settings, process, started, outcome FROM trials WHERE task = ?"
        rows: dict[str, Outcome | None] = {}
        for row in self._execute(query, (task.name,)).rows:
            try:
                text, process, started, outcome = row
                settings = settings_of(text)
                rows[text] = Outcome.from_json(outcome) if outcome is not None else None
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise self._unusable(f"a row of {task.name}: {error}") from None
            if outcome is None and start_of(process) != started:
                self.give_back(task, settings)
                del rows[text]
        return rows

    def _execute(self, statement: str, values: Iterable[object] = ()) -> _Done:
        try:
            cursor = self._file.execute(statement, tuple(values))
            return _Done(cursor.rowcount, cursor.fetchall())
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _unusable(self, why: object) -> ArgumentError:
        said = why.strerror or why if isinstance(why, OSError) else why
        rule = f"it must be a study that can be read and written ({said})"
        remedy = (
            "Make room where that is short; else remove it with its .lock, -wal and -shm, or name another: "
            "--study."
        )
        return ArgumentError("study", self.path, rule, remedy, code=INVALID_ARGUMENT)


@dataclass(frozen=True)
class _Done:
    """What a statement came to: rows are read at once, since a damaged file shows itself only then."""

    rowcount: int
    rows: list[Any]


def start_of(process: int) -> int:
    """When it started, in the kernel's ticks: later than any before it of its number; 0 if it is gone."""
    if type(process) is not int:  # of a damaged study
        return 0
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    state, started = after_name[0], after_name[19]  # fields 3 and 22 of proc(5)
    return 0 if state in "ZX" else int(started)
