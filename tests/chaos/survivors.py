"""Ranks that are killed or stopped at random moments, and others that go on without them.

    python -m tests.chaos.survivors --trials 540 --seed 0

Trials take turns of what strikes, through which functions ranks call, and by which scheme tokens travel
(`tests.chaos.lost_trial`). A trial is survived if every other rank has gone on, with all bits of all rounds
right but for what is marked as lost, and has masked the victims and nobody else; if a victim that was stopped
and goes on hears that it is masked and harms nobody; and if nothing is left in /dev/shm. Where the library
does not go on by itself, each rank has to get an error that names who is lost, and makes a new buffer.

What was not survived is said of each trial, with its number, which gives the same trial again. How long calls
lasted is told beside it, and fails nothing: the machine may be busy.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path

from rich.console import Console

from tests import surroundings  # before torch, which reads some of what it takes away

# isort: split
from moe_triton.backends.cpu import window
from moe_triton.processes import PRELOAD, RankGroup
from moe_triton.tools.text_table import TextTable, names, numbers
from tests.chaos.lost_ranks import CONTINUE, DONE, STRIKE, live_through
from tests.chaos.lost_trial import STRIKES, Account, Longest, Trial, complaints, draw, longest
from tests.chaos.ranks import SHM
from tests.patience import seconds

ENDS_S = seconds(90.0)
JOBS = 2

trial = draw


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    Attributes:
        said: why it was not survived.
        answers: what buffers did about lost ranks, by themselves.
        longest: the latest call.
    """

    said: tuple[str, ...]
    answers: frozenset[str] = frozenset()
    longest: Longest | None = None


class Hand:
    """What strikes the ranks of a trial, and continues them: their parent, when they ask for it.

    Args:
        of: the trial.
        group: its processes.

    Attributes:
        struck: when each victim was, by the clock of `time.monotonic`.
    """

    def __init__(self, of: Trial, group: RankGroup) -> None:
        self._trial, self._group = of, group
        self._done: set[int] = set()
        self._is_to_go_on = False
        self.struck: list[float] = []

    def hear(self, rank: int, said: object) -> None:
        """Does what a rank asks for."""
        assert isinstance(said, tuple)
        word = said[0]
        if word == STRIKE:
            self._strike(said[1])
        elif word == CONTINUE and not self._is_to_go_on:
            self._is_to_go_on = True
            self._send(signal.SIGCONT, self._trial.victims[:1])
        elif word == DONE:
            self._done.add(rank)
            if self._done >= {*self._trial.survivors} and not self._trial.what.is_continued:
                self._send(signal.SIGKILL, self._trial.victims)

    def _strike(self, number: int) -> None:
        trial = self._trial
        if trial.what.how == "freeze":
            everyone = range(trial.case.config.num_ranks)
            time.sleep(trial.delay_s or 0.0)
            self._send(signal.SIGSTOP, everyone)
            time.sleep(trial.frozen_s)
            self._send(signal.SIGCONT, everyone)
            return
        strikes_itself = trial.delay_s is None and not trial.what.by_hand
        if not strikes_itself:
            time.sleep(trial.delay_s or 0.0)
            is_stopped = trial.what.how == "stop" and number == 0
            self._send(signal.SIGSTOP if is_stopped else signal.SIGKILL, [trial.victims[number]])
        if self._is_to_go_on:  # who masks by hand waits for nothing, and may have been heard first
            self._send(signal.SIGCONT, trial.victims[:1])
        self.struck.append(time.monotonic())

    def _send(self, what: signal.Signals, ranks: Iterable[int]) -> None:
        for rank in ranks:
            process = self._group.processes[rank]
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(process.pid or 0, what)


def outcome(of: Trial) -> Outcome:
    """Runs a trial."""
    prefix = f"{window.PREFIX}chaos-{secrets.token_hex(8)}-"
    with RankGroup(of.case.config.num_ranks) as group:
        hand = Hand(of, group)
        accounts = group.run(live_through, of, prefix, timeout_s=ENDS_S, allow_failures=True, hear=hand.hear)
    said = complaints(of, accounts)
    if said:  # what led to it
        said += [f"rank {r} met {a.met}" for r, a in enumerate(accounts) if isinstance(a, Account) and a.met]
    if left := sorted(path.name for path in SHM.glob(f"{prefix}*")):
        said.append(f"windows were left behind: {left}")
    answers = frozenset(each.answer for each in accounts if isinstance(each, Account))
    return Outcome(tuple(said), answers, longest(of, accounts, hand.struck))


