"""``moe-triton tune kernels``: searches, and keeps what was found in a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from autotune import results
from autotune.cli import options
from autotune.cli.options import DEFAULT, say
from autotune.kernels import occasions
from autotune.kernels.modelled import ModelledTask, floor_ns
from autotune.kernels.scope import Scope
from autotune.search import Found, Outcome
from autotune.search.run import described
from autotune.tuning import BUDGET, Tuned, tasks_of, through, tune
from moe_triton import tables
from moe_triton.core.errors import ArgumentError
from moe_triton.core.space import text_of
from moe_triton.tools.progress import progress

EVERY_SIZE = "all sizes that shipped tables are of: H, K and dtype are not asked; each H is kept on its own"
MEASURE = "on the NPU of this machine, instead of by the model"
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
    measure: Annotated[bool, typer.Option("--measure", help=MEASURE)] = False,
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
    asked = options.scope_of(soc, hidden, topk, ranks, tokens, dtype, kernel, machine, seed)
    asked = replace(asked, measure=measure)
    command = command_of(asked, all_shipped)
    folder = tables.FOLDER if shipped else output or tables.folder_of_user()
    if write and folder is None:
        raise ArgumentError("HOME", "not set", "the table needs a folder", "Pass --output.")

    def keep(tuned: Tuned) -> None:
        if write and folder is not None and any(each.best for each in tuned.found):
            kept = results.write(replace(tuned.table, command=command), folder)
            say(f"kept: {kept}")

    for scope in occasions.shipped(asked) if all_shipped else [asked]:
        try:
            tuned = searched(scope, budget, workers, seed, resume, study)
        except typer.Exit:
            keep(through(scope, budget, study))
            raise
        for line in summary(tuned):
            say(line)
        keep(tuned)


def command_of(scope: Scope, all_shipped: bool) -> str:
    """What makes a table of a scope again."""
    words = [tables.COMMAND, f"--soc {scope.soc if scope.is_cpu else scope.chip}"]
    if scope.measure:
        words.append("--measure")
    if all_shipped:
        return " ".join([*words, results.ALL_SHIPPED, "--write-shipped"])
    for option in ("hidden", "topk", "ranks", "tokens", "dtypes", "kernels"):
        given = getattr(scope, option)
        if given != getattr(DEFAULT, option):
            words += [f"--{option.removesuffix('s') if option in NAMED else option} {each}" for each in given]
    return " ".join(words)


def searched(scope: Scope, budget: int, workers: int, seed: int, resume: bool, study: Path | None) -> Tuned:
    """Searches, and says how far it is. Ctrl-C ends the command, and loses nothing."""
    with progress("candidates") as work:
        work.begin("listing them")
        tasks = {task.name: task for task in tasks_of(scope)}
        work.begin("", sum(min(len(task.candidates()), budget) for task in tasks.values()))
        best: dict[str, float] = {}

        def report(name: str, settings: dict[str, int], outcome: Outcome) -> None:
            if outcome.is_exact and outcome.value is not None:
                best[name] = min(outcome.value, best.get(name, outcome.value))
            said = f"{name.partition(' [')[0]}: best so far {best.get(name, float('nan')):.4g}"
            work.advance(f"{said}; {described(settings, outcome)}")

        try:
            how = {"budget": budget, "workers": workers, "seed": seed}
            return tune(scope, **how, resume=resume, study=study, report=report)
        except KeyboardInterrupt:
            say("stopped; nothing is lost: the same command with --resume goes on")
            raise typer.Exit(INTERRUPTED) from None


def summary(tuned: Tuned) -> Iterator[str]:
    """A line for each kernel: default and best, the floor, and what keeps it from there."""
    for search in tuned.found:
        if search.best is None or search.default is None:
            yield f"{search.task.name}: nothing could be priced"
            continue
        best, default = search.best.outcome.facts, search.default.outcome.facts
        label = search.task.name.partition(": ")[2].partition(" [")[0]
        settings = "default" if search.best is search.default else text_of(search.best.settings)
        said = f"{label}: {settings}, {best['ns'] / 1e3:.2f} us"
        if search.best is not search.default:
            said += f", where the default takes {best.get('default_ns', default['ns']) / 1e3:.2f}"
        if isinstance(search.task, ModelledTask):
            floor = floor_ns(least_bytes(search), search.task.machine)
            most = max(best["parts"], key=lambda part: best["parts"][part])
            said += f"; best / floor {best['ns'] / floor:.2f}, most of it {most}"
        yield said


def least_bytes(search: Found) -> float:
    """What has to be read and written, as far as any candidate shows."""
    return min(
        float(trial.outcome.facts["bytes"]) for trial in search.trials if "bytes" in trial.outcome.facts
    )
