"""Calls in threads of their own, for waits that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

Result = TypeVar("Result")


def in_thread(call: Callable[[], Result], name: str) -> futures.Future[Result]:
    """Runs a call in a daemon thread, which does not keep the process from exiting, unlike a pool's."""
    done: futures.Future[Result] = futures.Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=f"moe_triton {name}", daemon=True).start()
    return done
