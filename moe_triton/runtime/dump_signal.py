"""A signal on which a process prints what its ranks wait for: ``MOE_TRITON_DUMP_SIGNAL``.

It is off by default. The handler is native (``kernels_ascendc/host/dump_signal.cpp``), and a thread prints,
so that it answers while the main thread hangs in any native call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable

from moe_triton.core.errors import ArgumentError

VARIABLE = "MOE_TRITON_DUMP_SIGNAL"
# Which end the process, or cannot be caught, whatever somebody means by them.
_NOT = {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGCHLD,
}
_REMEDY = "Set another one, such as USR2, or unset it."
_lock = threading.Lock()
_watched: set[tuple[int, int]] = set()
"""Processes, and the signals that they watch."""


def wanted() -> int | None:
    """The signal that the variable names; None where it is not set.

    Raises:
        ArgumentError: it is none, or none that a program can take.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    name = text.upper()
    number = int(text) if text.isdecimal() else _named().get("SIG" + name.removeprefix("SIG"), 0)
    if number not in signal.valid_signals():
        raise ArgumentError(VARIABLE, repr(text), "it is the name or the number of a signal", _REMEDY)
    if number in _NOT:
        raise ArgumentError(VARIABLE, repr(text), f"{_name(number)} is not for programs to take", _REMEDY)
    return number


def _named() -> dict[str, int]:
    return {each.name: each.value for each in signal.Signals}


def _name(number: int) -> str:
    """A real-time signal has none."""
    return next((name for name, each in _named().items() if each == number), f"signal {number}")


def watch(watch_signal: Callable[[int, int], int], text: Callable[[], str]) -> None:
    """Has the process print a text whenever the signal comes. Nothing where the variable is not set.

    Args:
        watch_signal: ``moe_watch_signal``.
        text: what to print; called on a thread of its own.

    Raises:
        ArgumentError: the variable names no signal that can be taken, or one that is taken.
    """
    number = wanted()
    if number is None:
        return
    with _lock:
        if (os.getpid(), number) in _watched:
            return
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        outcome = watch_signal(number, write_end)
        if outcome:
            os.close(read_end)
            os.close(write_end)
            rule = "it has a handler already, or is ignored" if outcome > 0 else "it cannot be taken here"
            raise ArgumentError(VARIABLE, repr(os.environ[VARIABLE]), f"{_name(number)}: {rule}", _REMEDY)
        _watched.add((os.getpid(), number))
    # Not `in_thread`: it never ends, and Python's end would wait for it.
    name = "moe_triton dump signal"
    threading.Thread(target=_print_each_time, args=(read_end, text), name=name, daemon=True).start()


def _print_each_time(read_end: int, text: Callable[[], str]) -> None:
    while os.read(read_end, 4096):
        try:
            said = text()
        except Exception as error:  # the next signal may find more
            said = f"what ranks of process {os.getpid()} do cannot be said: {error!r}"
        with contextlib.suppress(OSError, ValueError):  # whoever has closed stderr does not want it
            print(said, file=sys.stderr, flush=True)


def _renew() -> None:
    """In a child that was forked: a thread that held the lock does not exist here."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)
