"""The commands behind ``python -m benchmarks.compare``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.compare import page as pages
from benchmarks.compare import plots
from benchmarks.compare.cases import DEFAULT_OUT, ROOT, ROUTES, Job, Sample, from_message
from benchmarks.compare.figures import (
    SCALED,
    SWEEPS,
    Samples,
    SweepKind,
    records,
    scaling_records,
    scaling_table,
    share_records,
)
from benchmarks.compare.launch import MPI_OPTIONS, BenchmarkError, Message, Mpi, run_job
from benchmarks.compare.report import Files, Report, print_absences, print_report
from benchmarks.harness import SHARED_NOTE, at_least, cores, more_than, parser
from benchmarks.sizes import EXPERTS
from moe_triton.core.installing import install
from moe_triton.core.row_formats import QUANTIZED
from moe_triton.tools.progress import progress

CASE_SECONDS, SWEEP_SECONDS = 10.0, 40.0
NO_MPI_NEEDED = Mpi(None, "not asked for")
# What every route knows: those of others have a scale for each row.
FORMATS = ["none", *(name for name, row_format in QUANTIZED.items() if row_format.elements_per_scale is None)]


def run(arguments: Sequence[str]) -> None:
    """Measures every case and leaves CSV, JSON, plots and tables."""
    options = _run_parser().parse_args(arguments)
    wants_mpi = any(route.startswith("mpi_") for route in options.routes)
    mpi = Mpi.find() if wants_mpi else NO_MPI_NEEDED
    jobs = [
        _job("compare", ranks, options.tokens, options, options.routes, options.seconds)
        for ranks in options.ranks
    ]
    samples: list[Sample] = []
    started = time.monotonic()
    try:
        _measure(jobs, mpi, samples)
    finally:  # what was measured before a failure is kept
        measured = Samples(samples)
        settings = {**_settings(options, started), "mpirun": " ".join(MPI_OPTIONS) if mpi.mpirun else ""}
        figures = [*records(measured), *share_records(measured, cores())]
        report = Report.of(figures, measured, settings, mpi.version)
        Files(options.out).save(samples, report)
        if options.json:
            report.save(options.json)
    print_report(measured, Console())
    _plot(lambda: plots.plot_comparison(measured, options.out), options.out)


def scaling(arguments: Sequence[str]) -> None:
    """Varies batch size and number of ranks, all sizes interleaved."""
    options = _scaling_parser().parse_args(arguments)
    jobs: dict[SweepKind, Job] = {
        "tokens": _job("tokens", 2, options.tokens, options, SCALED, options.seconds),
        "ranks": _job("ranks", options.ranks, [options.tokens_of_ranks], options, SCALED, options.seconds),
    }
    samples_by_kind: dict[SweepKind, Samples] = {}
    every = []
    for kind in SWEEPS:
        samples: list[Sample] = []
        started = time.monotonic()
        _measure([jobs[kind]], NO_MPI_NEEDED, samples)
        samples_by_kind[kind] = Samples(samples)
        figures = scaling_records(kind, samples_by_kind[kind])
        every += figures
        report = Report.of(figures, samples_by_kind[kind], _settings(options, started))
        Files(options.out, f"scaling_{kind}").save(samples, report)
        scaling_table(kind, samples_by_kind[kind]).print(Console())
        Console().print(SHARED_NOTE, soft_wrap=True)
        print_absences(samples_by_kind[kind], Console())
    if options.json:
        Report.of(every, samples_by_kind["tokens"], _settings(options, started)).save(options.json)
    _plot(lambda: plots.plot_scaling(samples_by_kind, options.out), options.out)


def page(arguments: Sequence[str]) -> None:
    """Writes docs/benchmarks.md and its figures from the last runs' files."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.compare page", description=page.__doc__)
    options.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder that the runs wrote to")
    options.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the page")
    chosen = options.parse_args(arguments)
    pages.write(chosen.out, chosen.docs)
    Console().print(f"wrote {chosen.docs / pages.NAME}", highlight=False)


