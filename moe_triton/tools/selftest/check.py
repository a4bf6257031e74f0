"""A check, what its processes find, and what is reported of it; and the settings of a run."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moe_triton.backends import make_backend, select_device
from moe_triton.backends.base import Backend
from moe_triton.core.errors import ArgumentError, MoeTritonError

Status = Literal["passed", "failed", "skipped"]
STATUSES: tuple[Status, ...] = ("passed", "failed", "skipped")
MOST_DETAILS = 5
STAGES = (
    *("environment", "windows", "kernels", "operators", "stragglers"),
    *("torch_npu", "graphs", "timing", "constants"),
)
"""In the order in which they run: later ones depend on earlier ones."""

HIDDEN, QUICK_HIDDEN = 7168, 512
"""H of whole runs and of quick ones."""


@dataclass(frozen=True)
class Settings:
    """Settings of one run.

    Attributes:
        backend: "cpu" or "npu".
        ranks: one per device; None for all devices of the machine.
        quick: fewer sizes, cases and repetitions.
        only: stages to run in addition to the environment; empty for all.
        timeout_s: seconds that one check may take, including the start of its processes.
        seed: of all data.
    """

    backend: str = "cpu"
    ranks: int | None = None
    quick: bool = False
    only: tuple[str, ...] = ()
    timeout_s: float = 120.0
    seed: int = 20260101

    @property
    def wait_s(self) -> float:
        """Timeout of one wait in an operator, shorter than a check's, which reports the missing ranks."""
        return self.timeout_s / 4

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """H of the kernels' cases."""
        return (QUICK_HIDDEN,) if self.quick else (QUICK_HIDDEN, 4096, HIDDEN)

    def runs(self, stage: str) -> bool:
        """Whether a stage is part of this run."""
        return stage == STAGES[0] or not self.only or stage in self.only


@dataclass(frozen=True)
class Finding:
    """The result of one process, of plain types since it is sent through a pipe.

    Attributes:
        wrong: errors; empty if the check has passed.
        skipped: why there was nothing to check, or "".
        figures: numbers, with their units in their names.
        facts: texts by name.
        samples: numbers from which figures are computed over all ranks.
        left: whether the process left its group in an undefined state.
    """

    wrong: tuple[str, ...] = ()
    skipped: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    left: bool = False


@dataclass(frozen=True)
class Place:
    """Where a check's function runs.

    Attributes:
        rank: this process.
        num_ranks: of the check.
        settings: of the run.
    """

    rank: int
    num_ranks: int
    settings: Settings

    @property
    def backend(self) -> Backend:
        """The back end, with this rank's device selected; made on first use."""
        return _backend(self.settings.backend, self.rank)


@functools.cache
def _backend(name: str, rank: int) -> Backend:
    select_device(name, rank)
    return make_backend(name, "triton")


def of_rank_0(findings: Sequence[Finding]) -> Finding:
    """The errors of all ranks, and everything else of rank 0."""
    wrong = [
        f"rank {rank}: {text}" if len(findings) > 1 else text
        for rank, finding in enumerate(findings)
        for text in finding.wrong
    ]
    first = findings[0]
    left = any(finding.left for finding in findings)
    return Finding(tuple(wrong), first.skipped, first.figures, first.facts, first.samples, left)


def few(wrong: Sequence[str]) -> tuple[str, ...]:
    """The first errors of many, which mostly have one cause, and how many more there are."""
    more = len(wrong) - MOST_DETAILS
    return (*wrong[:MOST_DETAILS], *([f"and {more} more"] if more > 0 else []))


@dataclass(frozen=True)
class Check:
    """One check of the machine.

    Attributes:
        name: unique.
        stage: one of `moe_triton.tools.selftest.check.STAGES`.
        function: called as ``function(place, *arguments)`` on each rank; importable from its module.
        arguments: picklable.
        ranks: processes, one per device.
        needs: names of checks that must have passed for this one to tell anything new.
        merge: merges the findings of all ranks.
        page: documentation of an assumption.
        timeout_s: seconds until its processes are killed, None for the run's.
        on_device: whether the rank's device is selected first.
    """

    name: str
    stage: str
    function: Callable[..., Finding]
    arguments: tuple[object, ...] = ()
    ranks: int = 1
    needs: tuple[str, ...] = ()
    merge: Callable[[Sequence[Finding]], Finding] = of_rank_0
    page: str = ""
    timeout_s: float | None = None
    on_device: bool = True


@dataclass(frozen=True)
class Result:
    """The result of a check.

    Attributes:
        name: of the check.
        stage: of the check.
        status: "passed", "failed" or "skipped".
        details: errors, or why it was skipped.
        figures: numbers, with their units in their names.
        facts: texts by name.
        seconds: that it took.
        page: of the check.
    """

    name: str
    stage: str
    status: Status
    details: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    page: str = ""


def run_on_rank(
    rank: int,
    num_ranks: int,
    function: Callable[..., Finding],
    arguments: tuple[object, ...],
    settings: Settings,
    on_device: bool,
) -> Finding:
    """Runs a check in one of its processes. An exception is a finding, and leaves ranks out of step."""
    place = Place(rank, num_ranks, settings)
    try:
        if on_device:
            _ = place.backend
        return function(place, *arguments)
    except (MoeTritonError, ImportError) as error:  # these explain themselves
        if isinstance(error, ArgumentError) and error.argument == "comm_alg":
            return Finding(skipped=str(error))  # the back end does not offer the scheme
        return Finding(wrong=(f"{type(error).__name__}: {error}",), left=True)
    except Exception:
        return Finding(wrong=(traceback.format_exc().strip(),), left=True)


@dataclass(frozen=True)
class Assumption:
    """One thing that a back end relies on.

    Attributes:
        name: what is assumed, in a few words; unique.
        page: the documentation that says so: a title, or an address.
        check: returns None if it holds, else what was found instead. It runs in its own process, with the
            first device selected.
    """

    name: str
    page: str
    check: Callable[[], str | None]
