"""Calls of a buffer that were sent with ``wait=False`` and not yet waited for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

from moe_triton.core.errors import BufferStateError
from moe_triton.core.handle import Pending

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
