"""Our routes over many sizes at once, all of them interleaved: what a rank does in a scaling run.

Sizes measured one after the other could not be compared, since the machine's speed changes in between. So all
sizes live side by side in one group: one buffer takes batches of every size, and smaller groups of ranks are
parts of the largest one, whose other ranks sleep meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from benchmarks.compare import timing
from benchmarks.compare.cases import Case, Job
from benchmarks.compare.inputs import Inputs
from benchmarks.compare.routes import COMM_ALGS
from benchmarks.compare.routes.ours import Direct, Slots
from benchmarks.compare.samples import Sample, absent_sample
from benchmarks.compare.timing import Run, Span
from benchmarks.sizes import SIZES
from moe_triton import EPBuffer
from moe_triton.core.errors import ArgumentError, WindowError
from moe_triton.starting_line import StartingLine

ROUTES = {"slots": Slots, "direct": Direct}
# What one dispatch takes at most where the limits of A3 hold; larger batches go in several.
MOST_TOKENS = 512
# The first runs compile, fill windows and fill in the experts' answers.
WARM_UP = 4


def serve(rank: int, num_ranks: int, job: Job, send: Callable[..., None]) -> None:
    """Does a sweep; every rank calls it."""
    plan = plan_tokens if job.kind == "tokens" else plan_ranks
    for quantize in job.quantize:
        with contextlib.ExitStack() as stack:
            send(kind="start", case=f"sweep of {job.kind}, {quantize or 'bf16'}")
            runs, absent = plan(rank, num_ranks, job, quantize, stack)
            line = StartingLine()
            for _ in range(WARM_UP):
                for run in runs:
                    line.wait()
                    run.go()
            iterations = job.iterations or timing.iterations_within(runs, line, job.seconds)

            def report(done: int, total: int = iterations) -> None:
                send(kind="iteration", done=done + 1, total=total)

            timed = timing.measure(runs, line, iterations, job.seed + 1, report)
            samples = timing.reduce(runs, timed) + absent
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
            routes = [ROUTES[name](piece, buffer, quantize) for piece in pieces]
            runs.append(Run(name, case, _in_turn(routes)))
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
            route = ROUTES[name](Inputs.random(rank, size, tokens, job.seed), buffer, quantize)
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
        start = time.perf_counter()
        steps: dict[str, float] = {}
        for route in routes:
            route.dispatch()
            route.combine()
            for step, us in timing.named(route.steps_us()).items():
                steps[step] = steps.get(step, 0.0) + us
        end = time.perf_counter()
        for route in routes:
            route.settle()
        return [Span("both", start, end, steps)]

    return go
