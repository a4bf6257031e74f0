"""``moe-triton tune kernels``: searches, and keeps what was found in a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from autotune import results
from autotune.cli import options
from autotune.cli.options import DEFAULT, console
from autotune.kernels import occasions
from autotune.kernels.modelled import floor_ns
from autotune.kernels.scope import Scope
from autotune.search import Found, Outcome
from autotune.search.run import described
from autotune.tuning import BUDGET, Tuned, tasks_of, through, tune
from moe_triton import tables
from moe_triton.core.errors import ArgumentError
from moe_triton.core.space import text_of

EVERY_SIZE = "all sizes that shipped tables are of: H, K and dtype are not asked; each H is kept on its own"
NAMED = "dtypes", "kernels"  # options without the s
INTERRUPTED = 130  # of a process that Ctrl-C ended


def kernels(
    soc: options.Soc = DEFAULT.soc,
    hidden: options.Hidden = list(DEFAULT.hidden),
    topk: options.Topk = list(DEFAULT.topk),
    ranks: options.Ranks = list(DEFAULT.ranks),
    tokens: options.Tokens = list(DEFAULT.tokens),
    dtype: options.Dtype = list(DEFAULT.dtypes),
    kernel: Annotated[list[str], typer.Option(help="only this one; may be repeated")] = [],
    machine: options.Constants = "",
    budget: options.Budget = BUDGET,
    workers: options.Workers = 0,
    seed: options.Seed = 0,
    study: options.Study = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with what is known already")] = False,
    write: Annotated[bool, typer.Option(help="keep the table where buffers look it up")] = True,
    shipped: Annotated[bool, typer.Option("--write-shipped", help="keep it in the package instead")] = False,
    output: Annotated[Path | None, typer.Option(help="keep it in this folder instead")] = None,
    all_shipped: Annotated[bool, typer.Option(results.ALL_SHIPPED, help=EVERY_SIZE)] = False,
) -> None:
    """Find the fastest settings of every kernel that plans of these sizes launch."""
    with options.errors_shown():
        asked = options.scope_of(soc, hidden, topk, ranks, tokens, dtype, kernel, machine, seed)
        command = command_of(asked, all_shipped)
        folder = tables.FOLDER if shipped else output or tables.folder_of_user()
        if write and folder is None:
            raise ArgumentError("HOME", "not set", "the table needs a folder", "Pass --output.")

        def keep(tuned: Tuned) -> None:
            if write and folder is not None and any(each.best for each in tuned.found):
                kept = results.write(replace(tuned.table, command=command), folder)
                console.print(f"kept: {kept}", markup=False, highlight=False, soft_wrap=True)

        for scope in occasions.shipped(asked) if all_shipped else [asked]:
            try:
                tuned = searched(scope, budget, workers, seed, resume, study)
            except typer.Exit:
                keep(through(scope, budget, study))
                raise
            console.print(summary(tuned))
            for each in tuned.found:
                if each.best is None:
                    console.print(f"{each.task.name}: nothing could be priced", markup=False, soft_wrap=True)
            keep(tuned)


def command_of(scope: Scope, all_shipped: bool) -> str:
    """What makes a table of a scope again."""
    words = [tables.COMMAND, f"--soc {scope.soc if scope.is_cpu else scope.chip}"]
    if all_shipped:
        return " ".join([*words, results.ALL_SHIPPED, "--write-shipped"])
    for option in ("hidden", "topk", "ranks", "tokens", "dtypes", "kernels"):
        given = getattr(scope, option)
        if given != getattr(DEFAULT, option):
            words += [f"--{option.removesuffix('s') if option in NAMED else option} {each}" for each in given]
    return " ".join(words)


def searched(scope: Scope, budget: int, workers: int, seed: int, resume: bool, study: Path | None) -> Tuned:
    """Searches with progress on the console. Ctrl-C ends the command, and loses nothing."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {task.name: task for task in tasks_of(scope)}
        number = sum(min(len(task.candidates()), budget) for task in tasks.values())
        bar = progress.add_task("candidates", total=number)
        best: dict[str, float] = {}

        def report(name: str, settings: dict[str, int], outcome: Outcome) -> None:
            if outcome.is_exact and outcome.value is not None:
                best[name] = min(outcome.value, best.get(name, outcome.value))
            said = f"{name.partition(' [')[0]}: best so far {best.get(name, float('nan')):.4g}"
            progress.update(bar, advance=1, description=f"{said}; {described(settings, outcome)}")

        try:
            how = {"budget": budget, "workers": workers, "seed": seed}
            return tune(scope, **how, resume=resume, study=study, report=report)
        except KeyboardInterrupt:
            console.print("stopped; nothing is lost: the same command with --resume goes on")
            raise typer.Exit(INTERRUPTED) from None


def summary(tuned: Tuned) -> Table:
    """A line for each kernel: default and best, the floor, and what keeps it from there."""
    shown = Table("kernel", "settings", "default us", "best us", "floor us", "best / floor", "most of it")
    for found in tuned.found:
        if found.best is not None and found.default is not None:
            shown.add_row(*_line(tuned.scope, found))
    return shown


def _line(scope: Scope, found: Found) -> tuple[str, ...]:
    assert found.best is not None
    assert found.default is not None
    best, default = found.best.outcome.facts, found.default.outcome.facts
    label = found.task.name.partition(": ")[2].partition(" [")[0]
    settings = "default" if found.best is found.default else text_of(found.best.settings)
    times = f"{default['ns'] / 1e3:.2f}", f"{best['ns'] / 1e3:.2f}"
    if scope.is_cpu:
        return label, settings, *times, "", "", ""
    floor = floor_ns(least_bytes(found), scope.priced_on())
    most = max(best["parts"], key=lambda part: best["parts"][part])
    return label, settings, *times, f"{floor / 1e3:.2f}", f"{best['ns'] / floor:.2f}", most


def least_bytes(found: Found) -> float:
    """What has to be read and written, as far as any candidate shows."""
    return min(
        float(trial.outcome.facts["bytes"]) for trial in found.trials if "bytes" in trial.outcome.facts
    )
