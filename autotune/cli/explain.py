"""``moe-triton tune explain``: why a kernel has the settings that it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autotune.cli import options
from autotune.cli.kernels import least_bytes, searched
from autotune.cli.options import DEFAULT, say
from autotune.kernels.modelled import ModelledTask, floor_ns
from autotune.search import Found, Trial
from autotune.tuning import BUDGET
from moe_triton.core.errors import ArgumentError
from moe_triton.core.space import text_of
from moe_triton.tools.progress import progress
from moe_triton.tools.text_table import TextTable, names, numbers

NEAR = 1.3
"""How many times the floor a kernel may take and still be as fast as one may ask."""


def explain(
    kernel: Annotated[str, typer.Argument(help="name of a Triton kernel")],
    soc: options.Soc = DEFAULT.soc,
    hidden: options.Hidden = list(DEFAULT.hidden),
    topk: options.Topk = list(DEFAULT.topk),
    ranks: options.Ranks = list(DEFAULT.ranks),
    tokens: options.Tokens = [128],
    dtype: options.Dtype = ["bf16"],
    variant: Annotated[str, typer.Option(help="only this one, as tables have it")] = "",
    machine: options.Constants = "",
    budget: options.Budget = BUDGET,
    workers: options.Workers = 1,
    seed: options.Seed = 0,
    study: options.Study = None,
    plot: Annotated[Path | None, typer.Option(help="folder for pictures")] = None,
) -> None:
    """Say why these settings: the best, the runner-up and the default, pipe by pipe, and the floor."""
    scope = options.scope_of(soc, hidden, topk, ranks, tokens, dtype, [kernel], machine, seed)
    if scope.is_cpu:
        rule = "what pipes do is known of an NPU's candidates only"
        raise ArgumentError("soc", soc, rule, "See tune kernels --soc cpu for what was measured.")
    for search in searched(scope, budget, workers, seed, True, study).found:
        if not variant or variant == search.task.tunable.keys[1]:  # type: ignore[attr-defined]
            _explain(search, plot)


def _explain(search: Found, plot: Path | None) -> None:
    task = search.task
    assert isinstance(task, ModelledTask)
    say(f"\n{task.tunable.label}, on {task.chip}")
    if search.best is None or search.default is None:
        for trial in search.trials:
            say(f"{text_of(trial.settings)}: {trial.outcome.reason}")
        return
    ranked = _ranked(search)
    for heading, of in (("critical path", "parts"), ("pipes, occupied", "busy")):
        say("")
        _table(heading, of, ranked).print(Console())
    for line in (*_runner_up(search), *_floor(search, task), *_refused(search)):
        say(line)
    if plot is not None:
        from autotune.plots import draw

        with progress("drawing"):
            paths = list(draw(search, plot))
        for path in paths:
            say(f"kept: {path}")


def _ranked(search: Found) -> dict[str, Trial]:
    """The candidates that are compared, by their headings."""
    assert search.best is not None
    assert search.default is not None
    shown = {"best": search.best}
    if len(search.ranking) > 1:
        shown["runner-up"] = search.ranking[1]
    if search.default not in shown.values():
        shown["default"] = search.default
    return {f"{name}: {text_of(trial.settings)}": trial for name, trial in shown.items()}


def _table(heading: str, of: str, ranked: dict[str, Trial]) -> TextTable:
    facts = [trial.outcome.facts for trial in ranked.values()]
    rows = [(part, *(f"{each[of].get(part, 0.0) / 1e3:.2f}" for each in facts)) for part in facts[0][of]]
    if of == "parts":
        rows.append(("all", *(f"{each['ns'] / 1e3:.2f}" for each in facts)))
        rows.append(("unified buffer, KB", *(f"{each['ub_bytes'] / 1024:.1f}" for each in facts)))
    return TextTable((names(f"{heading}, us"), *map(numbers, ranked)), rows)


def _runner_up(search: Found) -> Iterator[str]:
    if len(search.ranking) < 2:
        yield "There is no other candidate that can be had."
        return
    best, second = (trial.outcome.facts for trial in search.ranking[:2])
    lost = {name: second["parts"][name] - best["parts"].get(name, 0.0) for name in second["parts"]}
    most = max(lost, key=lambda name: lost[name])
    loses = (second["ns"] - best["ns"]) / best["ns"]
    yield f"The runner-up loses {loses:.1%}" + (f", most of it to {most}." if lost[most] > 0 else ".")


def _floor(search: Found, task: ModelledTask) -> Iterator[str]:
    assert search.best is not None
    facts = search.best.outcome.facts
    floor = floor_ns(least_bytes(search), task.machine)
    ratio = facts["ns"] / floor
    yield f"Its bytes take {floor / 1e3:.2f} us at the machine's bandwidth; it takes {ratio:.2f} times that."
    if ratio > NEAR:
        yield f"What forbids {NEAR:g} times: {forbids(search)}."


def forbids(search: Found) -> str:
    """What the best candidate's time goes to beside the bytes, the largest part first."""
    assert search.best is not None
    parts = search.best.outcome.facts["parts"]
    others = sorted((name for name in parts if name != "memory bandwidth"), key=lambda name: -parts[name])
    return ", ".join(f"{name} {parts[name] / 1e3:.2f} us" for name in others[:2])


def _refused(search: Found) -> Iterator[str]:
    refused = [trial for trial in search.trials if trial.outcome.value is None]
    for trial in refused:
        yield f"not possible: {text_of(trial.settings)}: {trial.outcome.reason}"
