"""The whole battery: the environment first, then the checks that it allows; a report after each check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from moe_triton.tools.selftest.battery import Battery
from moe_triton.tools.selftest.check import Check, Result
from moe_triton.tools.selftest.checks.constants import constant_checks
from moe_triton.tools.selftest.checks.environment import DEVICES, environment_checks
from moe_triton.tools.selftest.checks.graphs import graph_checks
from moe_triton.tools.selftest.checks.kernels import kernel_checks
from moe_triton.tools.selftest.checks.operators import operator_checks
from moe_triton.tools.selftest.checks.stragglers import straggler_checks
from moe_triton.tools.selftest.checks.timing import timing_checks
from moe_triton.tools.selftest.checks.torch_npu import torch_npu_checks
from moe_triton.tools.selftest.checks.windows import window_checks
from moe_triton.tools.selftest.report import Report
from moe_triton.tools.selftest.settings import Settings


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
