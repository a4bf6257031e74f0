"""Calls in threads of their own, for waits that may never return."""

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
