"""The commands behind ``python -m benchmarks.balance``."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.balance import page as pages
from benchmarks.balance import plots, processes
from benchmarks.balance.report import Report, goals, tables
from benchmarks.balance.routing import Day, with_skew
from benchmarks.balance.simulation import simulate
from benchmarks.compare.cases import ROOT
from benchmarks.harness import SHARED_NOTE, at_least, more_than, parser, write_records
from benchmarks.reports import machine, versions
from moe_triton.core.installing import install
from moe_triton.tools.plots import write_plots
from moe_triton.tools.progress import progress

DEFAULT_OUT = ROOT / "build" / "balance"
SKEW_RANKS = 16
"""EP at which the busiest rank has `--skew` times the mean: others have the same tokens on more ranks."""
GROUPS, TOP_GROUPS = 8, 4  # DeepSeek-V3, technical report, 2.1.2
LEAST_STEPS = 25
OTHER_TOKENS = 16, 32, 64, 128, 512
OTHER_PERIOD = 1_000
"""Of node-limited routing, and of other numbers of tokens."""
ROUNDS_BY_RANKS = {2: 16, 4: 8}


def run(arguments: Sequence[str]) -> None:
    """Simulates, measures, and leaves JSON, plots and tables."""
    options = _parser().parse_args(arguments)
    if options.quick:
        _make_quick(options)
    console, path = Console(), options.out / pages.RUN
    if options.processes_only:
        report = Report.load(path)
    else:
        report = _simulated(options)
        report.save(path)  # kept whatever becomes of the processes
    measured = []
    with progress("processes", len(options.processes)) as work:
        for ranks in options.processes:
            work.begin(f"{ranks} ranks")
            measured.append(processes.run(_setting(ranks, options)))
            work.advance()
    report = replace(report, measured=measured, machine=machine(), versions=versions())
    report.save(path)
    write_records(options.json, report.records())
    for table in tables(report):
        table.print(console)
        console.print()
    for line in goals(report):
        console.print(line, soft_wrap=True, highlight=False)
    if measured:
        console.print(SHARED_NOTE, soft_wrap=True, highlight=False)
    if importlib.util.find_spec("matplotlib") is None:
        console.print(f"plots: absent: matplotlib is not installed: {install('bench')}")
        return
    write_plots(console, lambda: plots.plot(report, options.out))


def _simulated(options: argparse.Namespace) -> Report:
    """The day on every number of ranks."""
    day = with_skew(Day(), options.skew, SKEW_RANKS)
    limited = replace(day, groups=GROUPS, top_groups=TOP_GROUPS, _known={})
    first, periods = options.ep[0], options.periods
    least = min(LEAST_STEPS, options.steps)
    cases = [(day, r, options.tokens, max(least, options.steps * first // r), periods) for r in options.ep]
    if not options.quick:
        cases.append((limited, first, options.tokens, -(-options.steps // 2), [OTHER_PERIOD]))
        others = [tokens for tokens in OTHER_TOKENS if tokens != options.tokens]
        cases += [(day, first, tokens, least, [OTHER_PERIOD]) for tokens in others]
    outcomes = []
    with progress("days", len(cases)) as work:
        for case in cases:
            outcomes += simulate(*case, work.begin)
            work.advance()
    return Report(outcomes, [], _settings(options, day), machine(), versions())


def page(arguments: Sequence[str]) -> None:
    """Writes docs/benchmarks-balance.md and its figures from the last run's file."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.balance page", description=page.__doc__)
    options.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder that the run wrote to")
    options.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the page")
    chosen = options.parse_args(arguments)
    pages.write(chosen.out, chosen.docs)
    Console().print(f"wrote {chosen.docs / pages.NAME}", highlight=False)


def _parser() -> argparse.ArgumentParser:
    options = parser("A day of routing that drifts: policies of placement, simulated and by processes.")
    options.add_argument(
        "--ep", type=at_least(16, 256), nargs="+", default=[16, 32, 64, 128, 256], help="ranks, simulated"
    )
    options.add_argument(
        "--periods", type=at_least(1), nargs="+", default=[100, 1_000, 10_000], help="steps of a placement"
    )
    options.add_argument("--tokens", type=at_least(1, 512), default=256, help="per rank, simulated")
    options.add_argument(
        "--skew",
        type=more_than(1),
        default=2.0,
        help=f"most rows over mean without replicas, EP {SKEW_RANKS}",
    )
    options.add_argument(
        "--steps", type=at_least(1), default=100, help="of the day that are looked at, EP 16"
    )
    options.add_argument("--processes", type=at_least(2), nargs="*", default=[2, 4], help="ranks, measured")
    options.add_argument(
        "--processes-only", action="store_true", help="measure anew, beside the last run's simulation"
    )
    options.add_argument("--rounds", type=at_least(1), help="of processes")
    options.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for JSON and plots")
    options.add_argument("--quick", action="store_true", help="little of everything: whether it runs")
    return options


def _make_quick(options: argparse.Namespace) -> None:
    options.ep, options.periods, options.tokens, options.steps = [16], [10_000], 16, 4
    options.processes, options.rounds = [2], 1


def _setting(ranks: int, options: argparse.Namespace) -> processes.Setting:
    rounds = options.rounds or ROUNDS_BY_RANKS.get(ranks, min(ROUNDS_BY_RANKS.values()))
    setting = processes.Setting(ranks=ranks, rounds=rounds)
    return replace(setting, tokens=16, intermediate=64) if options.quick else setting


def _settings(options: argparse.Namespace, day: Day) -> dict[str, Any]:
    kept = {name: getattr(options, name) for name in ("ep", "periods", "tokens", "skew", "steps")}
    of_day = {name: value for name, value in asdict(day).items() if not name.startswith("_")}
    return {**kept, "day": of_day}


COMMANDS = {"run": run, "page": page}


def main(arguments: Sequence[str]) -> None:
    """Without a command's name, simulate and measure."""
    name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    COMMANDS[name or "run"](arguments[bool(name) :])
