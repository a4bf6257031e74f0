"""Timing and records shared by all benchmarks."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from rich.console import Console

from moe_triton.tools.cli.errors import errors_shown
from moe_triton.tools.text_table import TextTable, names, numbers

MAX_RANKS = 256  # processes that a benchmark starts at most


class Record(TypedDict):
    """One figure."""

    benchmark: str
    case: dict[str, object]
    metric: str
    value: float
    unit: str


def records_of(
    benchmark: str, case: Mapping[str, object], figures: Mapping[str, float], unit: str = ""
) -> list[Record]:
    """Figures of one case.

    Args:
        benchmark: its name.
        case: what they are of.
        figures: by metric.
        unit: of all of them; if none is given, us where a metric's name says so, and else a ratio.
    """
    return [
        Record(
            benchmark=benchmark,
            case=dict(case),
            metric=metric,
            value=value,
            unit=unit or ("us" if "us" in metric.split("_") else "ratio"),
        )
        for metric, value in figures.items()
    ]


def interleave(
    routes: Mapping[str, Callable[[], object]],
    iterations: int,
    warm_up: int = 3,
    between: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each route, called in turn so that all see the same state of the machine.

    Args:
        between: called before each timed call, outside the time taken.
    """
    for _ in range(warm_up):
        for call in routes.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in routes}
    for _ in range(iterations):
        for name, call in routes.items():
            if between is not None:
                between()
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, so that torch's temporaries do not fault their pages in every time.

    Without this the baselines, not we, pay for the kernel's zeroing of fresh pages: a factor of three.
    """
    libc = ctypes.CDLL(None)
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # of glibc's malloc.h
    libc.mallopt(mmap_threshold, 32 << 20)
    libc.mallopt(trim_threshold, 1 << 30)
    libc.mallopt(top_pad, 64 << 20)


def elapsed(per_rank: Iterable[Sequence[tuple[float, float]]]) -> list[float]:
    """Last rank out minus first rank in, per iteration, of when each rank went in and came out."""
    rounds = zip(*per_rank, strict=True)
    return [max(end for _, end in spans) - min(begin for begin, _ in spans) for spans in rounds]


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median over the rounds of an interleaved run of one route's time to another's."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the order statistics that hold it with 95 %: by the normal approximation of ranks."""
    ordered, n = sorted(values), len(values)
    reach = 0.98 * n**0.5  # 1.96 / 2
    low, high = max(0, round(n / 2 - reach)), min(n - 1, round(n / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


def write_records(path: Path | None, records: Sequence[Record]) -> None:
    """Write records as JSON, where a path was asked for."""
    if path is not None:
        path.write_text(json.dumps(list(records), indent=1) + "\n")


def parser(description: str) -> argparse.ArgumentParser:
    """A command line with the options that all benchmarks take."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--json", type=Path, help="write the records to this file")
    return arguments


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows of text under a title: a name, and numbers."""
    first, *others = columns
    TextTable((names(first), *map(numbers, others)), rows, title).print(Console())


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option that is an integer of this range."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            above = "" if most is None else f", and {most} at most"
            raise argparse.ArgumentTypeError(f"{value}: at least {least}{above}")
        return value

    return integer


def more_than(least: float) -> Callable[[str], float]:
    """The type of an option that is a number above this one."""

    def number(text: str) -> float:
        value = float(text)
        if not least < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: more than {least:g}")
        return value

    return number


def run_main(main: Callable[[], None]) -> None:
    """Runs a benchmark; what it, or a rank, cannot do is said without a traceback."""
    with errors_shown():
        main()
