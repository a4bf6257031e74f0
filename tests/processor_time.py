"""Processes and their processor time, with all that they have started, from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STATE, DEAD = 0, ("Z", "X")
OWN_AND_WAITED_FOR = slice(11, 15)  # utime, stime, cutime, cstime of proc(5), behind the name


def stat_of(pid: int) -> list[str]:
    """The fields of proc(5) behind the name: a program's name, in parentheses, may have spaces.

    Raises:
        OSError: it has ended.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def lives(pid: int) -> bool:
    """Whether it runs: `multiprocessing` hears of a death later, from the server that forked the process."""
    with contextlib.suppress(OSError):
        return stat_of(pid)[STATE] not in DEAD
    return False


def descendants(pid: int) -> Iterator[int]:
    """All that a process has started, and what these have, as far as it lives."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                yield child
                yield from descendants(child)


_of_nobody_s = 0.0


@contextlib.contextmanager
def of_nobody() -> Iterator[None]:
    """What is done here is not the test's that happens to be the first: a session does it once."""
    global _of_nobody_s
    before = of_tree()
    yield
    _of_nobody_s += of_tree() - before


def of_tests() -> float:
    """`of_tree` without `of_nobody`."""
    return of_tree() - _of_nobody_s


def of_tree() -> float:
    """Seconds of this process, its descendants, and what these have waited for.

    A process that nobody waited for is not counted once it has ended; a test's ranks are waited for by the
    server that forks them.
    """
    ticks = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, stat_of(pid)[OWN_AND_WAITED_FOR]))
    return ticks / TICKS_PER_S
