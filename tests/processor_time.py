"""Processor time of a process with all that it has started, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
OWN_AND_WAITED_FOR = slice(11, 15)  # utime, stime, cutime, cstime of proc(5), behind the name


def of_tree(pid: int | str = "self") -> float:
    """Seconds of a process, its descendants, and what these have waited for.

    A process that nobody waited for is not counted once it has ended; a test's ranks are waited for by the
    server that forks them.
    """
    total, pids = 0.0, [str(os.getpid() if pid == "self" else pid)]
    while pids:
        folder = Path("/proc", pids.pop())
        try:
            # The name of a program, in parentheses, may have spaces.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            tasks = list((folder / "task").iterdir())
        except OSError:  # it has ended
            continue
        total += sum(map(int, fields[OWN_AND_WAITED_FOR]))
        for task in tasks:
            try:
                pids += (task / "children").read_text().split()
            except OSError:
                continue
    return total / TICKS_PER_S
