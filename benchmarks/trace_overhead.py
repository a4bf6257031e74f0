"""What a trace costs: dispatch + combine with one against without, in the same run, interleaved.

``python -m benchmarks.trace_overhead [--json FILE]``. A time is the last rank out minus the first rank in.
Writing the file is not timed: that happens when a buffer closes.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from benchmarks.harness import Record, parser, print_table, write_records
from benchmarks.operators import EXPERTS, HIDDEN, TOPK, Inputs
from moe_triton import EPBuffer
from moe_triton.processes import RankGroup

ALLOWED = 1.03
WARM_UP = 5
Spans = list[tuple[float, float]]


def pair(buffer: EPBuffer, inputs: Inputs) -> Callable[[], object]:
    """Dispatch, experts that answer with what they got, combine."""

    def run() -> object:
        received = buffer.dispatch(inputs.x, inputs.ids)
        return buffer.combine(received.tokens, inputs.weights, received.handle)

    return run


def measure(
    rank: int, num_ranks: int, tokens: int, comm_alg: str, iterations: int, path: str
) -> dict[str, Spans]:
    """Start and end of each pair on this rank, by whether it was traced."""
    sizes = {"num_max_tokens_per_rank": tokens, "hidden": HIDDEN, "num_topk": TOPK, "num_experts": EXPERTS}
    inputs = Inputs.random(rank, tokens, TOPK, EXPERTS)
    with (
        EPBuffer(**sizes, comm_alg=comm_alg, trace=path) as traced,
        EPBuffer(**sizes, comm_alg=comm_alg) as plain,
        EPBuffer(**sizes, comm_alg=comm_alg) as again,
    ):
        routes = {
            "traced": pair(traced, inputs),
            "not traced": pair(plain, inputs),
            "not traced, again": pair(again, inputs),
        }
        spans: dict[str, Spans] = {name: [] for name in routes}
        shuffle = random.Random(0)  # the same on every rank
        for iteration in range(WARM_UP + iterations):
            for name in shuffle.sample(list(routes), len(routes)):
                dist.barrier()
                start = time.perf_counter()
                routes[name]()
                if iteration >= WARM_UP:
                    spans[name].append((start, time.perf_counter()))
    return spans


def seconds(per_rank: list[dict[str, Spans]], name: str) -> list[float]:
    """Last rank out minus first rank in, per iteration."""
    rounds = zip(*(result[name] for result in per_rank), strict=True)
    return [max(end for _, end in span) - min(start for start, _ in span) for span in rounds]


def main() -> None:
    """Measure every size and print the table."""
    arguments = parser("Dispatch + combine with a trace against without.")
    arguments.add_argument("--iterations", type=int, default=300)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64], help="per rank")
    options = arguments.parse_args()
    rows, records = [], []
    for ranks in options.ranks:
        with RankGroup(ranks) as group, tempfile.TemporaryDirectory() as folder:
            for tokens in options.tokens:
                for comm_alg in ("fullmesh_v1", "fullmesh_v2"):
                    path = str(Path(folder) / f"{tokens}-{comm_alg}.json")
                    per_rank = group.run(measure, tokens, comm_alg, options.iterations, path, timeout_s=1200)
                    plain, traced, again = (
                        statistics.median(seconds(per_rank, name))
                        for name in ("not traced", "traced", "not traced, again")
                    )
                    ratio, noise = traced / plain, again / plain
                    name = f"EP {ranks}, BS {tokens}, {comm_alg}"
                    verdict = "over" if ratio > ALLOWED else ""
                    rows.append([name, f"{plain * 1e6:.0f}", f"{ratio:.3f}", f"{noise:.3f}", verdict])
                    case: dict[str, object] = {"ranks": ranks, "tokens": tokens, "comm_alg": comm_alg}
                    records += [
                        Record(
                            benchmark="trace_overhead", case=case, metric=metric, value=value, unit="ratio"
                        )
                        for metric, value in (("traced_vs_not", ratio), ("not_vs_not", noise))
                    ]
    columns = ["dispatch + combine, bf16", "us", "traced / not", "not / not", f"over {ALLOWED:g}"]
    print_table(f"What a trace costs, H {HIDDEN}, K {TOPK}: ratios of medians", columns, rows)
    write_records(options.json, records)


if __name__ == "__main__":
    main()
