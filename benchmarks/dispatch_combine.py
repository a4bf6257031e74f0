"""Dispatch + combine against gloo's all-to-all-v with the same local work, interleaved in one run.

``python -m benchmarks.dispatch_combine [--json FILE]``. A time is the last rank out minus the first rank
in; only ratios inside one run mean anything.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import alltoallv
from benchmarks.harness import Record, parser, write_records
from moe_triton import EPBuffer
from moe_triton.processes import RankGroup

HIDDEN, TOPK, EXPERTS = 7168, 8, 64
ROUTES = ("moe_triton", "gloo all-to-all-v")


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    ranks: int
    tokens: int
    quantize: bool


def measure(rank: int, num_ranks: int, case: Case, iterations: int) -> dict[str, list[tuple[float, float]]]:
    """Start and end of every iteration of each route on this rank, after checking that they agree."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(case.tokens, HIDDEN, generator=generator).bfloat16()
    logits = torch.randn(case.tokens, EXPERTS, generator=generator)
    weights, ids = logits.softmax(1).topk(TOPK, dim=1)
    ids32 = ids.int()
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in ROUTES}
    with EPBuffer(
        num_max_tokens_per_rank=case.tokens, hidden=HIDDEN, num_topk=TOPK, num_experts=EXPERTS
    ) as buffer:
        # Experts are not what is measured: they answer at once with rows that are the same everywhere.
        answers = torch.randn(
            buffer.config.receive_capacity(rank), HIDDEN, generator=torch.Generator().manual_seed(7)
        ).bfloat16()

        def ours() -> tuple[Any, ...]:
            output = buffer.dispatch(x, ids32, quantize="int8" if case.quantize else None)
            rows = output.tokens, output.scales
            return *rows, output.tokens_per_expert, buffer.combine(answers, weights, output.handle)

        def gloo() -> tuple[Any, ...]:
            tokens, scales, counts, sent = alltoallv.dispatch(x, ids, EXPERTS, num_ranks, case.quantize)
            out = alltoallv.combine(answers[: tokens.shape[0]], weights, sent)
            return tokens, scales, counts, out

        routes = dict(zip(ROUTES, (ours, gloo), strict=True))
        check_equal(ours(), gloo())
        shuffle = random.Random(0)  # the same on every rank
        for _ in range(iterations):
            for name in shuffle.sample(ROUTES, len(ROUTES)):
                dist.barrier()
                start = time.perf_counter()
                routes[name]()
                spans[name].append((start, time.perf_counter()))
    return spans


def check_equal(ours: tuple[Any, ...], gloo: tuple[Any, ...]) -> None:
    """Both routes deliver the same bits."""
    total = int(gloo[2].sum())
    for name, have, want in zip(("tokens", "scales", "counts", "output"), ours, gloo, strict=True):
        if want is not None and not torch.equal(have[:total] if name in ("tokens", "scales") else have, want):
            raise AssertionError(f"{name} differ between the routes: nothing to compare")


def durations_us(per_rank: list[dict[str, list[tuple[float, float]]]], route: str) -> list[float]:
    """Last rank out minus first rank in, per iteration."""
    spans = zip(*(result[route] for result in per_rank), strict=True)
    return [(max(end for _, end in span) - min(start for start, _ in span)) * 1e6 for span in spans]


def main() -> None:
    """Measure every case and print the table."""
    arguments = parser("Dispatch + combine against gloo's all-to-all-v.")
    arguments.add_argument("--iterations", type=int, default=40, help="per case and route")
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--tokens", type=int, nargs="+", default=[16, 64], help="per rank")
    options = arguments.parse_args()
    cases = [
        Case(ranks, tokens, quantize)
        for ranks in options.ranks
        for tokens in options.tokens
        for quantize in (True, False)
    ]
    table = Table(title=f"dispatch + combine, H {HIDDEN}, K {TOPK}, E {EXPERTS}, bf16, medians")
    for column in (
        "ranks",
        "tokens",
        "quantise",
        "ours us",
        "gloo us",
        "ratio p10",
        "ratio p50",
        "ratio p90",
    ):
        table.add_column(column, justify="right")
    records: list[Record] = []
    for case in track(cases, "cases", transient=True):
        with RankGroup(case.ranks) as group:
            per_rank = group.run(measure, case, options.iterations, timeout_s=600)
        ours, gloo = (durations_us(per_rank, name) for name in ROUTES)
        ratios = sorted(g / o for g, o in zip(gloo, ours, strict=True))
        p10, p50, p90 = (ratios[int(q * (len(ratios) - 1))] for q in (0.1, 0.5, 0.9))
        table.add_row(
            str(case.ranks),
            str(case.tokens),
            "int8" if case.quantize else "no",
            f"{statistics.median(ours):.0f}",
            f"{statistics.median(gloo):.0f}",
            *(f"{p:.1f}" for p in (p10, p50, p90)),
        )
        figures = [
            ("dc_vs_gloo_alltoallv", p50, "ratio"),
            ("dc_us", statistics.median(ours), "us"),
            ("gloo_alltoallv_us", statistics.median(gloo), "us"),
        ]
        records += [
            Record(benchmark="dispatch_combine", case=asdict(case), metric=metric, value=value, unit=unit)
            for metric, value, unit in figures
        ]
    Console().print(table)
    write_records(options.json, records)


if __name__ == "__main__":
    main()
