"""How the waits of one communicator are stopped before their deadline, and how long waits are reported."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from moe_triton.core.errors import BufferStateError, ConfigMismatchError
from moe_triton.core.plan import Launch, Plan


class Waiting(NamedTuple):
    """A launch that waits for peers.

    Attributes:
        plan: what runs.
        launch: which of its launches.
        words: of its arguments in this call (`moe_triton.core.abi`); valid until the wait ends.
        awaited: by block that is still waiting, the first and the number of the tokens, entries or rows that
            it waits for.
        seconds: that it has waited.
        pending: whether it still waits; callable from any thread.
        beside: of other phases of the same launch in which blocks still wait: it, its words and what they
            wait for.
    """

    plan: Plan
    launch: Launch
    words: Sequence[int]
    awaited: Mapping[int, tuple[int, int]]
    seconds: float
    pending: Callable[[], bool]
    beside: tuple[tuple[Launch, Sequence[int], Mapping[int, tuple[int, int]]], ...] = ()


class Waits:
    """The waits of one communicator. This base is for a device, whose waits the host can neither end nor see.

    Attributes:
        holder: the thread that is in a call, by `threading.get_ident`; 0 for none.
        is_stopped: whether all waits end at once, as if at their deadline.
        are_seen: whether long waits are noted and reported.
    """

    are_seen = False

    def __init__(self) -> None:
        self.holder = ctypes.c_uint64(0)
        self.is_stopped = False
        self._why: str | Callable[[], Exception] = ""

    def stop(self, why: str | Callable[[], Exception] = "") -> None:
        """Ends all waits, now and later. Callable from any thread.

        Args:
            why: ranks that differ; or what makes the error where they are lost, another one each time, for
                one that was raised holds on to the frames of its call; empty if the buffer is closed.
        """
        self._why = self._why or why
        self.is_stopped = True

    def raise_stopped(self, operator: str) -> None:
        """Raises the reason why the waits of an operator were stopped, if they were.

        Raises:
            BaseException: raised by a signal handler, usually KeyboardInterrupt.
            ConfigMismatchError: ranks differ.
            RankLostError: a rank that was waited for is lost.
            BufferStateError: the buffer was closed.
        """
        if callable(self._why):
            raise self._why()
        if self._why:
            raise ConfigMismatchError(self._why)
        if self.is_stopped:
            raise BufferStateError(f"the buffer was closed while it was in a {operator}")

    def give_up_after(self, seconds: float, missing: Callable[[Waiting], None]) -> None:
        """Has somebody decide what becomes of waits that have lasted so long, again each quarter of a second.

        Args:
            seconds: of a wait.
            missing: decides; called on the thread that is in the call.
        """

    def tell_after(
        self, note_s: float, note: Callable[[Waiting], None], tell_s: float, tell: Callable[[Waiting], None]
    ) -> None:
        """Has long waits noted for peers, and later reported: again each time that the wait has doubled.

        Args:
            note_s: seconds before the note.
            note: leaves it; called on the thread that is in the call, as `tell` is.
            tell_s: seconds before the first report, more than those before the note.
            tell: reports a wait.
        """

    def answer_alarms(self, answer: Callable[[Waiting], None]) -> None:
        """Has a wait reported while there is an alarm: again every few hundredths of a second.

        Args:
            answer: called on the thread that is in the call.
        """

    def say_when_asked(
        self, asked: int, answered: int, say: Callable[[Waiting], None], done: Callable[[], None]
    ) -> None:
        """Has a wait reported when somebody asks, in any process; within a few hundredths of a second.

        Args:
            asked: address of the word that counts how often it has been asked.
            answered: address of the word that says which of these has been answered.
            say: called on the thread that is in the call.
            done: called behind it, whether it could be said or not.
        """

    def ask_no_more(self) -> None:
        """The words of `say_when_asked` are gone."""

    def alarm(self, on: bool = True) -> None:
        """Raises an alarm, or ends it. Callable from any thread."""
