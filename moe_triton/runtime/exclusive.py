"""Objects that one thread at a time may use, and that any thread may close at any time."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import get_ident
from typing import Any

from moe_triton.backends.waits import Waits
from moe_triton.core.errors import BufferStateError

FORKED = "this process was forked from the one that made the buffer. Construct one here."


class Exclusive(ABC):
    """Lets one thread in at a time, and none once it is closed, broken or in a forked child.

    Args:
        waits: of the thread inside; its holder says which thread that is.
    """

    def __init__(self, waits: Waits) -> None:
        self._waits, self._holder = waits, waits.holder
        self._lock = threading.Lock()
        self._closed = self._given_back = self._forked = self._has_dead = False
        self._broken = ""
        _alive.add(self)

    def alone(self, body: Callable[..., None], *arguments: Any, beside_dead: bool = False) -> None:
        """Runs a body while no other thread is inside.

        Args:
            body: what runs.
            arguments: of it.
            beside_dead: it may run where a rank is dead.

        Raises:
            BufferStateError: closed, broken or in use.
        """
        me, lock, holder = get_ident(), self._lock, self._holder
        if lock.locked():
            if not (beside_dead and self.is_whole):
                self._check_open()
            raise BufferStateError("another thread is inside this buffer; calls must not overlap")
        # A signal handler may run between any two calls, and may close. It finds the lock either free or held
        # by a known thread: `with` leaves no gap between taking the lock and its `try`.
        with lock:
            holder.value = me
            try:
                if self._closed or self._broken or (self._has_dead and not beside_dead):
                    self._check_open()
                body(*arguments)
            finally:
                if self._closed:
                    self._give_back_once()
                holder.value = 0

    def _check_open(self) -> None:
        if self._closed:
            raise BufferStateError("the buffer is closed. Construct a new one.")
        if self._forked:
            raise BufferStateError(FORKED)
        if self._broken:
            raise BufferStateError(f"the buffer is broken: {self._broken}. Rebuild it on every rank.")

    def check_here(self) -> None:
        """Checks that it is open, whether broken or not.

        Raises:
            BufferStateError: closed, or of the process that this one was forked from.
        """
        if self._closed or self._forked:
            Exclusive._check_open(self)

    def check_whole(self) -> None:
        """Checks that it is open and not broken, whether ranks are dead or not.

        Raises:
            BufferStateError: it is not.
        """
        if not self.is_whole:
            Exclusive._check_open(self)

    @property
    def is_usable(self) -> bool:
        """Whether it is open and not broken, and no rank is dead."""
        return not (self._closed or self._broken or self._has_dead)

    @property
    def is_whole(self) -> bool:
        """Whether it is open and not broken, dead ranks or not."""
        return not (self._closed or self._broken)

    @property
    def is_busy(self) -> bool:
        """Whether a thread is inside."""
        return self._lock.locked()

    @property
    def is_busy_elsewhere(self) -> bool:
        """Whether another thread than this one is inside."""
        return self._lock.locked() and self._holder.value != get_ident()

    @property
    def state(self) -> str:
        """In a word: "open", "closed", or "broken"."""
        return "closed" if self._closed else "broken" if self._broken else "open"

    def check_usable(self) -> None:
        """Checks that no thread is inside, and that it is neither closed nor broken.

        Raises:
            BufferStateError: it is.
        """
        if self._closed or self._broken or self._has_dead or self._lock.locked():
            self.alone(lambda: None)

    def close(self) -> None:
        """Gives everything back. Closing again does nothing.

        If another thread is inside, its wait ends at once with a `BufferStateError`, and this call returns
        once that thread has left. Called from inside a call of the same thread, as by a signal handler, the
        end of that call gives everything back.
        """
        self._closed = True
        if self._forked:
            return
        self._waits.stop()
        if self._holder.value == get_ident():
            return
        with self._lock:
            self._give_back_once()

    def _give_back_once(self) -> None:
        """Called by the only thread inside."""
        if not self._given_back:
            self._give_back()
            self._given_back = True

    @abstractmethod
    def _give_back(self) -> None:
        """Releases what calls use."""

    def _leave_to_parent(self) -> None:
        """In a child that has just been forked: everything here belongs to the parent."""
        self._forked, self._broken = True, FORKED
        self._lock = threading.Lock()  # a thread that held it does not exist here
        self._holder.value = 0


_alive: weakref.WeakSet[Exclusive] = weakref.WeakSet()


def alive() -> list[Exclusive]:
    """All of this process that have not been dropped, closed ones too. From any thread."""
    while True:
        try:
            return list(_alive)
        except RuntimeError:  # another thread has made one meanwhile
            continue


def _leave_all_to_parent() -> None:
    for each in list(_alive):
        each._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
