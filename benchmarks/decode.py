"""Dispatch and combine at decode size against memcpy of their bytes, and what is left by step.

``python -m benchmarks.decode [--json FILE]``. Three routes: *direct*, whose experts' results lie in the
window; *direct copied*, whose results lie in memory of the experts' own, from where combine copies them
there; and *fullmesh_v1*. They and memcpy of what each moves (`benchmarks.compare.traffic`) run in every
iteration, in random order; a time is the last rank out minus the first rank in. Each route runs twice more:

- on a buffer with a trace, which tells what the cores' time is charged to (`benchmarks.charges`);
- *warm*: right after the same calls with one token. These leave code, tables and flags in the caches, where
  otherwise the code of other routes has been since: what that takes off is the price of cold code.

Ratios and what cold code takes are medians over the iterations with their 95 % intervals. Other programs on
the machine move both, since each wait lets them have the core. So both are given of each route's fastest
quarter of runs too, the least disturbed ones, and the states' times are those of that quarter of the traced
runs. Memcpy over rows is of what both take of the cores in it: the ratio that there would be if nothing but
moving rows were left.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks import harness
from benchmarks.charges import STATES, Pair, charges_us
from benchmarks.compare import rank as timing
from benchmarks.compare.cases import Case, Sample
from benchmarks.compare.figures import Samples
from benchmarks.compare.routes.base import Inputs, Route, check_routes
from benchmarks.compare.routes.memcpy import Arena, Memcpy
from benchmarks.compare.routes.ours import Slots
from benchmarks.compare.traffic import Scheme
from benchmarks.sizes import HIDDEN, SIZES, TOPK
from moe_triton import EPBuffer
from moe_triton.processes import RankGroup
from moe_triton.starting_line import StartingLine
from moe_triton.tools.progress import progress

TOKENS = 16
WARM_UP = 5
TRACED, WARM = "traced", "warm"
T = TypeVar("T")


@dataclass(frozen=True)
class Way:
    """How a route's tokens and results travel.

    Attributes:
        comm_alg: see `EPBuffer`.
        in_window: whether results lie there.
        scheme: whose bytes memcpy copies.
        goal: memcpy's time over the route's, at least.
    """

    comm_alg: str
    in_window: bool
    scheme: Scheme
    goal: float

    def memcpy_names(self) -> tuple[str, str]:
        """Row by row, and in one piece."""
        return f"memcpy of {self.scheme}", f"memcpy of {self.scheme}, whole"


WAYS = {
    "direct": Way("direct", True, "direct", 0.75),
    "direct copied": Way("direct", False, "direct copied", 0.75),
    "fullmesh_v1": Way("fullmesh_v1", False, "slots", 0.95),
}


class Ours(Slots):
    """One of `WAYS`."""

    def __init__(self, inputs: Inputs, buffer: EPBuffer, quantize: str, in_window: bool) -> None:
        super().__init__(inputs, buffer, quantize)
        self._in_window = in_window
        for _ in range(2):  # both tensors that the buffer hands out in turn hold the answers from now on
            super().dispatch()
            rows = buffer.expert_output()
            rows[: inputs.num_received] = inputs.answers
            self.combine_rows(rows)

    def combine(self) -> None:
        """Combines answers that lie in the window or in memory of the experts' own."""
        self.combine_rows(self._answers())

    def _answers(self) -> torch.Tensor:
        return self.buffer.expert_output() if self._in_window else self.inputs.answers


class Warm(Ours):
    """The same, for runs right after the same calls."""

    def one_token(self) -> None:
        """The same calls with the first token alone."""
        inputs = self.inputs
        received = self.buffer.dispatch(inputs.x[:1], inputs.ids32[:1], quantize=self.quantize or None)
        self.buffer.combine(self._answers(), received.handle, inputs.weights[:1])


