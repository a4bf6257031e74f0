"""What tests of failures share: messages, and a test's windows by name."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moe_triton import ArgumentError, EPBuffer
from moe_triton.backends.cpu import window as window_module
from tests.patience import seconds

SHM = Path("/dev/shm")


def new_prefix() -> str:
    """For the names of one test's windows: other tests make windows at the same time."""
    return f"{window_module.PREFIX}test-{secrets.token_hex(8)}-"


@contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_module, "PREFIX", prefix)
        yield


def leftovers(prefix: str) -> list[str]:
    return sorted(path.name for path in SHM.glob(f"{prefix}*"))


def unwatched(buffer: EPBuffer) -> EPBuffer:
    """The same as where nobody sees that a rank dies: it is missed after a time-out only."""
    buffer._communicator.participants.losses.close()
    return buffer


def wait_until_stopped(pid: int) -> None:
    """Returns when a process has been stopped by a signal."""
    deadline = time.monotonic() + seconds(60)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def message_of(call: Callable[[], Any], kind: type[Exception] = ArgumentError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def not_refused(calls: Iterable[tuple[str, Callable[[], object]]]) -> list[str]:
    """Of calls and how their errors are to begin, what is otherwise."""
    wrong = []
    for start, call in calls:
        try:
            call()
            wrong.append(f"{start!r} was taken")
        except ArgumentError as error:
            if not str(error).startswith(start):
                wrong.append(f"expected {start!r}, got {error}")
    return wrong
