"""What a test leaves running is ended before the next one; a pytest plug-in.

A test that fails may leave ranks that wait for each other, and a worker that dies leaves all of its own: they
would take the processor, and their windows the memory, from every test that follows. The name of a window
is gone before it is used, and one whose maker was killed in between is removed by the next that is made
(`moe_triton.backends.cpu.window.remove_stale`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.patience import seconds
from tests.processor_time import descendants, lives, stat_of
from tests.surroundings import RUN

WORKER = "PYTEST_XDIST_WORKER"
SERVERS = "multiprocessing.forkserver", "multiprocessing.resource_tracker"
PARENT = 1  # of the fields behind the name
ENDED_S = seconds(5.0)  # what has been told to end may take so long
NOTED = "left running, and killed"

Processes = dict[int, str]
"""Command lines by number."""

_before = pytest.StashKey[set[int]]()


def running() -> Processes:
    """What this process has started and what lives, but for servers of `multiprocessing`, which stay."""
    found = {pid: _command(pid) for pid in descendants(os.getpid())}
    return {pid: command for pid, command in found.items() if command and not _is_server(pid, command)}


def _is_server(pid: int, command: str) -> bool:
    """A rank that it has forked has the same command line, and another parent."""
    with contextlib.suppress(OSError):
        return any(server in command for server in SERVERS) and int(stat_of(pid)[PARENT]) == os.getpid()
    return False


def _command(pid: int) -> str:
    """Nothing of a process that has ended and waits to be waited for."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def of_worker(name: str, environment: Mapping[str, str] = os.environ) -> Processes:
    """What a worker of this run has started, whoever is its parent now."""
    wanted = {f"{RUN}={environment[RUN]}".encode(), f"{WORKER}={name}".encode()}
    found: Processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                found[int(folder.name)] = _command(int(folder.name))
    return found


def end(processes: Processes) -> None:
    """Kills them, and waits until they have died: on a loaded machine that takes a while."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + ENDED_S
    while any(map(lives, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Notes what there is before a test."""
    item.stash[_before] = set(descendants(os.getpid()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """After a test that failed, all that it has started, groups of its module too: these start anew."""
    report = yield
    if report.failed and _before in item.stash:
        _note(report, {pid: text for pid, text in running().items() if pid not in item.stash[_before]})
    return report


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """After the last test of a file nothing is left: its fixtures have ended."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        deadline = time.monotonic() + ENDED_S
        while (left := running()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left:
            end(left)
            lines = "\n".join(f"  {pid}: {text[:120]}" for pid, text in left.items())
            pytest.fail(f"{item.path.name} has left processes behind, which were killed:\n{lines}", False)
    return result


def _note(report: pytest.TestReport, left: Processes) -> None:
    if left:
        end(left)
        text = "\n".join(f"{pid}: {command[:120]}" for pid, command in left.items())
        report.sections.append((NOTED, text))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker has ended: by itself, or another takes its place."""
    if error:
        end(of_worker(node.gateway.id))