class Traced(Ours):
    """The same on a buffer with a trace.

    Attributes:
        pairs: what has run.
    """

    def __init__(self, inputs: Inputs, buffer: EPBuffer, quantize: str, in_window: bool) -> None:
        super().__init__(inputs, buffer, quantize, in_window)
        log = buffer._communicator._executables.log
        assert log is not None
        self._log = log
        self._begin_ns = self._end_ns = 0
        self.pairs: list[Pair] = []

    def dispatch(self) -> None:
        """Empties the trace, notes when the run begins, and dispatches."""
        self._log.take()
        self._begin_ns = time.perf_counter_ns()
        super().dispatch()

    def combine(self) -> None:
        """Combines, and notes when the run ends."""
        super().combine()
        self._end_ns = time.perf_counter_ns()

    def settle(self) -> None:
        """Lets go of what was delivered, and keeps what the trace has of the run."""
        super().settle()
        calls, events, _ = self._log.take()
        self.pairs.append(Pair.of(self._begin_ns, self._end_ns, calls, events))


def _run(route: Route, line: StartingLine) -> list[timing.Span]:
    """One run."""
    if isinstance(route, Warm):
        route.one_token()
        line.wait()
    return timing.together(route)


def _routes(inputs: Inputs, quantize: str, folder: Path, stack: ExitStack) -> dict[str, Route]:
    """All of them, each in memory of its own, so that each finds it as long after its last use."""
    arena, routes = Arena(), dict[str, Route]()

    def buffer(comm_alg: str, trace: Path | None = None) -> EPBuffer:
        made = EPBuffer(num_max_tokens_per_rank=TOKENS, **SIZES, comm_alg=comm_alg, trace=trace)
        return stack.enter_context(made)

    for name, way in WAYS.items():
        how = quantize, way.in_window
        routes[name] = Ours(inputs, buffer(way.comm_alg), *how)
        routes[f"{name}, {WARM}"] = Warm(inputs, buffer(way.comm_alg), *how)
        routes[f"{name}, {TRACED}"] = Traced(inputs, buffer(way.comm_alg, folder / f"{name}.json"), *how)
        for memcpy, whole in zip(way.memcpy_names(), (False, True), strict=True):
            routes[memcpy] = Memcpy(inputs, way.scheme, quantize, arena, whole)
    return routes


def measure(
    rank: int, num_ranks: int, quantize: str, iterations: int, folder: str
) -> tuple[list[Sample], dict[str, list[Pair]]]:
    """Every route on this rank.

    Returns:
        The samples, on rank 0; and this rank's traced pairs by route.
    """
    harness.keep_freed_memory()
    inputs, case = Inputs.random(rank, num_ranks, TOKENS), Case(num_ranks, TOKENS, quantize)
    line = StartingLine()
    with ExitStack() as stack:
        routes = _routes(inputs, quantize, Path(folder), stack)
        runs = [timing.Run(name, case, functools.partial(_run, r, line)) for name, r in routes.items()]
        check_routes(routes, "fullmesh_v1")
        timing.measure(runs, line, WARM_UP, 0, lambda _: None)
        traced = {name: route for name, route in routes.items() if isinstance(route, Traced)}
        for route in traced.values():
            route.pairs.clear()
        timed = timing.measure(runs, line, iterations, 1, lambda _: None)
        pairs = {name: list(route.pairs) for name, route in traced.items()}
        check_routes(routes, "fullmesh_v1")
        return timing.reduce(runs, timed), pairs


