"""The whole battery: the environment first, then the checks that it allows; a report after each check."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path

from moe_triton.processes import RankFailedError, RankGroup
from moe_triton.tools.selftest.check import Check, Finding, Result, Settings, Status, run_on_rank
from moe_triton.tools.selftest.checks.constants import constant_checks
from moe_triton.tools.selftest.checks.environment import DEVICES, environment_checks
from moe_triton.tools.selftest.checks.kernels import kernel_checks
from moe_triton.tools.selftest.checks.operators import graph_checks, operator_checks, torch_npu_checks
from moe_triton.tools.selftest.checks.stragglers import straggler_checks
from moe_triton.tools.selftest.checks.timing import timing_checks
from moe_triton.tools.selftest.checks.windows import window_checks
from moe_triton.tools.selftest.report import Report


def run_selftest(
    settings: Settings,
    folder: Path,
    begin: Callable[[Check, int], None] = lambda check, number: None,
    end: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Runs all checks and writes the report after each of them, so that there is one even if the machine
    stops.

    Args:
        settings: what to run.
        folder: for the report.
        begin: called with each check that begins, and the number of checks known so far.
        end: called with each result.

    Raises:
        OSError: the folder cannot be written to.
    """
    moment = datetime.now(timezone.utc)
    known: list[Check] = []

    def write(result: Result) -> None:
        Report(settings, battery.results, moment, False).write(folder)
        end(result)

    def run(checks: Sequence[Check]) -> None:
        known.extend(check for check in checks if settings.runs(check.stage))
        battery.run(checks)

    with Battery(settings, lambda check: begin(check, len(known)), write) as battery:
        Report(settings, (), moment, False).write(folder)
        run(environment_checks(settings))
        devices = next(result for result in battery.results if result.name == DEVICES)
        run(checks_of(settings, int(devices.figures.get("ranks", 0))))
    report = Report(settings, battery.results, moment, True)
    report.write(folder)
    return report


def checks_of(settings: Settings, ranks: int) -> list[Check]:
    """All checks but those of the environment, in order.

    Args:
        settings: of the run.
        ranks: of the group; 0 if unknown: checks that need a group are then skipped.
    """
    return [
        *window_checks(ranks),
        *kernel_checks(settings),
        *operator_checks(settings, ranks),
        *straggler_checks(settings, ranks),
        *torch_npu_checks(ranks),
        *graph_checks(ranks),
        *timing_checks(settings, ranks),
        *constant_checks(settings, ranks),
    ]


class Battery(AbstractContextManager["Battery"]):
    """Runs checks and keeps their results. A context manager: leaving it ends the processes.

    Args:
        settings: of the run.
        begin: called with each check that begins.
        end: called with each result.
    """

    def __init__(
        self,
        settings: Settings,
        begin: Callable[[Check], None] = lambda check: None,
        end: Callable[[Result], None] = lambda result: None,
    ) -> None:
        self.settings = settings
        self.results: list[Result] = []
        self._begin, self._end = begin, end
        self._group: RankGroup | None = None
        self._size = 0
        # The root causes of each check that has not passed.
        self._causes: dict[str, tuple[str, ...]] = {}

    def run(self, checks: Iterable[Check]) -> None:
        """Runs the checks of the selected stages.

        A check whose needs were not met is skipped. Needs that are not part of the run count as met.
        """
        for check in checks:
            if not self.settings.runs(check.stage):
                continue
            self._begin(check)
            result = self._skipped(check) or self._result(check)
            if result.status != "passed":
                self._causes.setdefault(check.name, (check.name,))
            self.results.append(result)
            self._end(result)

    def _skipped(self, check: Check) -> Result | None:
        if not (causes := [cause for name in check.needs for cause in self._causes.get(name, ())]):
            return None
        self._causes[check.name] = tuple(dict.fromkeys(causes))
        reason = f"because of {', '.join(repr(cause) for cause in self._causes[check.name])}"
        return Result(check.name, check.stage, "skipped", (reason,), page=check.page)

    def _result(self, check: Check) -> Result:
        start = time.monotonic()
        try:
            finding = check.merge(self._findings(check))
        except RankFailedError as error:
            finding = Finding(wrong=_by_failure(error), left=True)
        except OSError as error:
            finding = Finding(wrong=(f"its processes could not be started: {error}",), left=True)
        if finding.left:
            self.close()
        seconds = time.monotonic() - start
        status: Status = "failed" if finding.wrong else "skipped" if finding.skipped else "passed"
        details = finding.wrong or ((finding.skipped,) if finding.skipped else ())
        return Result(
            check.name, check.stage, status, details, finding.figures, finding.facts, seconds, check.page
        )

    def _findings(self, check: Check) -> Sequence[Finding]:
        deadline_s = check.timeout_s or self.settings.timeout_s
        if self._group is None or self._size != check.ranks:
            self.close()
            # gloo times out earlier than the check: if one rank fails, the others say which ranks they waited
            # for
            self._group, self._size = RankGroup(check.ranks, timeout_s=self.settings.wait_s), check.ranks
        order = (check.function, check.arguments, self.settings, check.on_device)
        return self._group.run(run_on_rank, *order, timeout_s=deadline_s)

    def close(self) -> None:
        """Ends the processes; a later check starts others."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def __exit__(self, *error: object) -> None:
        self.close()


def _by_failure(error: RankFailedError) -> tuple[str, ...]:
    """A line for each failure, with its ranks; their processes have been ended."""
    ranks: dict[str, list[int]] = {}
    for rank, failure in sorted(error.failures.items()):
        ranks.setdefault(failure.strip(), []).append(rank)
    return tuple(f"rank(s) {of}: {failure}; its processes were ended" for failure, of in ranks.items())
