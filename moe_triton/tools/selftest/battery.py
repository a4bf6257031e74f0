"""Runs checks one after the other, each in processes that can be killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from moe_triton.processes import RankFailedError, RankGroup
from moe_triton.tools.selftest.check import Check, Finding, Result, Status, run_on_rank
from moe_triton.tools.selftest.settings import Settings


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
        causes = [cause for name in check.needs for cause in self._causes.get(name, ())]
        if not causes:
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
            check.name,
            check.stage,
            status,
            details,
            figures=finding.figures,
            facts=finding.facts,
            seconds=seconds,
            page=check.page,
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
    return tuple(
        f"rank(s) {numbers}: {failure}; its processes were ended" for failure, numbers in ranks.items()
    )
