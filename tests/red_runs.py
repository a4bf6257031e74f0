"""Why a run is red, in its last lines; a pytest plug-in.

What failed, the end of what it said, and the machine at that moment: who waits for what stands in the ranks'
own messages, and whether it was the machine, in its load and memory.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

SHOWN, LINES = 4, 11  # failures, and lines of each: all of it stands in the last 60 of a run
MACHINE = "machine"


def machine() -> str:
    """Load, free memory and shared memory, in one line."""
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) / 2**20
    shared = shutil.disk_usage("/dev/shm").free / 2**30
    free = f"{available:.1f} GB of memory and {shared:.1f} GB of /dev/shm free"
    return f"load {load} on {os.cpu_count()} cores, {free}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes the machine's state with each failure."""
    report = yield
    if report.failed:
        report.sections.append((MACHINE, machine()))
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """After all that pytest prints: the first failures, shortly."""
    yield
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("PYTEST_XDIST_WORKER"):
        return
    red = [report for kind in ("failed", "error") for report in reporter.stats.get(kind, ())]
    if not red:
        return
    lines = [f"{len(red)} failed; the first of them, the end of what each said, and the machine then:"]
    for report in red[:SHOWN]:
        lines += ["", f"FAILED {report.nodeid} ({report.when})", *_end(report)]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _end(report: Any) -> list[str]:
    """The last lines of its error, and the machine's state."""
    said = [line for line in str(report.longreprtext).splitlines() if line.strip()]
    noted = [text for name, text in getattr(report, "sections", ()) if name == MACHINE]
    return [f"  {line[:160]}" for line in (*said[-LINES + 2 :], *noted)]
