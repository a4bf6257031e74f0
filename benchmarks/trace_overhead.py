"""What a trace costs, and the flight recorder: calls with against without, on one buffer, interleaved.

``python -m benchmarks.trace_overhead [--json FILE]``. Ratios of a dispatch and a combine: of time, the
last rank out minus the first rank in, as medians over the turns, with the recorder's 95 % interval; and
of what the calling threads took of their cores, which other work on the machine disturbs less. Beside
each stands the ratio of two routes without either: how far it can be trusted. Writing a trace's file is
not timed: that happens when a buffer closes.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.harness import (
    MAX_RANKS,
    at_least,
    interval_text,
    parser,
    print_table,
    records_of,
    run_main,
    with_interval,
    write_records,
)
from benchmarks.operators import Inputs
from benchmarks.sizes import EXPERTS, HIDDEN, SIZES, TOPK
from moe_triton import EPBuffer
from moe_triton.processes import RankGroup
from moe_triton.runtime.executables import Kept
from moe_triton.starting_line import StartingLine
from moe_triton.tools.progress import progress

ALLOWED, ALLOWED_RECORDED = 1.03, 1.01
WARM_UP = 5
TRACED, RECORDED, PLAIN, AGAIN = "traced", "recorded", "neither", "neither, again"
ROUTES = (TRACED, RECORDED, PLAIN, AGAIN)
"""What is traced is recorded, too, as is usual."""
Spans = list[tuple[float, float, float]]  # start, end, seconds of the core in between


class Switch:
    """A buffer whose trace and recorder can be turned off: the same memory and windows, with other plans.

    Args:
        buffer: made with a trace.
    """

    def __init__(self, buffer: EPBuffer) -> None:
        self._communicator = buffer._communicator
        self._executables = self._communicator._executables
        self._log, self._recorder = self._executables.log, self._executables.recorder
        self._kept: dict[str, Kept] = {name: ({}, {}) for name in ROUTES}

    def to(self, name: str) -> None:
        """The next calls are of this route."""
        self._executables.log = self._log if name == TRACED else None
        self._executables.recorder = self._recorder if name in (TRACED, RECORDED) else None
        self._executables.swap(self._kept[name])


def measure(
    rank: int, num_ranks: int, tokens: int, comm_alg: str, iterations: int, path: str
) -> dict[str, Spans]:
    """Start and end on this rank of each dispatch and combine, by route."""
    inputs = Inputs.random(rank, tokens, TOPK, EXPERTS)
    spans: dict[str, Spans] = {name: [] for name in ROUTES}
    shuffle = random.Random(0)  # the same on every rank
    line = StartingLine()
    with EPBuffer(num_max_tokens_per_rank=tokens, **SIZES, comm_alg=comm_alg, trace=path) as buffer:
        switch = Switch(buffer)
        for iteration in range(WARM_UP + iterations):
            for name in shuffle.sample(ROUTES, len(ROUTES)):
                switch.to(name)
                line.wait()
                start, core = time.perf_counter(), time.thread_time()
                received = buffer.dispatch(inputs.x, inputs.ids)
                # The experts answer with what they got.
                buffer.combine(received.tokens, received.handle, inputs.weights)
                if iteration >= WARM_UP:
                    spans[name].append((start, time.perf_counter(), time.thread_time() - core))
        switch.to(TRACED)
    return spans


def times_of(per_rank: list[dict[str, Spans]], name: str) -> list[float]:
    """Seconds of each pair."""
    rounds = zip(*(result[name] for result in per_rank), strict=True)
    return [max(end for _, end, _ in spans) - min(start for start, _, _ in spans) for spans in rounds]


def medians(per_rank: list[dict[str, Spans]], name: str) -> tuple[float, float]:
    """Seconds of a pair, and seconds of cores that it took on all ranks together."""
    rounds = zip(*(result[name] for result in per_rank), strict=True)
    cores = [sum(core for *_, core in spans) for spans in rounds]
    return statistics.median(times_of(per_rank, name)), statistics.median(cores)


def main() -> None:
    """Measure every size and print the table."""
    arguments = parser("Dispatch + combine with a trace, and with the flight recorder, against without.")
    arguments.add_argument("--iterations", type=at_least(1), default=300)
    arguments.add_argument("--ranks", type=at_least(1, MAX_RANKS), nargs="+", default=[2, 4])
    arguments.add_argument("--tokens", type=at_least(1), nargs="+", default=[1, 16, 64], help="per rank")
    options = arguments.parse_args()
    rows, records = [], []
    for ranks in options.ranks:
        with RankGroup(ranks) as group, tempfile.TemporaryDirectory() as folder:
            for tokens in options.tokens:
                for comm_alg in ("fullmesh_v1", "fullmesh_v2", "direct"):
                    path = str(Path(folder) / f"{tokens}-{comm_alg}.json")
                    with progress(f"{ranks} ranks, {tokens} tokens, {comm_alg}"):
                        per_rank = group.run(
                            measure, tokens, comm_alg, options.iterations, path, timeout_s=1200
                        )
                    traced, recorded, plain, again = (medians(per_rank, name) for name in ROUTES)
                    both = zip(times_of(per_rank, RECORDED), times_of(per_rank, PLAIN), strict=True)
                    ratios = {
                        "traced_vs_not": traced[0] / recorded[0],
                        **with_interval("recorded_vs_not", [one / other for one, other in both]),
                        "not_vs_not": again[0] / plain[0],
                        "core_traced_vs_not": traced[1] / recorded[1],
                        "core_recorded_vs_not": recorded[1] / plain[1],
                        "core_not_vs_not": again[1] / plain[1],
                    }
                    over = ["traced"] if ratios["core_traced_vs_not"] > ALLOWED else []
                    over += ["recorded"] if ratios["recorded_vs_not_high"] > ALLOWED_RECORDED else []
                    shown = {name: f"{ratio:.3f}" for name, ratio in ratios.items()}
                    interval = interval_text(ratios, "recorded_vs_not", 3)
                    recorded_in = f"{shown['recorded_vs_not']} ({interval})"
                    of_time = shown["traced_vs_not"], recorded_in, shown["not_vs_not"]
                    of_core = [shown[f"core_{name}_vs_not"] for name in ("traced", "recorded", "not")]
                    name = f"{ranks} ranks, {tokens}, {comm_alg}"
                    rows.append([name, f"{plain[0] * 1e6:.0f}", *of_time, *of_core, ", ".join(over)])
                    case = {"ranks": ranks, "tokens": tokens, "comm_alg": comm_alg}
                    records += records_of("trace_overhead", case, ratios)
    heads = "traced", "recorded", "noise"
    columns = ["tokens each", "us", *heads, *(f"core {head}" for head in heads), "over"]
    title = f"dispatch + combine, H {HIDDEN}, K {TOPK}, bf16: traced or recorded against not"
    print_table(title, columns, rows)
    write_records(options.json, records)


if __name__ == "__main__":
    run_main(main)
