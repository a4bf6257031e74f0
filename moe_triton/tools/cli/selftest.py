"""``moe-triton selftest``: its output while it runs, and at the end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from moe_triton.tools.selftest.check import Check, Result, Status
from moe_triton.tools.selftest.private import scrubbed
from moe_triton.tools.selftest.report import JSON_NAME, MARKDOWN_NAME, Report
from moe_triton.tools.selftest.run import run_selftest
from moe_triton.tools.selftest.settings import STAGES, Settings

MARKS: dict[Status, str] = {"passed": "green", "failed": "red", "skipped": "yellow"}


def run(settings: Settings, folder: Path, console: Console) -> int:
    """Runs the battery, shows its progress, and prints where the report is.

    Returns:
        0 if nothing has failed, else 1.
    """
    unknown = [stage for stage in settings.only if stage not in STAGES]
    if unknown:
        console.print(f"[red]--only {escape(unknown[0])}: there are {', '.join(STAGES)}.[/red]")
        return 1
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def begin(check: Check, number: int) -> None:
            progress.update(task, total=number, description=escape(f"{check.stage}: {check.name}"))

        def end(result: Result) -> None:
            progress.advance(task)
            if result.status == "failed":
                _show_failure(result, progress.console)

        try:
            report = run_selftest(settings, folder, begin, end)
        except OSError as error:
            console.print(f"[red]The report cannot be written: {escape(str(error))}[/red]")
            return 1
    _show_summary(report, console)
    console.print(f"To attach to an issue: {folder / MARKDOWN_NAME} and {folder / JSON_NAME}")
    return int(report.has_failed)


def _show_failure(result: Result, console: Console) -> None:
    console.print(f"[red]failed[/red] {escape(f'{result.stage}: {result.name}')}")
    for detail in result.details:
        console.print(escape(f"  {scrubbed(detail)}"), highlight=False)


def _show_summary(report: Report, console: Console) -> None:
    numbers = (Column(heading, justify="right") for heading in (*MARKS, "seconds"))
    table = Table("stage", *numbers, title=f"moe_triton selftest, back end {report.settings.backend}")
    for stage in STAGES:
        of_stage = [result for result in report.results if result.stage == stage]
        if not of_stage:
            continue
        count = Counter(result.status for result in of_stage)
        shown = [f"[{color}]{count[status]}[/]" if count[status] else "" for status, color in MARKS.items()]
        table.add_row(stage, *shown, f"{sum(result.seconds for result in of_stage):.1f}")
    console.print(table)
    if report.has_failed:
        console.print("[red]Something is not as it should be: the report says what.[/red]")
    else:
        console.print(f"[green]Nothing has failed on {escape(report.soc)}.[/green]")
