"""Calls in threads of their own, for waits that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

from moe_triton.core.errors import ThreadError

Result = TypeVar("Result")

_REMEDY = "Raise its limits (ulimit -u and -v, the control group's pids.max), or end other threads."


def in_thread(call: Callable[[], Result], name: str) -> futures.Future[Result]:
    """Runs a call in a daemon thread, which does not keep the process from exiting, unlike a pool's.

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
        threading.Thread(target=run, name=f"moe_triton {name}", daemon=True).start()
    except RuntimeError as error:
        done.set_exception(ThreadError(f"this process can start no thread: {error}. {_REMEDY}"))
    return done
