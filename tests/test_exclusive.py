"""One thread at a time, with closes from any thread and signals at any time."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from moe_triton import BufferStateError
from moe_triton.backends.waits import Waits
from moe_triton.runtime.exclusive import Exclusive

WITHIN_S = 20.0


class Thing(Exclusive):
    def __init__(self) -> None:
        super().__init__(Waits())
        self.given_back = 0

    def _give_back(self) -> None:
        self.given_back += 1


def test_a_call_inside_a_call_is_refused() -> None:
    thing = Thing()

    def inside() -> None:
        with pytest.raises(BufferStateError, match="must not overlap"):
            thing.alone(lambda: None)
        with pytest.raises(BufferStateError, match="must not overlap"):
            thing.check_usable()

    thing.alone(inside)
    thing.check_usable()


def test_closing_inside_a_call_gives_back_at_its_end() -> None:
    thing = Thing()

    def inside() -> None:
        for _ in range(2):
            thing.close()
            assert thing.given_back == 0

    thing.alone(inside)
    assert thing.given_back == 1
    thing.close()
    assert thing.given_back == 1
    with pytest.raises(BufferStateError, match="closed"):
        thing.alone(lambda: None)


def test_closing_waits_for_the_thread_inside() -> None:
    thing, inside, leave = Thing(), threading.Event(), threading.Event()
    seen: list[int] = []

    def body() -> None:
        inside.set()
        leave.wait(WITHIN_S)
        seen.append(thing.given_back)

    thread = threading.Thread(target=thing.alone, args=(body,))
    thread.start()
    assert inside.wait(WITHIN_S)
    closers = [threading.Thread(target=thing.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    deadline = time.monotonic() + WITHIN_S
    while not thing._waits.is_stopped and time.monotonic() < deadline:
        time.sleep(0.001)
    assert all(closer.is_alive() for closer in closers)
    leave.set()
    for each in (thread, *closers):
        each.join(WITHIN_S)
    assert seen == [0]
    assert thing.given_back == 1


def for_ever(thing: Thing) -> None:
    while True:
        thing.alone(lambda: None)


class Alarm(Exception):  # noqa: N818
    """Of a handler."""


def test_a_handler_that_raises_at_any_moment_leaves_nobody_inside() -> None:
    thing, raised = Thing(), 0

    def handler(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    try:
        while raised < 2000:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + raised % 37))
                for_ever(thing)
            except Alarm:
                raised += 1
            assert not thing._lock.locked()
            assert thing._holder.value == 0
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_closes_at_any_moment_does_not_wait_for_itself() -> None:
    things: list[Thing] = []
    before = signal.signal(signal.SIGALRM, lambda *_: things[-1].close())
    try:
        for number in range(2000):
            things.append(Thing())
            signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number % 37))
            with pytest.raises(BufferStateError, match="closed"):
                for_ever(things[-1])
            assert things[-1].given_back == 1
    finally:
        signal.signal(signal.SIGALRM, before)
