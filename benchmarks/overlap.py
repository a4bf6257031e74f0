"""Parts whose streams overlap against the same parts in series, over a link as slow as the local work.

``python -m benchmarks.overlap [--json FILE] [--trace FOLDER]``. Each rank is pinned to one core and sends
over a paced link (`moe_triton.backends.cpu.paced_link`). Its rate is set so that the bytes of an operator
take longer than the core needs to copy them by the time of all its other work, as measured in series without
a link: so long the sender sleeps. A time is the last rank out minus the first rank in, of each operator on
its own, routes interleaved. Ratios stand with the 95 % interval of their median.

What the schedule runs beside communication is quantising in dispatch and sums in combine. How much of it is
hidden is from the traces: time in which such a launch and one that communicates both ran, of all that such
launches took. What fits is that work without the part that comes before all sending (dispatch) or after it
(combine), and no more than the sender sleeps.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.harness import Record, parser, print_table, write_records
from benchmarks.operators import EXPERTS, HIDDEN, TOPK, Inputs
from benchmarks.starting_line import StartingLine
from moe_triton import EPBuffer, Tuning
from moe_triton.backends.cpu.paced_link import PacedLink, paced
from moe_triton.processes import RankGroup

Operator = Literal["dispatch", "combine"]
OPERATORS: tuple[Operator, ...] = ("dispatch", "combine")
# Work that is cut into parts, and the launches of the other stream that it may run beside.
LOCAL = {"dispatch": "pack", "combine": "sum"}
COMMUNICATION = {"dispatch": ("send",), "combine": ("send", "wait")}
SERIES, AGAIN, OVERLAPPED, ONE_PART = "series", "again", "overlapped", "one part"
ROUTES = (SERIES, AGAIN, OVERLAPPED, ONE_PART)
WARM_UP, CALIBRATION = 3, 10
FAST = 10_000.0  # GB/s
BUCKET_SHARE = 0.018  # of a call's bytes
Span = tuple[float, float]


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    tokens: int
    parts: int
    comm_alg: str
    latency_us: float
    wire: float
    iterations: int


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
        """Of a link that has the sender sleep for ``wire`` times the local work."""
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
        self._received: Any = None
        self._results: torch.Tensor | None = None
        self.buffer = EPBuffer(
            num_max_tokens_per_rank=setting.tokens,
            hidden=HIDDEN,
            num_topk=TOPK,
            num_experts=EXPERTS,
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
            self._received = self.buffer.dispatch(self._inputs.x, self._inputs.ids, quantize="int8")
        else:
            rows = self._received.tokens
            if self._results is None:
                self._results = torch.randn(rows.shape).bfloat16()
            self.buffer.combine(self._results, self._received.handle, self._inputs.weights)


def median_of_ranks(values: Sequence[float]) -> float:
    """The mean of the ranks' medians. Collective."""
    total = torch.tensor([statistics.median(values)], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def calibrated(pair: Pair, link: PacedLink, line: StartingLine) -> dict[Operator, Load]:
    """What the operators of a pair are. Collective."""
    found: dict[Operator, list[tuple[float, float, float]]] = {operator: [] for operator in OPERATORS}
    for _ in range(CALIBRATION):
        for operator in OPERATORS:
            line.wait()
            core, before = time.process_time(), link.taken_bytes
            pair.run(operator)
            core_us = 1e6 * (time.process_time() - core)
            steps = pair.buffer.durations_us(operator)
            sending = steps["send"] / (sum(steps.values()) - steps["wait"])
            found[operator].append((sending * core_us, (1 - sending) * core_us, link.taken_bytes - before))
    return {
        operator: Load(*map(median_of_ranks, zip(*rows, strict=True))) for operator, rows in found.items()
    }


def measure(rank: int, num_ranks: int, setting: Setting, folder: str) -> Measured:
    """Every route on this rank."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
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
    os.sched_setaffinity(0, cores)
    return Measured(loads, spans)


def overlap_us(span: Span, others: Iterable[Span]) -> float:
    """Of a span, what the union of others covers."""
    covered, at = 0.0, span[0]
    for begin, end in sorted(others):
        begin, end = max(begin, at), min(end, span[1])
        if end > begin:
            covered, at = covered + end - begin, end
    return covered


def hidden(path: Path, operator: Operator, iterations: int) -> tuple[float, float, float]:
    """Of the last calls in a trace: microseconds of local work a call, of it hidden, and of it the part
    that no schedule can hide: dispatch's first, combine's last.
    """
    calls: dict[tuple[int, int], dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for event in json.loads(path.read_text())["traceEvents"]:
        name, _, number = str(event.get("args", {}).get("of", "")).partition(" #")
        if event["ph"] == "X" and name == operator:
            span = event["ts"], event["ts"] + event["dur"]
            calls[event["pid"], int(number)][event["name"]].append(span)
    last = max(number for _, number in calls)
    chosen = [steps for (_, number), steps in calls.items() if number > last - iterations]
    totals = []
    for steps in chosen:
        local = sorted(steps[LOCAL[operator]])
        beside = [span for step in COMMUNICATION[operator] for span in steps[step]]
        alone = local[0 if operator == "dispatch" else -1]
        totals.append(
            (
                sum(end - begin for begin, end in local),
                sum(overlap_us(span, beside) for span in local),
                alone[1] - alone[0],
            )
        )
    work, covered, alone_us = (statistics.mean(column) for column in zip(*totals, strict=True))
    return work, covered, alone_us


def seconds(per_rank: Sequence[Measured], operator: Operator, route: str) -> list[float]:
    """Last rank out minus first rank in, per iteration."""
    rounds = zip(*(measured.spans[operator][route] for measured in per_rank), strict=True)
    return [max(end for _, end in spans) - min(begin for begin, _ in spans) for spans in rounds]


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the order statistics that hold it with 95 %: by the normal approximation of ranks."""
    ordered, n = sorted(values), len(values)
    reach = 0.98 * n**0.5  # 1.96 / 2
    low, high = max(0, round(n / 2 - reach)), min(n - 1, round(n / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


def report(setting: Setting, per_rank: Sequence[Measured], folder: Path) -> list[Record]:
    """Prints the tables and returns their figures."""
    records = []
    for operator in OPERATORS:
        load = per_rank[0].loads[operator]
        case: dict[str, object] = {"operator": operator, "ranks": len(per_rank), "tokens": setting.tokens}
        case |= {"parts": setting.parts, "comm_alg": setting.comm_alg, "wire_per_local": setting.wire}
        rows = []
        for route in ROUTES:
            cells, figures = _row(setting, per_rank, folder, operator, route)
            rows.append([route, *cells])
            for metric, value in figures.items():
                here = {**case, "route": route}
                records.append(
                    Record(benchmark="overlap", case=here, metric=metric, value=value, unit="ratio")
                )
        print(
            f"\n{operator}, {setting.comm_alg}, EP {len(per_rank)}, BS {setting.tokens}, H {HIDDEN}, "
            f"K {TOPK}, {setting.parts} parts: copying {load.copying_us:.0f} us, "
            f"local work {load.local_us:.0f} us, "
            f"{load.sent / 1e6:.2f} MB at {load.gigabytes_per_s(setting.wire):.2f} GB/s"
        )
        columns = ["route", "us", "of series", "95 %", LOCAL[operator], "hidden", "of fits"]
        print_table("", columns, rows)
    return records


def _row(
    setting: Setting, per_rank: Sequence[Measured], folder: Path, operator: Operator, route: str
) -> tuple[list[str], dict[str, float]]:
    """A route's cells of the table, and its figures."""
    times, series = (seconds(per_rank, operator, name) for name in (route, SERIES))
    ratio, low, high = median_with_interval([a / b for a, b in zip(times, series, strict=True)])
    figures = {"time_vs_series": ratio, "time_vs_series_low": low, "time_vs_series_high": high}
    cells = [f"{statistics.median(times) * 1e6:.0f}", f"{ratio:.3f}", f"{low:.2f} - {high:.2f}"]
    if route == AGAIN:
        return [*cells, "", "", ""], figures
    work, covered, alone = hidden(folder / f"{route}.json", operator, setting.iterations)
    fits = min(work - alone, setting.wire * per_rank[0].loads[operator].local_us)
    cells += [f"{work:.0f}", f"{covered / work:.0%}"]
    figures["hidden_of_work"] = covered / work
    if route == ONE_PART:
        return [*cells, ""], figures
    figures["hidden_of_what_fits"] = covered / fits
    return [*cells, f"{covered / fits:.0%}"], figures


def main() -> None:
    """Measure every scheme and print its table."""
    arguments = parser("Overlapped parts against the same parts in series, over a paced link.")
    arguments.add_argument("--iterations", type=int, default=60)
    arguments.add_argument("--ranks", type=int, default=2, help="no more than cores, to have one each")
    arguments.add_argument("--tokens", type=int, default=512, help="per rank; with few, naps are short")
    arguments.add_argument("--parts", type=int, default=4)
    arguments.add_argument("--comm-alg", nargs="+", default=["fullmesh_v1"])
    arguments.add_argument("--latency-us", type=float, default=5.0)
    arguments.add_argument("--wire", type=float, default=1.0, help="sleep of senders, of local work")
    arguments.add_argument("--trace", type=Path, help="keep the routes' traces in this folder")
    options = arguments.parse_args()
    records = []
    for comm_alg in options.comm_alg:
        setting = Setting(
            options.tokens, options.parts, comm_alg, options.latency_us, options.wire, options.iterations
        )
        with tempfile.TemporaryDirectory() as temporary, RankGroup(options.ranks) as group:
            folder = options.trace / comm_alg if options.trace else Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            per_rank = group.run(measure, setting, str(folder), timeout_s=1200)
            records += report(setting, per_rank, folder)
    write_records(options.json, records)


if __name__ == "__main__":
    main()
