"""``moe-triton selftest``: its output while it runs, and at the end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from moe_triton.core.checks import check_choice
from moe_triton.tools.progress import progress
from moe_triton.tools.selftest.check import STAGES, Check, Result, Settings, Status
from moe_triton.tools.selftest.private import scrubbed
from moe_triton.tools.selftest.report import JSON_NAME, MARKDOWN_NAME, Report
from moe_triton.tools.selftest.run import run_selftest
from moe_triton.tools.text_table import TextTable, names, numbers

MARKS: dict[Status, str] = {"passed": "green", "failed": "red", "skipped": "yellow"}


def run(settings: Settings, folder: Path, console: Console) -> int:
    """Runs the battery, shows its progress, and prints where the report is.

    Returns:
        0 if nothing has failed, else 1.

    Raises:
        ArgumentError: a stage is none.
        OSError: the report cannot be written.
    """
    for stage in settings.only:
        check_choice("--only", stage, STAGES)
    with progress("selftest") as work:

        def begin(check: Check, total: int) -> None:
            work.begin(f"{check.stage}: {check.name}", total)

        def end(result: Result) -> None:
            work.advance()
            if result.status == "failed":
                console.print(f"[red]failed[/red] {escape(f'{result.stage}: {result.name}')}")
                for detail in result.details:
                    console.print(escape(f"  {scrubbed(detail)}"), highlight=False)

        report = run_selftest(settings, folder, begin, end)
    _show_summary(report, console)
    console.print(f"To attach to an issue: {folder / MARKDOWN_NAME} and {folder / JSON_NAME}")
    return int(report.has_failed)


def _show_summary(report: Report, console: Console) -> None:
    columns = (names("stage"), *map(numbers, MARKS), numbers("seconds"))
    rows = []
    for stage in STAGES:
        if not (of_stage := [result for result in report.results if result.stage == stage]):
            continue
        count = Counter(result.status for result in of_stage)
        shown = [
            Text(str(count[status]), style=color) if count[status] else "" for status, color in MARKS.items()
        ]
        rows.append((stage, *shown, f"{sum(result.seconds for result in of_stage):.1f}"))
    TextTable(columns, rows, f"moe_triton selftest, back end {report.settings.backend}").print(console)
    if report.has_failed:
        console.print("[red]Something is not as it should be: the report says what.[/red]")
    else:
        console.print(f"[green]Nothing has failed on {escape(report.soc)}.[/green]")
