"""Runs in random order, timed on every rank: the first rank in to the last rank out.

``time.perf_counter`` is the machine's monotonic clock, the same in all processes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.compare.cases import Case, Phase
from benchmarks.compare.routes.base import Route, Steps
from benchmarks.compare.samples import Sample
from moe_triton.starting_line import StartingLine

FEWEST_ITERATIONS, MOST_ITERATIONS = 5, 60


class Span(NamedTuple):
    """One phase of one run on one rank, in seconds of the common clock."""

    phase: Phase
    start: float
    end: float
    steps: dict[str, float] | None = None
    """Microseconds by "dispatch: " or "combine: " and the name of a step."""
    core_us: float = 0.0
    """What the rank's thread took of its core."""


@dataclass(frozen=True)
class Run:
    """What takes one place in an iteration.

    Attributes:
        route: a name.
        case: of the samples.
        go: does it and times it; no spans on a rank that takes no part.
        every: number of iterations from one run to the next.
    """

    route: str
    case: Case
    go: Callable[[], list[Span]]
    every: int = 1


class Timed(NamedTuple):
    """The spans of one run on one rank."""

    run: int
    iteration: int
    order: int
    spans: list[Span]


def together(route: Route) -> list[Span]:
    """Dispatch and combine in one go."""
    core = time.thread_time()
    start = time.perf_counter()
    route.dispatch()
    route.combine()
    end = time.perf_counter()
    core_us = (time.thread_time() - core) * 1e6
    steps = route.steps_us()
    route.settle()
    return [Span("both", start, end, None if steps is None else named(steps), core_us)]


def named(steps: Steps) -> dict[str, float]:
    """Steps of both phases in one."""
    return {f"{phase}: {step}": us for phase, of_phase in steps.items() for step, us in of_phase.items()}


def apart(route: Route, line: StartingLine) -> list[Span]:
    """The same with a barrier between the two, so that each has a time of its own."""
    spans: list[Span] = []
    phases: tuple[tuple[Phase, Callable[[], None]], ...] = (
        ("dispatch", route.dispatch),
        ("combine", route.combine),
    )
    for phase, call in phases:
        line.wait()
        start = time.perf_counter()
        call()
        spans.append(Span(phase, start, time.perf_counter()))
    steps = route.steps_us()
    route.settle()
    if steps is None:
        return spans
    return [span._replace(steps=named({span.phase: steps[span.phase]})) for span in spans]


def measure(
    runs: Sequence[Run],
    line: StartingLine,
    iterations: int,
    seed: int,
    on_iteration: Callable[[int], None],
) -> list[Timed]:
    """Every run in every iteration, in an order that is random and the same on every rank."""
    shuffle = random.Random(seed)
    timed: list[Timed] = []
    for iteration in range(iterations):
        due = [i for i, run in enumerate(runs) if iteration % run.every == 0]
        shuffle.shuffle(due)
        for order, i in enumerate(due):
            line.wait()
            timed.append(Timed(i, iteration, order, runs[i].go()))
        on_iteration(iteration)
    return timed


def iterations_within(runs: Sequence[Run], line: StartingLine, seconds: float) -> int:
    """How many iterations take so long at most, from one pass of all runs; rank 0 decides for all."""
    start = time.perf_counter()
    measure(runs, line, 1, 1, lambda _: None)
    dist.barrier()
    fitting = int(seconds / (time.perf_counter() - start))
    decision: list[int] = [min(max(fitting, FEWEST_ITERATIONS), MOST_ITERATIONS)]
    dist.broadcast_object_list(decision, src=0)
    return decision[0]


def reduce(runs: Sequence[Run], timed: list[Timed]) -> list[Sample]:
    """The samples of all ranks together; collective. Only rank 0 gets them."""
    gathered: list[list[Timed]] = [[] for _ in range(dist.get_world_size())]
    if dist.get_rank() == 0:
        dist.gather_object(timed, gathered)
        return reduce_ranks(runs, gathered)
    dist.gather_object(timed)
    return []


def _means(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each step's mean over the ranks, which all have the same steps."""
    return {name: sum(of_rank[name] for of_rank in steps) / len(steps) for name in steps[0]} if steps else {}


def reduce_ranks(runs: Sequence[Run], per_rank: Sequence[list[Timed]]) -> list[Sample]:
    """Last rank out minus first rank in, of the ranks that took part."""
    samples: list[Sample] = []
    for same in zip(*per_rank, strict=True):
        run, case = runs[same[0].run], runs[same[0].run].case
        for spans in zip(*(one.spans for one in same if one.spans), strict=True):
            us = (max(span.end for span in spans) - min(span.start for span in spans)) * 1e6
            steps = [span.steps for span in spans if span.steps is not None]
            samples.append(
                Sample(
                    run.route,
                    spans[0].phase,
                    case.ranks,
                    case.tokens,
                    case.quantize,
                    same[0].iteration,
                    same[0].order,
                    us,
                    max((sum(of_rank.values()) for of_rank in steps), default=None),
                    steps=_means(steps),
                    core_us=sum(span.core_us for span in spans),
                )
            )
    return samples
