"""Ten ways to hang: what `moe-triton status` and `moe-triton flight` say of each is the cause.

The texts are those of docs/when-it-hangs.md, which this holds against what they say now.
"""

from __future__ import annotations

import io
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moe_triton.processes import run_ranks
from moe_triton.tools.cli.flight import show_flights
from moe_triton.tools.cli.status import show_status
from tests.distributed import hangs
from tests.distributed.cases import small_case
from tests.distributed.deaths import case_on_servers
from tests.patience import seconds

WIDTH = 10_000


def said_by(show: Any, *arguments: Any, **options: Any) -> str:
    text = io.StringIO()
    show(*arguments, **options, console=Console(file=text, width=WIDTH))
    return text.getvalue()


class Watcher:
    """Looks at ranks from outside once they hang, and lets them go on.

    Args:
        num_waiting: ranks of which each has to wait, or to have raised, before it looks.
        folder: where records go.
        what: the situation.
    """

    def __init__(self, num_waiting: int, folder: Path, what: str) -> None:
        self.num_waiting, self.folder, self.what = num_waiting, folder, what
        self.pids: dict[int, int] = {}
        self.done: set[int] = set()
        self.status = ""

    def hear(self, rank: int, message: tuple[str, Any]) -> None:
        kind, value = message
        if kind == "pid":
            self.pids[rank] = value
            return
        if kind == "waits" and self.what == "killed":
            self.done.add(rank)
            if len(self.done) == self.num_waiting:
                (self.folder / "all wait").touch()
                self.done = set()
            return
        if kind == "raised" or self.what != "killed":
            self.done.add(rank)
        if len(self.done) >= self.num_waiting and not self.status:
            self._look()

    def _look(self) -> None:
        numbers = [str(self.pids[rank]) for rank in sorted(self.pids)][:1]
        self.status = said_by(show_status, numbers, is_of_groups=True, as_json=False)
        (self.folder / "go").touch()
        if self.what == "stopped":
            os.kill(self.pids[max(self.pids)], signal.SIGCONT)


def seen(what: str, folder: Path) -> tuple[str, str]:
    """What both commands say of a situation."""
    case = case_on_servers(2, "fullmesh_v1") if what == "slow link" else small_case(NUM_RANKS.get(what, 3))
    num_ranks = case.config.num_ranks
    # Those who hang; of a slow link whoever waits first.
    watcher = Watcher(NUM_WAITING.get(what, num_ranks - 1), folder, what)
    function, arguments = hangs.hang, (case, what, str(folder))
    if what == "two groups":
        function, arguments = hangs.two_groups, (case, str(folder))
    options = {"allow_failures": what == "killed", "timeout_s": seconds(100), "hear": watcher.hear}
    run_ranks(function, num_ranks, arguments, **options)
    return watcher.status, said_by(show_flights, [folder], as_json=False, picture=None)


NUM_RANKS = {"two groups": 2}
NUM_WAITING = {"two groups": 2, "other shape": 3, "slow link": 1}

# The first lines of what the commands say, with N for numbers; nothing of what one of them does not know.
WANTED: dict[str, tuple[str, str]] = {
    "killed": (
        "nobody waits for another rank (ranks N and N: buffer broken; rank N: process gone)",
        "rank N never began dispatch number N; ranks N and N waited N ms for it and gave up; rank N: last "
        "call combine number N, ended well",
    ),
    "stopped": (
        "ranks N and N wait for rank N, which is stopped (dispatch number N, for N ms)",
        "rank N was late for dispatch number N: it was awaited N ms, and N ms is usual",
    ),
    "late": (
        "ranks N and N wait for rank N, which has been in no call for N ms (dispatch number N, for N ms)",
        "rank N was late for dispatch number N: it was awaited N ms, and N ms is usual",
    ),
    "skipped call": (
        "ranks N and N wait for rank N, which is in another call: barrier number N while others are in "
        "dispatch number N (dispatch number N, for N ms)",
        "after combine number N, ranks N and N made dispatch number N and rank N made barrier number N: "
        "calls must be the same on every rank",
    ),
    "other shape": (
        "nobody waits for another rank (ranks N to N: buffer broken)",
        "the buffers of ranks N to N are broken: ConfigMismatchError: dispatch number N: ranks made "
        "different calls: row format: bfN on rank(s) [N, N], intN on rank(s) [N]",
    ),
    "wrong ids": (
        "ranks N and N wait for rank N, which has been in no call for N ms (dispatch number N, for N ms)",
        "rank N: dispatch number N was refused, and nothing was sent: topk_idx is N at token N, k N, but "
        "ids are",
    ),
    "no room": (
        "ranks N and N wait for rank N, of which there is no record (dispatch number N, for N ms)",
        "rank N was late for dispatch number N: it was awaited N ms, and N ms is usual",
    ),
    "closed": (
        "ranks N and N wait for rank N, of which there is no record (dispatch number N, for N ms)",
        "rank N never began dispatch number N; ranks N and N waited N ms for it and gave up; rank N: "
        "buffer closed",
    ),
    "two groups": (
        "rank N waits for rank N in group G (dispatch number N), and rank N for rank N in group G (dispatch "
        "number N): a circle",
        "group G: rank N never began dispatch number N; rank N waited N ms for it and gave up",
    ),
    "slow link": ("it sent is still under way", ""),
}


def numberless(text: str) -> str:
    """With N for numbers, and G for groups."""
    named = re.sub(r"group [0-9a-f]{8}", "group G", text)
    return re.sub(r"N (?:\u00b5s|us|s)\b", "N ms", re.sub(r"\d+(?:\.\d+)?", "N", named))


@pytest.mark.parametrize("what", [pytest.param(what, id=what.replace(" ", "_")) for what in WANTED])
def test_what_both_commands_say_names_the_cause(what: str, tmp_path: Path) -> None:
    status, flight = map(numberless, seen(what, tmp_path))
    of_status, of_flight = WANTED[what]
    assert of_status in status, status
    assert of_flight in flight, flight


if __name__ == "__main__":
    import sys
    import tempfile

    for what in sys.argv[1:] or WANTED:
        with tempfile.TemporaryDirectory() as folder:
            print("=====", what)
            for text in seen(what, Path(folder)):
                print(text)
