"""`Studies`: candidates and their outcomes in an SQLite file, which any number of processes share.

A small space is gone through: each worker takes the next candidate that nobody has. A large one is sampled by
Optuna (tree-structured Parzen estimator), which is shown what the file holds, once those are priced that the
task names first. A candidate whose process is
gone is anybody's again.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from autotune.search.sampler import sampled
from autotune.search.task import Outcome, Task
from moe_triton.core.errors import ArgumentError
from moe_triton.core.space import Settings, settings_of, text_of

WAIT_S = 60.0  # for another process that writes to the file, or that begins to work on it
PAUSE_S = 0.05
_TABLE = """
CREATE TABLE IF NOT EXISTS trials (
  task TEXT, settings TEXT, process INTEGER, started INTEGER, outcome TEXT, PRIMARY KEY (task, settings)
)"""


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
    """

    def __init__(self, path: Path, seed: int = 0, budget: int = 64) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path, self.seed, self.budget = path, seed, budget
        self._lock = path.with_suffix(".lock").open("a")
        self._file = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=NORMAL")  # what ends a process loses nothing
        self._file.execute(_TABLE)
        self._candidates: dict[str, list[dict[str, int]]] = {}

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
            _lock_within(self._lock, fcntl.LOCK_SH, self.path)
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            remedy = "Take part in it with --resume, or wait for its end."
            raise ArgumentError("study", self.path, "another process works on it", remedy) from None
        self._file.executemany("DELETE FROM trials WHERE task = ?", [(task.name,) for task in tasks])
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def next(self, task: Task) -> dict[str, int] | None:
        """Takes a candidate for this process; None if there is none any more."""
        candidates = self._all(task)
        while True:
            found = self._rows(task)
            free = [each for each in candidates if text_of(each) not in found]
            is_sampled = len(candidates) > self.budget
            if not free or (is_sampled and len(found) >= self.budget):
                return None
            outcomes = {text: row.outcome for text, row in found.items()}
            first = task.first(outcomes) if is_sampled else free
            begun = next((each for each in first if text_of(each) not in found), None)
            settings = begun or sampled(task, free, outcomes, self.seed)
            if self._take(task, settings):
                return settings

    def tell(self, task: Task, settings: Settings, outcome: Outcome) -> None:
        """Keeps what a candidate came to."""
        text = json.dumps({**vars(outcome), "facts": dict(outcome.facts)})
        self._file.execute(
            "UPDATE trials SET outcome = ? WHERE task = ? AND settings = ?",
            (text, task.name, text_of(settings)),
        )

    def give_back(self, task: Task, settings: Settings) -> None:
        """Lets others price a candidate."""
        where = task.name, text_of(settings)
        self._file.execute("DELETE FROM trials WHERE task = ? AND settings = ?", where)

    def trials(self, task: Task) -> list[Trial]:
        """All that were priced, the task's own first, the others in the order of the space."""
        found = self._rows(task)
        priced = ((each, found.get(text_of(each))) for each in self._all(task))
        return [Trial(each, row.outcome) for each, row in priced if row and row.outcome]

    def best(self, task: Task) -> float | None:
        """The smallest value so far; None if there is none."""
        outcomes = (row.outcome for row in self._rows(task).values())
        return min((o.value for o in outcomes if o and o.is_exact and o.value is not None), default=None)

    def _all(self, task: Task) -> list[dict[str, int]]:
        if task.name not in self._candidates:
            self._candidates[task.name] = task.candidates()
        return self._candidates[task.name]

    def _take(self, task: Task, settings: Settings) -> bool:
        """Whether nobody else has it."""
        row = task.name, text_of(settings), os.getpid(), start_of(os.getpid())
        statement = "INSERT OR IGNORE INTO trials VALUES (?, ?, ?, ?, NULL)"
        return self._file.execute(statement, row).rowcount == 1

    def _rows(self, task: Task) -> Mapping[str, _Row]:
        """By settings: what is priced, and what a living process is at."""
        query = "SELECT settings, process, started, outcome FROM trials WHERE task = ?"
        rows = {}
        for text, process, started, outcome in self._file.execute(query, (task.name,)).fetchall():
            if outcome is None and start_of(process) != started:
                self.give_back(task, settings_of(text))
                continue
            rows[text] = _Row(Outcome(**json.loads(outcome)) if outcome else None)
        return rows


@dataclass(frozen=True)
class _Row:
    """A candidate that somebody has taken; without outcome, it is being priced."""

    outcome: Outcome | None


def _lock_within(file: IO[str], how: int, path: Path) -> None:
    end = time.monotonic() + WAIT_S
    while True:
        try:
            return fcntl.flock(file, how | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > end:
                rule = f"another process has held it for {WAIT_S:.0f} s"
                raise ArgumentError("study", path, rule, "End that process.") from None
            time.sleep(PAUSE_S)


def start_of(process: int) -> int:
    """When it started, in the kernel's ticks: later than any before it of its number; 0 if it is gone."""
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    state, started = after_name[0], after_name[19]  # fields 3 and 22 of proc(5)
    return 0 if state in "ZX" else int(started)