def run(of: Trial) -> list[str]:
    """Runs a trial, and says why it was not survived; nothing where it was."""
    return list(outcome(of).said)


def _prepare() -> None:
    """Has the server that ranks are forked from import what trials need, too."""
    forkserver.set_forkserver_preload([*PRELOAD, "tests.chaos.lost_ranks"])
    forkserver.ensure_running()


def _of_seed(seed: int) -> tuple[int, Outcome]:
    return seed, outcome(draw(seed))


@dataclass
class Tally:
    """What became of the trials of one kind."""

    tried: int = 0
    survived: int = 0
    late: int = 0
    answers: set[str] = field(default_factory=set)
    worst: Longest | None = None

    def add(self, found: Outcome) -> None:
        """One more."""
        self.tried += 1
        self.survived += not found.said
        self.answers |= found.answers
        if (latest := found.longest) is not None:
            self.late += latest.over_s > 0
            if self.worst is None or latest.over_s > self.worst.over_s:
                self.worst = latest


def table(title: str, columns: Sequence[str], tallies: dict[tuple[str, ...], Tally]) -> TextTable:
    """The figures, a row for each kind."""
    rows = []
    for kind, tally in tallies.items():
        worst = (
            ("", "") if tally.worst is None else (f"{tally.worst.took_s:.2f}", f"{tally.worst.over_s:+.2f}")
        )
        rows.append([*kind, str(tally.tried), str(tally.survived), *worst, str(tally.late)])
    heads = *map(names, columns), *map(numbers, ("tried", "survived", "longest, s", "over, s", "late"))
    return TextTable(heads, rows, title)


def summed(
    found: Iterable[tuple[int, Outcome]], kind: Callable[[Trial, Outcome], tuple[str, ...]]
) -> dict[tuple[str, ...], Tally]:
    """Outcomes by what a trial is."""
    tallies: dict[tuple[str, ...], Tally] = {}
    for seed, each in found:
        tallies.setdefault(kind(draw(seed), each), Tally()).add(each)
    return tallies


def _kind(of: Trial, found: Outcome) -> tuple[str, ...]:
    return of.strike, of.api, of.case.config.scheme, "/".join(sorted(found.answers)) or "?"


def main() -> int:
    """Runs trials, and says what went wrong in each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=540)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first trial; the next one has the next number"
    )
    parser.add_argument("--jobs", type=int, default=JOBS, help="how many at a time")
    parser.add_argument("--strike", choices=list(STRIKES), help="only these")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.trials)
    seeds = [seed for seed in seeds if options.strike in (None, draw(seed).strike)]
    began, found = time.monotonic(), []
    console = Console()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # connections to a dead host
    context = multiprocessing.get_context("spawn")
    # Not the user's own: nothing that is kept is to be a trial's.
    with (
        tempfile.TemporaryDirectory(prefix="moe_triton-chaos-") as folder,
        surroundings.away_from_home(Path(folder, surroundings.HOME_NAME)),
        ProcessPoolExecutor(options.jobs, mp_context=context, initializer=_prepare) as pool,
    ):
        for seed, each in pool.map(_of_seed, seeds):
            found.append((seed, each))
            for text in each.said:
                print(f"trial {seed}: {text}", flush=True)
    took = time.monotonic() - began
    columns = "strike", "functions", "scheme", "lost ranks"
    for title, part in (("Each kind", slice(4)), ("By strike", slice(1)), ("By scheme", slice(1, 4))):
        tallies = summed(found, lambda of, each, part=part: _kind(of, each)[part])
        table(title, columns[part], tallies).print(console)
    survived = sum(not each.said for _, each in found)
    load = "/".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{survived} of {len(found)} trials survived, in {took:.0f} s; the machine's load is {load}")
    return 0 if survived == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
