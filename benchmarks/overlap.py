"""Parts whose streams overlap against the same parts in series, over a link as slow as the local work.

``python -m benchmarks.overlap [--rows int8 plain] [--json FILE] [--trace FOLDER] [--real-time]``. Each rank
is pinned to one core and sends over a paced link (`moe_triton.backends.cpu.paced_link`). Its rate is set so
that the bytes of an operator take longer than the core needs to copy them by the time of all its other work,
as measured in series without a link: so long the sender sleeps. A time is the last rank out minus the first
rank in, of each operator on its own, routes interleaved. Ratios stand with the 95 % interval of their median.

What the schedule runs beside communication: in combine sums, and quantising where results go as int8; in
dispatch arranging what has come, or with ``fullmesh_v2``, which does that where it waits, quantising. How
much of it is hidden is from the traces: time in which such a launch and one that communicates both ran, of
all that such launches took. What fits is that work as in series, without what comes before all sending or
after it, and no more than the sender sleeps: the best ratio that there can be is that of a call shorter by
it. What is gained of it is from the times of calls, so that it counts what sharing a core costs.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.operators import Inputs
from benchmarks.sizes import EXPERTS, HIDDEN, SIZES, TOPK
from benchmarks.spans import Span, calls_of, merged, overlap_us, spans_named
from moe_triton import EPBuffer, Tuning
from moe_triton.backends.cpu.paced_link import PacedLink, paced
from moe_triton.processes import RankGroup
from moe_triton.schemes import SCHEMES, class_at
from moe_triton.schemes.fullmesh.scheme import Fullmesh
from moe_triton.starting_line import StartingLine
from moe_triton.tools.progress import progress

PRODUCT = "A3"
Operator = Literal["dispatch", "combine"]
OPERATORS: tuple[Operator, ...] = ("dispatch", "combine")
# Work that is cut into parts, and the launches of the other stream that it may run beside.
ARRANGE, SUM, PACK = ("arrange",), ("sum",), ("route + pack", "pack")
QUANTIZE_AND_SUM = ("quantize", "sum")
COMMUNICATION = ("send", "wait", "rows")
SERIES, AGAIN, OVERLAPPED, ONE_PART = "series", "again", "overlapped", "one part"
ROUTES = (SERIES, AGAIN, OVERLAPPED, ONE_PART)
WARM_UP, CALIBRATION = 3, 10
FAST = 10_000.0  # GB/s
BUCKET_SHARE = 0.018  # of a call's bytes


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    tokens: int
    parts: int
    comm_alg: str
    rows: str
    latency_us: float
    wire: float
    iterations: int
    real_time: bool = False

    def local(self, operator: Operator) -> tuple[str, ...]:
        """Launches of work that is cut into parts; none where nothing is."""
        if operator == "combine":
            return QUANTIZE_AND_SUM if self.rows == "int8" else SUM
        if self.arranges_where_it_waits:
            return PACK if self.rows == "int8" else ()
        return ARRANGE

    @property
    def arranges_where_it_waits(self) -> bool:
        """Whether a dispatch has no launch that arranges: a row is received with its own flags."""
        default, *_ = SCHEMES[PRODUCT].values()  # of names that are left to `EPBuffer`, as ""
        scheme = class_at(SCHEMES[PRODUCT].get(self.comm_alg, default))
        return issubclass(scheme, Fullmesh) and scheme.inband


@dataclass(frozen=True)
class Load:
    """What an operator is on its own, in series without a link. Means of the ranks.

    Attributes:
        copying_us: that sending takes of the core.
        local_us: that all else takes of it.
        sent: bytes to other ranks.
    """

    copying_us: float
    local_us: float
    sent: float

    def gigabytes_per_s(self, wire: float) -> float:
        """GB/s of a link that has the sender sleep for ``wire`` times the local work."""
        return self.sent / (self.copying_us + wire * self.local_us) / 1e3


@dataclass(frozen=True)
class Measured:
    """One rank's figures: loads by operator, and begin and end of each call by operator and route."""

    loads: dict[Operator, Load]
    spans: dict[Operator, dict[str, list[Span]]]


