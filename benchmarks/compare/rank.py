"""What one rank does: started by mpirun as ``python -m benchmarks.compare.rank JOB``, or in a `RankGroup`.

Runs are in random order, and timed on every rank: the first rank in to the last rank out.
``time.perf_counter`` is the machine's monotonic clock, the same in all processes.

In a scaling run our routes run over many sizes at once, all of them interleaved: sizes measured one after the
other could not be compared, since the machine's speed changes in between. So all sizes live side by side in
one group: one buffer takes batches of every size, and smaller groups of ranks are parts of the largest one,
whose other ranks sleep meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.compare.cases import AT_TEMPERATURES, Case, Job, Phase, Sample, absent_sample
from benchmarks.compare.routes import COMM_ALGS, Buffers, make_routes
from benchmarks.compare.routes.base import Inputs, Route, Steps, check_routes
from benchmarks.compare.routes.ours import Direct, Slots
from benchmarks.harness import SHARED_FROM, Eviction, cores, keep_freed_memory, waited_s
from benchmarks.sizes import SIZES
from moe_triton import EPBuffer
from moe_triton.core.errors import ArgumentError, WindowError
from moe_triton.starting_line import StartingLine

FEWEST_ITERATIONS, MOST_ITERATIONS = 5, 60
SWEPT = {"slots": Slots, "direct": Direct}
# What one dispatch takes at most where the limits of A3 hold; larger batches go in several.
MOST_TOKENS = 512
# The first runs compile, fill windows and fill in the experts' answers.
SWEEP_WARM_UP = 4
REFERENCE = "gloo_alltoallv"
# Dispatch and combine are timed apart in a share of the iterations: that takes as long as both together.
APART_EVERY = 2
# To empty the caches takes longer than most runs, and a warm run takes several.
TEMPERATURES_EVERY = 2
# Windows have two zones that calls use in turn: both are warm after two runs.
WARM_RUNS = 2
WARM_UP = Direct.FILLED_RUNS
GLOO_TIMEOUT_S = 120.0
M_MMAP_MAX = -4  # of glibc's malloc.h


class Span(NamedTuple):
    """One phase of one run on one rank, in seconds of the common clock."""

    phase: Phase
    start: float
    end: float
    steps: dict[str, float] | None = None
    """Microseconds by "dispatch: " or "combine: " and the name of a step."""
    core_us: float = 0.0
    """What the rank's thread took of its core."""
    waited_us: float = 0.0
    """What it waited for a core that others had."""


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


def timed(phase: Phase, call: Callable[[], object]) -> Span:
    """One call, with what it took of the core and waited for it."""
    waited, core = waited_s(), time.thread_time()
    start = time.perf_counter()
    call()
    end = time.perf_counter()
    core_us = (time.thread_time() - core) * 1e6
    return Span(phase, start, end, core_us=core_us, waited_us=(waited_s() - waited) * 1e6)


def _pair(route: Route) -> None:
    route.dispatch()
    route.combine()


def together(route: Route, phase: Phase = "both") -> list[Span]:
    """Dispatch and combine in one go."""
    span = timed(phase, functools.partial(_pair, route))
    steps = route.steps_us()
    route.settle()
    return [span._replace(steps=None if steps is None else named(steps))]


def warm(route: Route, line: StartingLine) -> list[Span]:
    """The same right after the same: what fits in the caches is there."""
    for _ in range(WARM_RUNS):
        together(route)
        line.wait()
    return together(route, "warm")


def cold(route: Route, line: StartingLine, evict: Eviction) -> list[Span]:
    """The same with the caches emptied on every rank."""
    evict()
    line.wait()
    return together(route, "cold")


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
        spans.append(timed(phase, call))
    steps = route.steps_us()
    route.settle()
    if steps is None:
        return spans
    return [span._replace(steps=named({span.phase: steps[span.phase]})) for span in spans]


def measure(
    runs: Sequence[Run], line: StartingLine, iterations: int, seed: int, on_iteration: Callable[[int], None]
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
                    shared=case.ranks > cores() or any(_waited(span) for span in spans),
                )
            )
    return samples


