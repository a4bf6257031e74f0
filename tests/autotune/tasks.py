"""Tasks made by hand, whose best settings are known."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.search.task import Outcome, Task, WrongBitsError
from moe_triton.core.space import Settings, Space

MEETING_S = 90.0
GRID = Space({"X": (1, 2, 3, 4), "Y": (0, 1)}, allows=lambda values: values["X"] * values["Y"] != 4)


@dataclass(frozen=True)
class Bowl(Task):
    """The best X is `bottom`, and Y = 1 is cheaper by a quarter; X = 3 cannot be had."""

    name: str = "bowl"
    space: Space = field(default_factory=lambda: GRID)
    own: Settings = field(default_factory=lambda: {"X": 1, "Y": 0})
    bottom: int = 2
    log: Path | None = None

    def evaluate(self, settings: Settings, best: float | None) -> Outcome:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{self.name} {dict(settings)} {os.getpid()}\n")
        if settings["X"] == 3:
            return Outcome.infeasible("three is too wide")
        value = 10.0 + (settings["X"] - self.bottom) ** 2 - 0.25 * settings["Y"]
        return Outcome(value, facts={"ns": value})


class Wrong(Bowl):
    """One candidate gives other results."""

    def evaluate(self, settings: Settings, best: float | None) -> Outcome:
        if settings["X"] == 2:
            raise WrongBitsError(f"X={settings['X']} gives other bits")
        return super().evaluate(settings, best)


class Stuck(Bowl):
    """The fourth candidate never ends: the test kills the process."""

    def evaluate(self, settings: Settings, best: float | None) -> Outcome:
        assert self.log is not None
        if self.log.exists() and len(self.log.read_text().splitlines()) == 3:
            self.log.with_suffix(".stuck").touch()
            time.sleep(600)
        return super().evaluate(settings, best)


class Endless(Bowl):
    """Every candidate takes a while, and there are many."""

    def evaluate(self, settings: Settings, best: float | None) -> Outcome:
        time.sleep(0.1)
        return super().evaluate(settings, best)


class Met(Bowl):
    """Goes on when two processes have begun."""

    def evaluate(self, settings: Settings, best: float | None) -> Outcome:
        outcome = super().evaluate(settings, best)
        assert self.log is not None
        end = time.monotonic() + MEETING_S
        while len({line.split()[-1] for line in self.log.read_text().splitlines()}) < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
        return outcome


def bowls(log: Path, number: int = 1, kind: type[Bowl] = Bowl) -> Sequence[Task]:
    """Tasks that say what they were asked."""
    return [replace(kind(), name=f"bowl{i}", log=log) for i in range(number)]


def wide(log: Path | None = None) -> Sequence[Task]:
    """More candidates than any budget here."""
    space = Space({"X": tuple(range(1, 30)), "Y": tuple(range(8))})
    return [Bowl("wide", space, {"X": 29, "Y": 0}, bottom=7, log=log)]
