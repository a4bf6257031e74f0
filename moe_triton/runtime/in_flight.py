"""What is under way: operators that are set up and not torn down, and runs whose outcome is not read yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

from moe_triton.backends.base import Bindings, Executable
from moe_triton.core.errors import BufferStateError
from moe_triton.core.handle import Pending
from moe_triton.operators.buffer import TABLES
from moe_triton.operators.variants import Variant
from moe_triton.runtime.diagnosis import Run


class InFlight:
    """The pending setups of one communicator, at most one of each operator.

    Args:
        shared: operators that take turns in the same zones: one that is set up has to end before another.

    Attributes:
        variants: by operator, what each was set up for.
        is_captured: whether a graph has captured calls.
    """

    def __init__(self, shared: Collection[str] = ()) -> None:
        self._shared = shared
        self.is_captured = False
        self.variants: dict[str, Variant] = {}
        self._in_graph: dict[str, bool] = {}

    def begin(self, operator: str, variant: Variant, capturing: bool) -> None:
        """A setup has run, or has been captured."""
        self.variants[operator] = variant
        self._in_graph[operator] = capturing

    def check(self, operator: str, is_teardown: bool, capturing: bool) -> None:
        """Checks that an operator, whole or one half of it, may run now; a teardown ends its setup.

        Raises:
            BufferStateError: it may not, or only one of setup and teardown is inside a graph.
        """
        pending = self.variants.get(operator)
        if not is_teardown:
            pending_others = (name for name in self.variants if name != operator)
            other = next((name for name in pending_others if {name, operator} <= set(self._shared)), None)
            if other is not None:
                raise BufferStateError(
                    f"a {other} is set up and not yet torn down, and with this scheme a {operator} would "
                    f"use the same memory. Wait for it first, or call {other}_teardown."
                )
            if pending is not None:
                raise BufferStateError(
                    f"a {operator} is set up and not yet torn down, and only one may be. "
                    f"Wait for it first, or call {operator}_teardown."
                )
        elif pending is None:
            raise BufferStateError(f"no {operator} is set up. Call {operator}_setup first.")
        elif self._in_graph[operator] is not capturing:
            where = "outside of the graph" if capturing else "inside a graph"
            raise BufferStateError(
                f"the {operator} in flight was set up {where}. "
                f"Put both halves into the same graph, or neither."
            )
        else:
            del self.variants[operator]

    @property
    def is_none(self) -> bool:
        """Whether nothing is pending and no graph has captured calls."""
        return not (self.variants or self.is_captured)


REMEDY = "Call wait() on what it returned first."


class SentCalls:
    """At most one dispatch and one combine.

    Args:
        shared: operators that take turns in the same memory: one that is sent has to end before another.

    Attributes:
        calls: by operator. Every call looks whether there are any.
    """

    def __init__(self, shared: Collection[str]) -> None:
        self._shared = shared
        self.calls: dict[str, tuple[weakref.ref[Pending[Any]], Callable[[], Any]]] = {}

    def begin(self, operator: str, finish: Callable[[], Any]) -> Pending[Any]:
        """A call has been sent.

        Args:
            operator: "dispatch" or "combine".
            finish: waits for it; it calls `end`.
        """
        pending = Pending(finish)
        self.calls[operator] = weakref.ref(pending), finish
        return pending

    def end(self, operator: str) -> None:
        """It is waited for now, whatever comes of that."""
        self.calls.pop(operator, None)

    def forget(self) -> None:
        """No call is waited for any more: the buffer is closed."""
        self.calls.clear()

    def make_way_for(self, operator: str) -> None:
        """Before another call: what nobody can wait for any more is waited for here.

        Peers have sent to it, and it holds a place that the next call needs.

        Raises:
            BufferStateError: somebody can, and the two cannot be under way together.
            CommunicationTimeoutError: of the one that is waited for here.
        """
        for sent, (pending, finish) in list(self.calls.items()):
            if pending() is None:
                finish()
            elif sent == operator:
                raise BufferStateError(f"{_sent(sent)}, and only one may be. {REMEDY}")
            elif {sent, operator} <= set(self._shared):
                why = f"with this scheme a {operator} would use the same memory"
                raise BufferStateError(f"{_sent(sent)}, and {why}. {REMEDY}")


def _sent(operator: str) -> str:
    return f"a {operator} was sent with wait=False and not yet waited for"


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
