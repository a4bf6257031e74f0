"""Runs trials of all faults in turn until the time is up: ``python -m tests.chaos [--seconds S] [--seed N]``.

It prints, for each fault, how often it was tried and survived, how many ranks named others with a doubt, and
the longest that a call took to end in an error, and ends with status 1 if a trial was not survived. A seed
gives the same trials again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests import surroundings  # before torch, which reads some of what it takes away

# isort: split
from moe_triton.backends.cpu import window
from moe_triton.processes import RankFailedError, RankGroup
from tests.chaos.ranks import SHM, live_through
from tests.chaos.strikes import LONGER_THAN_A_TIMEOUT_S, PAUSE_ALL
from tests.chaos.trial import FAULTS, Account, Trial, complaints, doubts, worst_seconds

TRIAL_TIMEOUT_S = 120.0


@dataclass
class Tally:
    """What became of the trials of one fault."""

    tried: int = 0
    survived: int = 0
    worst_s: float = 0.0
    doubts: int = 0
    complaints: list[str] = field(default_factory=list)


class Groups:
    """Groups of processes by size: those in which nobody was lost serve again."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._kept: dict[int, RankGroup] = {}

    def run(self, trial: Trial) -> list[Account | RankFailedError]:
        """What each rank tells of a trial."""
        prefix = f"{window.PREFIX}chaos-{secrets.token_hex(8)}-"
        is_used_up = FAULTS[trial.fault].needs_own_group
        group = None if is_used_up else self._kept.pop(trial.num_ranks, None)
        group = group or self._stack.enter_context(RankGroup(trial.num_ranks))

        def pause(_: int, said: object) -> None:
            if said == PAUSE_ALL:
                for signaled, pause_s in ((signal.SIGSTOP, LONGER_THAN_A_TIMEOUT_S), (signal.SIGCONT, 0.0)):
                    for process in group.processes:
                        os.kill(process.pid or 0, signaled)
                    time.sleep(pause_s)

        accounts = group.run(
            live_through, trial, prefix, timeout_s=TRIAL_TIMEOUT_S, allow_failures=True, hear=pause
        )
        if is_used_up or any(isinstance(account, RankFailedError) for account in accounts):
            group.close()
        else:
            self._kept[trial.num_ranks] = group
        left = sorted(path.name for path in SHM.glob(f"{prefix}*"))
        if left:
            accounts.append(Account(wrong=(f"windows were left behind: {left}",)))
        return accounts


def run(seconds: float, seed: int, faults: Sequence[str], trials: int | None = None) -> dict[str, Tally]:
    """Tries every fault at least once, and all of them in turn until the time is up, or so many of all."""
    source = random.Random(seed)
    tallies = {fault: Tally() for fault in faults}
    end = time.monotonic() + seconds
    with ExitStack() as stack:
        groups = Groups(stack)
        for number, fault in enumerate(itertools.cycle(faults)):
            is_enough = time.monotonic() > end if trials is None else number >= trials
            if number >= len(faults) and is_enough:
                return tallies
            trial, tally = Trial.draw(fault, source), tallies[fault]
            accounts = groups.run(trial)
            said = complaints(trial, accounts)
            tally.tried += 1
            tally.survived += not said
            tally.doubts += doubts(trial, accounts)
            tally.worst_s = max(tally.worst_s, worst_seconds(accounts))
            tally.complaints += [f"{trial}: {text}" for text in said]
    raise AssertionError("cycle has no end")


def table(tallies: dict[str, Tally]) -> Table:
    """The figures, a row for each fault."""
    made = Table(title="Faults: tried, survived, and the longest that a call took to end in an error")
    for column in ("fault", "tried", "survived", "doubts", "worst, s"):
        made.add_column(column, justify="left" if column == "fault" else "right")
    for fault, tally in tallies.items():
        worst = f"{tally.worst_s:.2f}" if tally.worst_s else ""
        made.add_row(fault, str(tally.tried), str(tally.survived), str(tally.doubts), worst)
    return made


def main() -> int:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="when to begin no further trial")
    parser.add_argument("--trials", type=int, help="how many of all, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    options = parser.parse_args()
    # Not the user's own: nothing that a fault does to kernels that are kept is to last.
    with (
        tempfile.TemporaryDirectory(prefix="moe_triton-chaos-") as folder,
        surroundings.away_from_home(Path(folder, surroundings.HOME_NAME)),
    ):
        tallies = run(options.seconds, options.seed, options.faults, options.trials)
    console = Console()
    console.print(table(tallies))
    failed = [text for tally in tallies.values() for text in tally.complaints]
    for text in failed:
        console.print(text, markup=False, highlight=False)
    return 1 if failed else 0


if __name__ == "__main__":
    # A background job begins with Ctrl-C ignored, and ranks would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
