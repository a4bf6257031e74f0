"""How the waits of one communicator end before their deadline, and who hears of them before that."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from moe_triton.core.errors import BufferStateError
from moe_triton.core.plan import Launch, Plan


class Waiting(NamedTuple):
    """A launch that waits for peers.

    Attributes:
        plan: what runs.
        launch: which of its launches.
        words: of its arguments (`moe_triton.core.abi`), as they are in this call. They hold until the wait
            ends.
        awaited: first and number of the tokens, entries or rows that each block waits for which still does.
        seconds: that it has waited.
        goes_on: whether it still does; any thread may ask.
    """

    plan: Plan
    launch: Launch
    words: Sequence[int]
    awaited: Mapping[int, tuple[int, int]]
    seconds: float
    goes_on: Callable[[], bool]


class Waits:
    """The waits of one communicator. These are a device's, which the host can neither end nor look at.

    Attributes:
        holder: which thread is in a call, by `threading.get_ident`; 0 for none.
        is_stopped: whether they end as at their deadline from now on.
    """

    def __init__(self) -> None:
        self.holder = ctypes.c_uint64(0)
        self.is_stopped = False

    def stop(self) -> None:
        """Ends them, now and for good. Any thread may ask for it."""
        self.is_stopped = True

    def raise_stopped(self, operator: str) -> None:
        """Raises what has stopped the waits of an operator; nothing where nothing has.

        Raises:
            BaseException: what a signal's handler raised, KeyboardInterrupt usually.
            BufferStateError: the buffer was closed.
        """
        if self.is_stopped:
            raise BufferStateError(f"the buffer was closed while it was in a {operator}")

    def tell_after(self, seconds: float, tell: Callable[[Waiting], None]) -> None:
        """Has a wait told of once it has lasted so long, and again whenever it has lasted twice as long.

        Args:
            seconds: of one wait.
            tell: called on the thread that is in the call.
        """
