"""Runs whose outcome has not been read yet, on back ends that run asynchronously."""

from __future__ import annotations

from collections.abc import Iterator

from moe_triton.backends.base import Bindings, Executable
from moe_triton.operators.buffer import TABLES
from moe_triton.runtime.diagnosis import Run

# What an error about a failed run needs. The rest of a call's memory is not kept alive.
_READ_LATER = ("num_tokens", "topk_idx", TABLES)


class UnreadRuns:
    """The last run of each plan, until its outcome is known."""

    def __init__(self) -> None:
        self._runs: dict[Executable, Run] = {}
        self._ever: dict[Executable, Run] = {}

    def add(self, executable: Executable, operator: str, number: int, bindings: Bindings) -> None:
        """Records a run that has just been started or captured."""
        memory = {name: bindings[name] for name in _READ_LATER if name in bindings}
        self._runs[executable] = self._ever[executable] = Run(operator, number, memory)

    def failures(self, *, wait: bool) -> Iterator[tuple[Executable, Run, int]]:
        """Plans that have reported something, with their last run and the report's code.

        Args:
            wait: check all plans that ever ran, since replayed graphs run them without a call.
        """
        for executable, run in list((self._ever if wait else self._runs).items()):
            code = executable.outcome(wait)
            if code is None:
                continue
            self._runs.pop(executable, None)
            if code:
                yield executable, run, code
