"""Waits: calls in threads of their own, and deadlines of processes that may not have run."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar
from weakref import WeakSet

from moe_triton.core.errors import ThreadError

Result = TypeVar("Result")

_REMEDY = "Raise its limits (ulimit -u and -v, the control group's pids.max), or end other threads."


# What Python's end waits for threads that still run. One whose store does not answer any more never ends.
END_S = 1.0

_running: WeakSet[threading.Thread] = WeakSet()


@atexit.register
def _wait_for_running() -> None:
    """A thread that comes back from native code while Python ends is unwound, and C++ aborts the process."""
    deadline = time.monotonic() + END_S
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))


def in_thread(call: Callable[[], Result], name: str) -> futures.Future[Result]:
    """Runs a call in a daemon thread, which keeps the process from exiting for `END_S` at most.

    Returns:
        What the call returns or raises; a `ThreadError` where no thread could be started.
    """
    done: futures.Future[Result] = futures.Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    try:
        thread = threading.Thread(target=run, name=f"moe_triton {name}", daemon=True)
        thread.start()
        _running.add(thread)
    except RuntimeError as error:
        done.set_exception(ThreadError(f"this process can start no thread: {error}. {_REMEDY}"))
    return done


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
