"""The commands behind ``python -m benchmarks.serving``."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.compare.cases import ROOT
from benchmarks.compare.commands import NO_MPI_NEEDED
from benchmarks.compare.launch import BenchmarkError, Mpi
from benchmarks.harness import SHARED_NOTE, at_least, more_than, parser, write_records
from benchmarks.reports import machine, versions
from benchmarks.serving import memory, peers, plots, rounds
from benchmarks.serving import page as pages
from benchmarks.serving.report import Report, merged, tables
from benchmarks.serving.sizes import HIDDEN, ROUND_TOKENS, TOKENS
from moe_triton.core.installing import install
from moe_triton.tools.plots import write_plots
from moe_triton.tools.progress import progress

DEFAULT_OUT = ROOT / "build" / "serving"
PARTS = ("rounds", "peers", "memory")
ROWS = {"bf16": "", "int8": "int8"}
MEMORY_TOKENS = 8
"""Times as many as a prefill has."""


def run(arguments: Sequence[str]) -> None:
    """Measures, and leaves JSON, a plot and tables."""
    options = _parser().parse_args(arguments)
    if options.quick:
        _make_quick(options)
    path, console = options.out / pages.RUN, Console()
    report = _measured(options)
    if set(options.only) != set(PARTS) and path.exists():
        report = merged(Report.load(path), report)
    report.save(path)
    write_records(options.json, report.records())
    for table in tables(report):
        table.print(console)
        console.print()
    for line in report.absences():
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(SHARED_NOTE, soft_wrap=True, highlight=False)
    if importlib.util.find_spec("matplotlib") is None:
        console.print(f"plots: absent: matplotlib is not installed: {install('bench')}")
        return
    write_plots(console, lambda: plots.plot(report, options.out))


def page(arguments: Sequence[str]) -> None:
    """Writes docs/benchmarks-serving.md and its figures from the last run's file."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.serving page", description=page.__doc__)
    options.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder that the run wrote to")
    options.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the page")
    chosen = options.parse_args(arguments)
    pages.write(chosen.out, chosen.docs)
    Console().print(f"wrote {chosen.docs / pages.NAME}", highlight=False)


def _measured(options: argparse.Namespace) -> Report:
    sizes = {"tokens": options.tokens, "round_tokens": options.round_tokens, "hidden": options.hidden}
    report, mpi = Report(), NO_MPI_NEEDED
    settings = _round_settings(options) if "rounds" in options.only else []
    ranks = options.ranks if "peers" in options.only else []
    with progress("parts", len(settings) + len(ranks) + ("memory" in options.only)) as work:
        for setting in settings:
            work.begin(f"rounds: {setting.ranks} ranks, {setting.rows or 'bf16'}")
            report.rounds.append(rounds.run(setting))
            work.advance()
        for number in ranks:
            if mpi is NO_MPI_NEEDED and not options.without_mpi:
                mpi = Mpi.find()
            work.begin(f"peers: {number} ranks")
            kinds = tuple(ROWS[name] for name in options.rows)
            asked = peers.Setting(number, kinds, options.seconds, options.peer_iterations, **sizes)
            try:
                report.samples.extend(peers.run(asked, mpi, work.begin))
            except BenchmarkError as error:
                raise SystemExit(f"{number} ranks: {error}") from error
            work.advance()
        if "memory" in options.only:
            work.begin("memory")
            most = sizes | {"tokens": MEMORY_TOKENS * options.tokens}
            report = replace(report, memory=memory.run(memory.Setting(min(options.ranks), **most)))
            work.advance()
    return replace(report, settings=sizes, machine=machine(), versions=versions(mpi.version))


def _round_settings(options: argparse.Namespace) -> list[rounds.Setting]:
    """Every number of ranks and kind of rows; links where ranks have cores of their own."""
    fewest, found = min(options.ranks), []
    for ranks in options.ranks:
        links = rounds.LINKS if ranks == fewest and not options.quick else rounds.LINKS[:1]
        for name in options.rows:
            setting = rounds.Setting(
                ranks,
                ROWS[name],
                options.iterations,
                options.tokens,
                options.round_tokens,
                options.hidden,
                links,
                options.real_time and ranks == fewest,
            )
            found.append(setting)
    return found


def _parser() -> argparse.ArgumentParser:
    options = parser(
        "A prefill in one call: against its rounds by hand, gloo, Open MPI, memcpy; and its memory."
    )
    options.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    options.add_argument("--ranks", type=at_least(2, 64), nargs="+", default=[2, 4])
    options.add_argument(
        "--rows", nargs="+", choices=ROWS, default=list(ROWS), help="how they are dispatched"
    )
    options.add_argument("--tokens", type=at_least(1), default=TOKENS, help="per rank")
    options.add_argument("--round-tokens", type=at_least(1), default=ROUND_TOKENS, help="of a rank")
    options.add_argument("--hidden", type=at_least(32), default=HIDDEN)
    options.add_argument("--iterations", type=at_least(1), default=20, help="of rounds, for each link")
    options.add_argument("--seconds", type=more_than(0), default=30.0, help="of peers, for each case, about")
    options.add_argument("--peer-iterations", type=at_least(1), help="instead of as many as fit --seconds")
    options.add_argument("--without-mpi", action="store_true", help="leave Open MPI's routes out")
    options.add_argument(
        "--real-time",
        action="store_true",
        help="rounds of the fewest ranks before other processes on the same cores; needs the right to",
    )
    options.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for JSON and the plot")
    options.add_argument("--quick", action="store_true", help="little of everything: whether it runs")
    return options


def _make_quick(options: argparse.Namespace) -> None:
    options.ranks, options.tokens, options.round_tokens, options.hidden = [2], 40, 16, 512
    options.iterations, options.peer_iterations, options.without_mpi = 1, 1, True


COMMANDS = {"run": run, "page": page}


def main(arguments: Sequence[str]) -> None:
    """Without a command's name, measure."""
    name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    COMMANDS[name or "run"](arguments[bool(name) :])
