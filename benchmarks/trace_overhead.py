"""What a trace costs: dispatch + combine with one against without, on one buffer, interleaved.

``python -m benchmarks.trace_overhead [--json FILE]``. Two ratios of medians: of time, the last rank out minus
the first rank in; and of what the calling threads took of their cores, which other work on the machine
disturbs less. Beside each stands the ratio of two routes without a trace: how far it can be trusted. Writing
the file is not timed: that happens when a buffer closes.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.harness import MAX_RANKS, at_least, parser, print_table, records_of, run_main, write_records
from benchmarks.operators import Inputs
from benchmarks.sizes import EXPERTS, HIDDEN, SIZES, TOPK
from moe_triton import EPBuffer
from moe_triton.processes import RankGroup
from moe_triton.runtime.executables import Kept
from moe_triton.starting_line import StartingLine
from moe_triton.tools.progress import progress

ALLOWED = 1.03
WARM_UP = 5
ROUTES = ("traced", "not traced", "not traced, again")
Spans = list[tuple[float, float, float]]  # start, end, seconds of the core in between


class Switch:
    """A buffer whose trace can be turned off: the same memory and windows, with kernels that are not traced.

    Args:
        buffer: made with a trace.
    """

    def __init__(self, buffer: EPBuffer) -> None:
        self._communicator = buffer._communicator
        self._executables, self._log = self._communicator._executables, self._communicator._executables.log
        self._kept: dict[str, Kept] = {name: ({}, {}) for name in ROUTES}

    def to(self, name: str) -> None:
        """The next calls are of this route."""
        self._executables.log = self._log if name == "traced" else None
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
        switch.to("traced")
    return spans


def medians(per_rank: list[dict[str, Spans]], name: str) -> tuple[float, float]:
    """Seconds of a pair, and seconds of cores that it took on all ranks together."""
    rounds = list(zip(*(result[name] for result in per_rank), strict=True))
    times = [max(end for _, end, _ in spans) - min(start for start, _, _ in spans) for spans in rounds]
    return statistics.median(times), statistics.median(sum(core for *_, core in spans) for spans in rounds)


def main() -> None:
    """Measure every size and print the table."""
    arguments = parser("Dispatch + combine with a trace against without.")
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
                    traced, plain, again = (medians(per_rank, name) for name in ROUTES)
                    ratios = {
                        "traced_vs_not": traced[0] / plain[0],
                        "not_vs_not": again[0] / plain[0],
                        "core_traced_vs_not": traced[1] / plain[1],
                        "core_not_vs_not": again[1] / plain[1],
                    }
                    verdict = "over" if ratios["core_traced_vs_not"] > ALLOWED else ""
                    figures = [f"{ratio:.3f}" for ratio in ratios.values()]
                    name = f"{ranks} ranks, {tokens}, {comm_alg}"
                    rows.append([name, f"{plain[0] * 1e6:.0f}", *figures, verdict])
                    case = {"ranks": ranks, "tokens": tokens, "comm_alg": comm_alg}
                    records += records_of("trace_overhead", case, ratios)
    columns = ["tokens each", "us", "time", "noise", "core", "noise", f"> {ALLOWED:g}"]
    title = f"dispatch + combine, H {HIDDEN}, K {TOPK}, bf16: with a trace against without"
    print_table(title, columns, rows)
    write_records(options.json, records)


if __name__ == "__main__":
    run_main(main)