def _run_parser() -> argparse.ArgumentParser:
    options = _parser("Our routes against gloo, Open MPI and memcpy, interleaved.", CASE_SECONDS)
    options.add_argument("--ranks", type=_ranks, nargs="+", default=[2, 4, 8])
    options.add_argument("--tokens", type=at_least(1), nargs="+", default=[16, 64, 256], help="per rank")
    options.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES), metavar="ROUTE",
                         help=f"of {', '.join(ROUTES)}")  # fmt: skip
    _add_quantize(options, FORMATS)
    return options


def _scaling_parser() -> argparse.ArgumentParser:
    options = _parser("Time per byte over batch sizes and numbers of ranks.", SWEEP_SECONDS)
    tokens = [64, 128, 256, 512, 1024]
    options.add_argument(
        "--tokens", type=at_least(1), nargs="+", default=tokens, help="per rank, of two ranks"
    )
    options.add_argument("--ranks", type=_ranks, default=16, help="most; powers of two from 2 on")
    options.add_argument("--tokens-of-ranks", type=at_least(1), default=64, help="per rank, over the ranks")
    _add_quantize(options, ["none"])
    return options


def _parser(description: str, seconds: float) -> argparse.ArgumentParser:
    options = parser(description)
    options.add_argument(
        "--iterations", type=at_least(1), help="per case, instead of as many as fit --seconds"
    )
    options.add_argument("--seconds", type=more_than(0), default=seconds, help="to measure a case for, about")
    options.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for CSV, JSON and plots")
    options.add_argument(
        "--default-malloc", action="store_true", help="let malloc give freed memory back, at the peers' cost"
    )
    return options


def _add_quantize(options: argparse.ArgumentParser, default: list[str]) -> None:
    options.add_argument(
        "--quantize",
        nargs="+",
        choices=FORMATS,
        default=default,
        help="how rows are dispatched; none: as bf16",
    )
    options.add_argument(
        "--both", dest="quantize", action="store_const", const=FORMATS, help="one after the other"
    )


def _ranks(text: str) -> int:
    ranks = int(text)
    if ranks < 2 or EXPERTS % ranks:
        raise argparse.ArgumentTypeError(f"{ranks}: at least 2, and a divisor of {EXPERTS} experts")
    return ranks


def _job(kind: Any, ranks: int, tokens: Sequence[int], options: Any, routes: Any, seconds: float) -> Job:
    chosen = tuple(tokens), tuple("" if name == "none" else name for name in options.quantize), tuple(routes)
    memory = not options.default_malloc
    return Job(kind, ranks, *chosen, options.iterations, seconds, results="", keeps_memory=memory)


def _settings(options: argparse.Namespace, started: float) -> dict[str, Any]:
    kept = ("ranks", "tokens", "quantize", "iterations", "seconds", "default_malloc")
    return {name: getattr(options, name) for name in kept} | {"took_s": round(time.monotonic() - started)}


def _measure(jobs: Sequence[Job], mpi: Mpi, samples: list[Sample]) -> None:
    """Runs jobs one after the other, says how far they are, and appends what they measured."""
    with progress("cases", sum(job.num_cases for job in jobs)) as work:
        case = ""

        def hear(message: Message) -> None:
            nonlocal case
            if message["kind"] == "start":
                case = message["case"]
                work.begin(case)
            elif message["kind"] == "iteration":
                work.begin(f"{case}: iteration {message['done']} of {message['total']}")
            else:
                samples.extend(from_message(message["samples"]))
                work.advance()

        for job in jobs:
            work.begin(f"starting {job.ranks} ranks")
            try:
                run_job(job, mpi, hear)
            except BenchmarkError as error:
                raise SystemExit(f"{job.ranks} ranks: {error}") from error


def _plot(draw: Any, folder: Path) -> None:
    if not plots.is_available():
        Console().print(f"plots: absent: matplotlib is not installed: {install('bench')}")
        return
    names = ", ".join(path.name for path in draw())
    Console().print(f"{folder}: CSV, JSON, {names}", highlight=False)


COMMANDS = {"run": run, "scaling": scaling, "page": page}


def main(arguments: Sequence[str]) -> None:
    """Without a command's name, measure."""
    name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    COMMANDS[name or "run"](arguments[bool(name) :])
