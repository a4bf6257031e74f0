"""Timing and records shared by all benchmarks."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch
from rich.console import Console

from moe_triton.core.cpu_caches import data_caches
from moe_triton.tools.cli.errors import errors_shown
from moe_triton.tools.text_table import TextTable, names, numbers

MAX_RANKS = 256  # processes that a benchmark starts at most
# What the last cache is taken to hold where nobody says.
ASSUMED_CACHE_BYTES = 96 << 20
# A rank that waited so much of a run for a core has shared it: other work was timed too.
SHARED_FROM = 0.05
# Of a call that loses its core while it is timed.
TRIES = 3


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


class Times(NamedTuple):
    """Seconds of a route's calls, and whether it shared its core in most of them."""

    seconds: list[float]
    is_shared: bool


def interleave(
    routes: Mapping[str, Callable[[], object]],
    iterations: int,
    before: Callable[[Callable[[], object]], object],
    warm_up: int = 3,
) -> dict[str, Times]:
    """Times of each route, called in turn so that all see the same state of the machine.

    Args:
        before: called with a route before each of its timed calls, outside the time taken: `warm`, or an
            `Eviction`.
    """
    for _ in range(warm_up):
        for call in routes.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in routes}
    num_shared = dict.fromkeys(routes, 0)
    for _ in range(iterations):
        for name, call in routes.items():
            took, is_shared = _timed(call, before)
            seconds[name].append(took)
            num_shared[name] += is_shared
    return {name: Times(of, 2 * num_shared[name] > iterations) for name, of in seconds.items()}


def _timed(
    call: Callable[[], object], before: Callable[[Callable[[], object]], object]
) -> tuple[float, bool]:
    """Seconds of a call, and whether others had its core meanwhile even in the last of some tries."""
    for _ in range(TRIES):
        before(call)
        preempted = _preemptions()
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        if _preemptions() == preempted:
            return took, False
    return took, True


def _preemptions() -> int:
    """How often this thread has lost its core while it wanted to run."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def warm(call: Callable[[], object]) -> None:
    """Has a call find in the caches what fits there: the same call has just run."""
    call()


def cache_bytes() -> int:
    """What the largest cache holds that a core of this machine uses."""
    return max(data_caches().values(), default=ASSUMED_CACHE_BYTES)


def read_text(path: Path) -> str:
    """What a small file says, without the white space around it; "" where there is no such file."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


class Eviction:
    """Empties the caches: reads more than the largest of them holds, so that nothing else stays in any.

    Args:
        num_ranks: processes that do so at the same time, each of which reads its share.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        # A quarter more than it holds, since caches do not give up exactly what is oldest; nor is any rank's
        # share less than twice the second level, which each core has of its own.
        share = cache_bytes() * 5 // 4 // num_ranks
        own = 2 * data_caches().get(2, 0)
        # Written once: all pages of zeros that nobody has written are one page, which stays in the caches.
        self._memory = torch.ones(max(share, own) // 8, dtype=torch.int64)

    def __call__(self, _: object = None) -> None:
        """Whatever ran before is out of the caches."""
        self._memory.sum()
        os.sched_yield()  # before it is timed, and not in the middle, since so much work uses up a turn


def waited_s() -> float:
    """Seconds that this thread has waited for a core that others had; 0 where Linux does not count them."""
    counts = read_text(Path("/proc/thread-self/schedstat")).split()
    return int(counts[1]) / 1e9 if len(counts) > 1 else 0.0


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def marked(text: str, is_shared: bool) -> str:
    """A figure as a table shows it: in parentheses if a core was shared, for then it is none."""
    return f"({text})" if is_shared else text


SHARED_NOTE = (
    "In parentheses: cores were shared, as ranks were more than they, or as other work had one during most "
    "runs; such a figure tells of the machine and not of the code."
)


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


def with_interval(metric: str, values: Sequence[float]) -> dict[str, float]:
    """A metric's median, and its 95 % interval as ``_low`` and ``_high``."""
    ends = ("", "_low", "_high")
    return {metric + end: value for end, value in zip(ends, median_with_interval(values), strict=True)}


def interval_text(figures: Mapping[str, float], metric: str, digits: int = 2) -> str:
    """The interval of a metric of `with_interval`, for a table."""
    return f"{figures[f'{metric}_low']:.{digits}f} - {figures[f'{metric}_high']:.{digits}f}"


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
