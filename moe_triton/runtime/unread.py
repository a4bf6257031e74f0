"""Runs that nobody has looked at yet: of back ends whose runs end later than the calls that start them."""

from __future__ import annotations

from collections.abc import Iterator

from moe_triton.backends.base import Bindings, Executable
from moe_triton.runtime.diagnosis import Call

# What a message about a failed run is made from. The rest of a call's memory is not held on to.
_READ_LATER = ("num_tokens", "topk_idx")


class UnreadRuns:
    """The last run of each plan, until its outcome is known."""

    def __init__(self) -> None:
        self._calls: dict[Executable, Call] = {}
        self._ever: dict[Executable, Call] = {}

    def add(self, executable: Executable, operator: str, number: int, bindings: Bindings, us: int) -> None:
        """Takes note of a run that has just been started or captured."""
        memory = {name: bindings[name] for name in _READ_LATER if name in bindings}
        self._calls[executable] = self._ever[executable] = Call(operator, number, memory, us)

    def failures(self, *, wait: bool) -> Iterator[tuple[Executable, Call, int]]:
        """Plans that have reported something, with their last call and the report's code.

        Args:
            wait: look at all plans that ever ran: graphs run them without a word to anybody.
        """
        for executable, call in list((self._ever if wait else self._calls).items()):
            code = executable.outcome(wait)
            if code is None:
                continue
            self._calls.pop(executable, None)
            if code:
                yield executable, call, code