def _waited(span: Span) -> bool:
    return span.waited_us > SHARED_FROM * (span.end - span.start) * 1e6


def serve_sweep(rank: int, num_ranks: int, job: Job, send: Callable[..., None]) -> None:
    """Does a sweep; every rank calls it."""
    plan = plan_tokens if job.kind == "tokens" else plan_ranks
    for quantize in job.quantize:
        with contextlib.ExitStack() as stack:
            send(kind="start", case=f"sweep of {job.kind}, {quantize or 'bf16'}")
            runs, absent = plan(rank, num_ranks, job, quantize, stack)
            line = StartingLine()
            for _ in range(SWEEP_WARM_UP):
                for run in runs:
                    line.wait()
                    run.go()
            iterations = job.iterations or iterations_within(runs, line, job.seconds)

            def report(done: int, total: int = iterations) -> None:
                send(kind="iteration", done=done + 1, total=total)

            samples = reduce(runs, measure(runs, line, iterations, job.seed + 1, report)) + absent
            send(kind="case", samples=[asdict(sample) for sample in samples])


Planned = tuple[list[Run], list[Sample]]


def plan_tokens(rank: int, num_ranks: int, job: Job, quantize: str, stack: contextlib.ExitStack) -> Planned:
    """Every batch size on one buffer."""
    runs: list[Run] = []
    absent: list[Sample] = []
    for name in job.routes:
        cases = [Case(num_ranks, tokens, quantize) for tokens in job.tokens]
        try:
            buffer = stack.enter_context(_largest_buffer(name, max(job.tokens)))
        except (ArgumentError, WindowError) as error:
            absent += [absent_sample(name, case, str(error)) for case in cases]
            continue
        most = buffer.config.num_max_tokens_per_rank
        for case in cases:
            sizes = [most] * (case.tokens // most) + [case.tokens % most] * (case.tokens % most > 0)
            pieces = [Inputs.random(rank, num_ranks, size, i) for i, size in enumerate(sizes)]
            runs.append(Run(name, case, _in_turn([SWEPT[name](piece, buffer, quantize) for piece in pieces])))
    return runs, absent


def plan_ranks(rank: int, num_ranks: int, job: Job, quantize: str, stack: contextlib.ExitStack) -> Planned:
    """Groups of 2, 4, ... ranks, each with buffers of its own."""
    runs: list[Run] = []
    absent: list[Sample] = []
    (tokens,) = job.tokens
    size = 2
    while size <= num_ranks:
        group, case = dist.new_group(list(range(size))), Case(size, tokens, quantize)
        for name in job.routes:
            if rank >= size:
                runs.append(Run(name, case, list))
                continue
            try:
                buffer = stack.enter_context(_buffer(name, tokens, group))
            except (ArgumentError, WindowError) as error:
                absent.append(absent_sample(name, case, str(error)))
                runs.append(Run(name, case, list))
                continue
            route = SWEPT[name](Inputs.random(rank, size, tokens, job.seed), buffer, quantize)
            runs.append(Run(name, case, _in_turn([route])))
        size *= 2
    return runs, absent


def _largest_buffer(name: str, tokens: int) -> EPBuffer:
    """One that takes these tokens at once, or else as many as the limits allow."""
    try:
        return _buffer(name, tokens)
    except ArgumentError as error:
        if tokens <= MOST_TOKENS or error.argument != "num_max_tokens_per_rank":
            raise
    return _buffer(name, MOST_TOKENS)


def _buffer(name: str, tokens: int, group: Any = None) -> EPBuffer:
    how = {"comm_alg": COMM_ALGS[name], "relaxed": True}
    return EPBuffer(group, num_max_tokens_per_rank=tokens, **SIZES | how)


def _in_turn(routes: Sequence[Slots]) -> Callable[[], list[Span]]:
    """One dispatch and combine after the other."""

    def go() -> list[Span]:
        steps: dict[str, float] = {}

        def run() -> None:
            for route in routes:
                _pair(route)
                for step, us in named(route.steps_us() or {}).items():
                    steps[step] = steps.get(step, 0.0) + us

        span = timed("both", run)
        for route in routes:
            route.settle()
        return [span._replace(steps=steps)]

    return go


class Messages:
    """What rank 0 tells the process that started it: lines of JSON in a file."""

    def __init__(self, path: str, rank: int) -> None:
        self._path = Path(path) if rank == 0 else None

    def send(self, **message: object) -> None:
        """Appends a line, on rank 0."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(message) + "\n")

    def progress(self, done: int, total: int) -> None:
        """Says how many iterations are over."""
        self.send(kind="iteration", done=done, total=total)


def serve(rank: int, num_ranks: int, job: Job, comm: Any, no_mpi: str) -> None:
    """Does a job. Every rank of the group calls it."""
    torch.set_num_threads(1)
    if job.keeps_memory:
        keep_freed_memory()
        # Nor is anything mapped by itself: temporaries of large batches are larger than what malloc keeps.
        ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0)
    messages = Messages(job.results, rank)
    if job.kind != "compare":
        serve_sweep(rank, num_ranks, job, messages.send)
        return
    wanted = set(job.routes)
    # Without waiting is measured on the plans and the windows of slots.
    buffered = (wanted | ({"slots"} if "nowait" in wanted else set())) & COMM_ALGS.keys()
    for tokens in job.tokens:
        inputs = Inputs.random(rank, num_ranks, tokens, job.seed, job.hidden)
        with contextlib.ExitStack() as stack:
            buffers = Buffers.open(buffered, job.round_tokens or tokens, job.hidden, stack)
            for quantize in job.quantize:
                case = Case(num_ranks, tokens, quantize)
                messages.send(kind="start", case=str(case))
                routes, absent = make_routes(inputs, quantize, wanted, buffers, comm, no_mpi)
                samples = compare(routes, case, job, messages.progress)
                del routes  # before the next ones take as much memory
                samples += [absent_sample(name, case, reason) for name, reason in absent.items()]
                messages.send(kind="case", samples=[asdict(sample) for sample in samples])


def compare(
    routes: dict[str, Route], case: Case, job: Job, on_iteration: Callable[[int, int], None]
) -> list[Sample]:
    """Checks that the routes agree, measures them, and checks again. Samples on rank 0."""
    for _ in range(WARM_UP):
        check_routes(routes, REFERENCE)
    runs = []
    line, evict = StartingLine(), Eviction(case.ranks)
    for name, route in routes.items():
        if name in job.routes:
            runs.append(Run(name, case, functools.partial(together, route)))
        if name in job.routes and not job.only_both:
            runs.append(Run(name, case, functools.partial(apart, route, line), APART_EVERY))
        if name in job.routes and name in AT_TEMPERATURES and not job.only_both:
            runs.append(Run(name, case, functools.partial(warm, route, line), TEMPERATURES_EVERY))
            runs.append(Run(name, case, functools.partial(cold, route, line, evict), TEMPERATURES_EVERY))
    iterations = job.iterations or iterations_within(runs, line, job.seconds)
    timed = measure(runs, line, iterations, job.seed + 1, lambda done: on_iteration(done + 1, iterations))
    check_routes(routes, REFERENCE)
    return reduce(runs, timed)


def serve_in_group(rank: int, num_ranks: int, job: Job, no_mpi: str) -> None:
    """On a rank of a `RankGroup`, which has gloo and no MPI."""
    serve(rank, num_ranks, job, None, no_mpi)


def main() -> None:
    """On a rank that mpirun started: MPI says who it is, and gloo meets at a file beside the job's."""
    mpi: Any = importlib.import_module("mpi4py.MPI")
    comm = mpi.COMM_WORLD
    path = Path(sys.argv[1])
    job = Job.from_json(json.loads(path.read_text(encoding="utf-8")))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path.with_suffix('.store')}",
        rank=comm.rank,
        world_size=comm.size,
        timeout=timedelta(seconds=GLOO_TIMEOUT_S),
    )
    try:
        serve(comm.rank, comm.size, job, comm, "")
    except BaseException:
        traceback.print_exc()
        # Peers may be inside a collective that has no deadline: only this ends them.
        comm.Abort(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
