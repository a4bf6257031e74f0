"""What a command says while it works: a bar on a terminal, and elsewhere a line now and then.

It goes to standard error, so that what a command prints can be piped and read by programs.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

BAR = 20  # characters
EVERY_S = 10.0
"""Between two lines where there is no terminal; what takes less time says nothing there."""


class Work:
    """Work in progress.

    Args:
        what: it is, in few words.
        total: of its steps; None if unknown.

    Attributes:
        done: steps.
        doing: what is at work now.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self.what, self.total = what, total
        self.done, self.doing = 0, ""
        self._begin = time.monotonic()

    def begin(self, doing: str, total: int | None = None) -> None:
        """Says what is at work now.

        Args:
            doing: in a line.
            total: of all steps, where it has changed.
        """
        self.doing, self.total = doing, self.total if total is None else total
        self._changed()

    def advance(self, doing: str | None = None) -> None:
        """A step is done; ``doing`` is next."""
        self.done += 1
        self.doing = self.doing if doing is None else doing
        self._changed()

    def _changed(self) -> None:
        """Nothing: the next line says it."""

    def __str__(self) -> str:
        of = f" of {self.total}" if self.total is not None else ""
        steps = f"{self.done}{of}" if self.done or of else ""
        seconds = f"{time.monotonic() - self._begin:.0f} s"
        return f"{self.what}: {', '.join(each for each in (steps, self.doing, seconds) if each)}"


class _Bar(Work):
    """The same on a terminal."""

    def __init__(self, what: str, total: int | None, shown: Progress) -> None:
        super().__init__(what, total)
        self._shown = shown
        self._task: TaskID = shown.add_task(escape(what), total=total)

    def _changed(self) -> None:
        said = f"{self.what}: {self.doing}" if self.doing else self.what
        self._shown.update(self._task, completed=self.done, total=self.total, description=escape(said))


@contextmanager
def progress(what: str, total: int | None = None, console: Console | None = None) -> Iterator[Work]:
    """Says how far work is, as long as it lasts.

    Args:
        what: the work is, in few words.
        total: of its steps, if known.
        console: to say it on; that of standard error if None.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        with _lines(Work(what, total), console) as work:
            yield work
        return
    # What is at work comes last, and goes on below: how far it is has its place in any width.
    doing = TextColumn("{task.description}", table_column=Column(ratio=1, overflow="fold"))
    columns = BarColumn(BAR), MofNCompleteColumn(), TimeElapsedColumn(), doing
    # What is printed meanwhile goes above the bar, but not to it what goes to a file.
    to_terminal = sys.stdout.isatty()
    with Progress(*columns, console=console, transient=True, redirect_stdout=to_terminal) as shown:
        yield _Bar(what, total, shown)


@contextmanager
def _lines(work: Work, console: Console) -> Iterator[Work]:
    is_over = threading.Event()

    def say() -> None:
        while not is_over.wait(EVERY_S):
            console.print(str(work), markup=False, highlight=False, soft_wrap=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield work
    finally:
        is_over.set()
        thread.join()