class Pair:
    """Dispatch and combine on one buffer.

    Args:
        inputs: of this rank.
        setting: what is measured.
        route: one of `ROUTES`.
        path: of the trace.
    """

    def __init__(self, inputs: Inputs, setting: Setting, route: str, path: str) -> None:
        each = setting.tokens if route == ONE_PART else -(-setting.tokens // setting.parts)
        self._inputs = inputs
        self._quantize: Literal["int8"] | None = "int8" if setting.rows == "int8" else None
        self._received: Any = None
        self._results: torch.Tensor | None = None
        self.buffer = EPBuffer(
            num_max_tokens_per_rank=setting.tokens,
            **SIZES,
            comm_alg=setting.comm_alg,
            num_blocks=2,
            tuning=Tuning(each, each, communication_blocks=1),
            trace=path,
        )

    def walk_in_turn(self) -> None:
        """Plans that there are already run the same launches one after the other from now on."""
        executables = self.buffer._communicator._executables
        for key in list(executables.keys()):
            executable: Any = executables.operator(*key)  # type: ignore[arg-type]
            executable._struct.overlap = 0

    def run(self, operator: Operator) -> None:
        """One call. A combine needs the dispatch before it."""
        if operator == "dispatch":
            self._received = self.buffer.dispatch(self._inputs.x, self._inputs.ids, quantize=self._quantize)
        else:
            rows = self._received.tokens
            if self._results is None:
                self._results = torch.randn(rows.shape).bfloat16()
            handle, weights = self._received.handle, self._inputs.weights
            self.buffer.combine(self._results, handle, weights, comm_quantize=self._quantize)


def median_of_ranks(values: Sequence[float]) -> float:
    """The mean of the ranks' medians. Collective."""
    total = torch.tensor([statistics.median(values)], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def calibrated(pair: Pair, link: PacedLink, line: StartingLine) -> dict[Operator, Load]:
    """What the operators of a pair are. Collective."""
    samples: dict[Operator, list[tuple[float, float, float]]] = {operator: [] for operator in OPERATORS}
    for _ in range(CALIBRATION):
        for operator in OPERATORS:
            line.wait()
            core, before = time.process_time(), link.taken_bytes
            pair.run(operator)
            core_us = 1e6 * (time.process_time() - core)
            steps = pair.buffer.durations_us(operator)
            waiting = sum(us for step, us in steps.items() if step in ("wait", "rows"))
            sending = steps["send"] / (sum(steps.values()) - waiting)
            samples[operator].append((sending * core_us, (1 - sending) * core_us, link.taken_bytes - before))
    return {
        operator: Load(*map(median_of_ranks, zip(*rows, strict=True))) for operator, rows in samples.items()
    }


def keep_others_out() -> None:
    """Threads of this process run before those of all usual processes, in the same order among themselves.

    Raises:
        PermissionError: this user may not.
    """
    for thread in (int(task.name) for task in Path("/proc/self/task").iterdir()):
        is_idle = os.sched_getscheduler(thread) == os.SCHED_IDLE
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(1 if is_idle else 2))


def measure(rank: int, num_ranks: int, setting: Setting, folder: str) -> Measured:
    """Every route on this rank."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    usual = os.sched_getscheduler(0), os.sched_getparam(0)
    inputs = Inputs.random(rank, setting.tokens, TOPK, EXPERTS)
    line, shuffle = StartingLine(), random.Random(0)  # the same on every rank
    spans: dict[Operator, dict[str, list[Span]]] = {o: {r: [] for r in ROUTES} for o in OPERATORS}
    with ExitStack() as stack:
        link = stack.enter_context(paced(PacedLink(FAST)))
        pairs = {r: Pair(inputs, setting, r, str(Path(folder) / f"{r}.json")) for r in ROUTES if r != AGAIN}
        for pair in pairs.values():
            stack.enter_context(pair.buffer)
        for _ in range(WARM_UP):  # makes all plans: one for each zone
            for pair in pairs.values():
                pair.run("dispatch")
                pair.run("combine")
        pairs[SERIES].walk_in_turn()
        pairs[ONE_PART].walk_in_turn()
        pairs[AGAIN] = pairs[SERIES]
        if setting.real_time:
            keep_others_out()
        loads = calibrated(pairs[SERIES], link, line)
        for iteration in range(WARM_UP + setting.iterations):
            for route in shuffle.sample(ROUTES, len(ROUTES)):
                for operator in OPERATORS:
                    load = loads[operator]
                    bucket = int(BUCKET_SHARE * load.sent)
                    link.set(load.gigabytes_per_s(setting.wire), setting.latency_us, bucket)
                    line.wait()
                    begin = time.perf_counter()
                    pairs[route].run(operator)
                    if iteration >= WARM_UP:
                        spans[operator][route].append((begin, time.perf_counter()))
    os.sched_setscheduler(0, *usual)
    os.sched_setaffinity(0, cores)
    return Measured(loads, spans)


def hidden(
    path: Path, operator: Operator, local_steps: Sequence[str], iterations: int
) -> tuple[float, float, float]:
    """Mean microseconds per call of local work, of what is hidden of it, and of what nothing can hide.

    Calls are the last ones in a trace. Nothing can hide the first launch if it comes before all
    communication, or the last if it comes after it.
    """
    totals = []
    calls = calls_of(path, operator, iterations).values()
    for events in itertools.chain.from_iterable(ranks.values() for ranks in calls):
        local = merged(spans_named(events, *local_steps))
        beside = spans_named(events, *COMMUNICATION)
        first, end = min(begin for begin, _ in beside), max(end for _, end in beside)
        alone = [span for span in local[:1] if span[1] <= first] + [
            span for span in local[-1:] if span[0] >= end
        ]
        totals.append(
            (
                sum(end - begin for begin, end in local),
                sum(overlap_us(span, beside) for span in local),
                sum(end - begin for begin, end in alone),
            )
        )
    work, covered, alone_us = (statistics.mean(column) for column in zip(*totals, strict=True))
    return work, covered, alone_us


def seconds(per_rank: Sequence[Measured], operator: Operator, route: str) -> list[float]:
    """Last rank out minus first rank in, per iteration."""
    return harness.elapsed(measured.spans[operator][route] for measured in per_rank)


def report(setting: Setting, per_rank: Sequence[Measured], folder: Path) -> list[harness.Record]:
    """Prints the tables and returns their figures."""
    records: list[harness.Record] = []
    for operator in (o for o in OPERATORS if setting.local(o)):
        load = per_rank[0].loads[operator]
        case: dict[str, object] = {"operator": operator, "ranks": len(per_rank), "tokens": setting.tokens}
        case |= {"parts": setting.parts, "comm_alg": setting.comm_alg, "wire_per_local": setting.wire}
        case["rows"] = setting.rows
        rows = []
        for route in ROUTES:
            cells, figures = _row(setting, per_rank, folder, operator, route)
            rows.append([route, *cells])
            records += harness.records_of("overlap", {**case, "route": route}, figures)
        print(
            f"\n{operator}, {setting.rows}, {setting.comm_alg}, EP {len(per_rank)}, BS {setting.tokens}, "
            f"H {HIDDEN}, K {TOPK}, {setting.parts} parts: copying {load.copying_us:.0f} us, "
            f"local work {load.local_us:.0f} us, "
            f"{load.sent / 1e6:.2f} MB at {load.gigabytes_per_s(setting.wire):.2f} GB/s"
        )
        work = " + ".join(setting.local(operator))
        harness.print_table("", ["route", "us", "of series", "95 %", work, "hidden", "best", "gained"], rows)
    return records


def _row(
    setting: Setting, per_rank: Sequence[Measured], folder: Path, operator: Operator, route: str
) -> tuple[list[str], dict[str, float]]:
    """A route's cells of the table, and its figures."""
    times, series = (seconds(per_rank, operator, name) for name in (route, SERIES))
    ratio, low, high = harness.median_with_interval([a / b for a, b in zip(times, series, strict=True)])
    figures = {"time_vs_series": ratio, "time_vs_series_low": low, "time_vs_series_high": high}
    cells = [f"{statistics.median(times) * 1e6:.0f}", f"{ratio:.3f}", f"{low:.2f} - {high:.2f}"]
    if route == AGAIN:
        return [*cells, *[""] * 4], figures
    given = setting.local(operator), setting.iterations
    work, covered, _ = hidden(folder / f"{route}.json", operator, *given)
    cells += [f"{work:.0f}", f"{covered / work:.0%}"]
    figures["hidden_of_work"] = covered / work
    if route != OVERLAPPED:
        return [*cells, "", ""], figures
    work, _, alone = hidden(folder / f"{SERIES}.json", operator, *given)
    fits = min(work - alone, setting.wire * per_rank[0].loads[operator].local_us) / 1e6
    gained = statistics.median(b - a for a, b in zip(times, series, strict=True))
    figures["best_vs_series"] = 1 - fits / statistics.median(series)
    figures["gained_of_what_fits"] = gained / fits
    return [*cells, f"{figures['best_vs_series']:.3f}", f"{gained / fits:.0%}"], figures


def main() -> None:
    """Measure every scheme and print its table."""
    arguments = harness.parser("Overlapped parts against the same parts in series, over a paced link.")
    arguments.add_argument("--iterations", type=harness.at_least(1), default=60)
    arguments.add_argument(
        "--ranks",
        type=harness.at_least(1, harness.MAX_RANKS),
        default=2,
        help="no more than cores, to have one each",
    )
    arguments.add_argument(
        "--tokens", type=harness.at_least(1), default=512, help="per rank; with few, naps are short"
    )
    arguments.add_argument("--parts", type=harness.at_least(1), default=4)
    arguments.add_argument("--comm-alg", nargs="+", default=["fullmesh_v1"])
    arguments.add_argument("--rows", nargs="+", choices=("int8", "plain"), default=["int8", "plain"])
    arguments.add_argument("--latency-us", type=harness.more_than(0), default=5.0)
    arguments.add_argument(
        "--wire", type=harness.more_than(0), default=1.0, help="sleep of senders, of local work"
    )
    arguments.add_argument(
        "--real-time",
        action="store_true",
        help="before other processes on the same cores; needs the right to",
    )
    arguments.add_argument("--trace", type=Path, help="keep the routes' traces in this folder")
    options = arguments.parse_args()
    records = []
    for comm_alg, kind in itertools.product(options.comm_alg, options.rows):
        sizes = options.tokens, options.parts
        setting = Setting(*sizes, comm_alg, kind, options.latency_us, options.wire, options.iterations)
        setting = replace(setting, real_time=options.real_time)
        with tempfile.TemporaryDirectory() as temporary, RankGroup(options.ranks) as group:
            folder = options.trace / comm_alg / kind if options.trace else Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            with progress(f"{comm_alg}, {kind}"):
                per_rank = group.run(measure, setting, str(folder), timeout_s=1200)
            records += report(setting, per_rank, folder)
    harness.write_records(options.json, records)


if __name__ == "__main__":
    harness.run_main(main)