class Taken:
    """What the ranks have measured of a case.

    Args:
        case: which.
        per_rank: what `measure` returned.
    """

    def __init__(self, case: Case, per_rank: Sequence[tuple[list[Sample], dict[str, list[Pair]]]]) -> None:
        self._case, self._cores = case, min(harness.cores(), case.ranks)
        self._all = per_rank[0][0]
        self._samples = Samples(self._all)
        self._pairs = [pairs for _, pairs in per_rank]

    def is_shared(self, name: str) -> bool:
        """Whether ranks shared a core, in a route or in its memcpy."""
        routes = (name, *WAYS[name].memcpy_names())
        return any(self._samples.is_shared(self._case, route) for route in routes)

    def figures(self, name: str) -> dict[str, float]:
        """One route's."""
        samples, case = self._samples, self._case
        memcpy = samples.fastest(case, WAYS[name].memcpy_names())
        assert memcpy is not None
        cold, warm, copied = (samples.times(case, route) for route in (name, f"{name}, {WARM}", memcpy))
        figures = {"us": statistics.median(cold.values()), "memcpy_us": statistics.median(copied.values())}
        for metric, values in (
            ("fraction_of_memcpy", samples.ratios(case, memcpy, name)),
            ("cold_code_us", [cold[i] - warm[i] for i in cold]),
        ):
            figures |= harness.with_interval(metric, values)
        best, best_warm, best_copied = (
            statistics.median(_fastest(t.values(), float)) for t in (cold, warm, copied)
        )
        figures["fastest_us"], figures["fastest_memcpy_us"] = best, best_copied
        figures["fastest_fraction_of_memcpy"] = best_copied / best
        figures["fastest_cold_code_us"] = best - best_warm
        ranks = zip(*(pairs[f"{name}, {TRACED}"] for pairs in self._pairs), strict=True)
        charged = _fastest((charges_us(pairs, self._cores) for pairs in ranks), lambda us: sum(us.values()))
        for state in STATES:
            figures[f"{state}_us"] = statistics.mean(each[state] for each in charged)
        copying = [s for s in self._all if s.route == memcpy]
        figures["memcpy_core_us"] = (
            statistics.mean(s.core_us for s in _fastest(copying, lambda s: s.us or 0.0)) / self._cores
        )
        figures["rows_fraction_of_memcpy"] = figures["memcpy_core_us"] / figures["rows_us"]
        return figures


def _fastest(runs: Iterable[T], us: Callable[[T], float]) -> list[T]:
    """The quarter of some runs that took least."""
    ordered = sorted(runs, key=us)
    return ordered[: -(-len(ordered) // 4)]


def _cells(name: str, figures: dict[str, float], is_shared: bool) -> list[str]:
    ratio = figures["fraction_of_memcpy"]
    return [
        name,
        f"{figures['us']:.0f}",
        f"{figures['fastest_us']:.0f}",
        harness.marked(f"{ratio:.2f}", is_shared),
        harness.interval_text(figures, "fraction_of_memcpy"),
        f"{figures['fastest_fraction_of_memcpy']:.2f}",
        "yes" if ratio >= WAYS[name].goal else f"no, {WAYS[name].goal:g}",
        *(f"{figures[f'{state}_us']:.0f}" for state in STATES),
        f"{figures['rows_fraction_of_memcpy']:.2f}",
        f"{figures['cold_code_us']:.0f}",
        harness.interval_text(figures, "cold_code_us", 0),
        f"{figures['fastest_cold_code_us']:.0f}",
    ]


COLUMNS = (
    *("route", "us", "fastest", "memcpy / it", "95 %", "fastest", "goal"),
    *STATES,
    *("memcpy / rows", "cold code", "95 %", "fastest"),
)


def main() -> None:
    """Measure every case and print its table."""
    arguments = harness.parser(
        "Dispatch and combine of 16 tokens a rank against memcpy, and what is left by step."
    )
    arguments.add_argument("--iterations", type=harness.at_least(1), default=200)
    arguments.add_argument("--ranks", type=harness.at_least(1, harness.MAX_RANKS), nargs="+", default=[2, 4])
    arguments.add_argument("--rows", nargs="+", choices=("bf16", "int8"), default=["bf16", "int8"])
    options = arguments.parse_args()
    records: list[harness.Record] = []
    with progress("cases", len(options.ranks) * len(options.rows)) as work:
        for ranks, rows in product(options.ranks, options.rows):
            quantize = "" if rows == "bf16" else rows
            case = Case(ranks, TOKENS, quantize)
            with tempfile.TemporaryDirectory() as folder, RankGroup(ranks) as group:
                work.begin(str(case))
                taken = group.run(measure, quantize, options.iterations, folder, timeout_s=600)
                work.advance()
            lines = []
            measured = Taken(case, taken)
            for name in WAYS:
                figures, is_shared = measured.figures(name), measured.is_shared(name)
                lines.append(_cells(name, figures, is_shared))
                about = {**case.as_record(), "route": name, "shared": is_shared}
                records += harness.records_of("decode", about, figures)
            harness.print_table(
                f"{case}, H {HIDDEN}, K {TOPK}: us, those by state of each core", COLUMNS, lines
            )
    print(harness.SHARED_NOTE)
    harness.write_records(options.json, records)


if __name__ == "__main__":
    harness.run_main(main)
