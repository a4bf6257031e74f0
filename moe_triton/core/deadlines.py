"""Deadlines of processes that may not have run themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# Shorter pauses are what a busy machine does to any process.
SHORTEST_STOP_S = 0.1


class Deadline:
    """A deadline that is set again, once, after this process has not run for a quarter of its time.

    All ranks of a paused machine go on at the same moment: what they have to send comes soon, and none of
    them is to be missed because the clock went on. Whoever waits has to look often.

    Args:
        seconds: from now.
        clock: that it is of, in seconds.

    Attributes:
        was_stopped: whether it has been set again.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._looked = clock()
        self._end = self._looked + seconds
        self._lock = threading.Lock()
        self.was_stopped = False

    def left(self) -> float:
        """Seconds until it passes; callable from any thread."""
        with self._lock:
            now = self._clock()
            stop = now - self._looked
            if stop > max(SHORTEST_STOP_S, self._seconds / 4) and not self.was_stopped:
                self.was_stopped = True
                self._end = now + self._seconds
            self._looked = now
            return self._end - now
