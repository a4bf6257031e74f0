"""What one rank does: started by mpirun as ``python -m benchmarks.compare.rank JOB``, or in a `RankGroup`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.compare import sweeps, timing
from benchmarks.compare.agreement import check_routes
from benchmarks.compare.cases import Case, Job
from benchmarks.compare.inputs import Inputs
from benchmarks.compare.routes import COMM_ALGS, Buffers, Route, make_routes
from benchmarks.compare.routes.ours import Direct
from benchmarks.compare.samples import Sample, absent_sample
from benchmarks.harness import keep_freed_memory
from moe_triton.starting_line import StartingLine

REFERENCE = "gloo_alltoallv"
# Dispatch and combine are timed apart in a share of the iterations: that takes as long as both together.
APART_EVERY = 2
WARM_UP = Direct.FILLED_RUNS
GLOO_TIMEOUT_S = 120.0
M_MMAP_MAX = -4  # of glibc's malloc.h


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
        sweeps.serve(rank, num_ranks, job, messages.send)
        return
    wanted = set(job.routes)
    # Without waiting is measured on the plans and the windows of slots.
    buffered = (wanted | ({"slots"} if "nowait" in wanted else set())) & COMM_ALGS.keys()
    for tokens in job.tokens:
        inputs = Inputs.random(rank, num_ranks, tokens, job.seed)
        with contextlib.ExitStack() as stack:
            buffers = Buffers.open(buffered, tokens, stack)
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
    line = StartingLine()
    for name, route in routes.items():
        if name in job.routes:
            runs.append(timing.Run(name, case, functools.partial(timing.together, route)))
            apart = functools.partial(timing.apart, route, line)
            runs.append(timing.Run(name, case, apart, APART_EVERY))
    iterations = job.iterations or timing.iterations_within(runs, line, job.seconds)
    timed = timing.measure(
        runs, line, iterations, job.seed + 1, lambda done: on_iteration(done + 1, iterations)
    )
    check_routes(routes, REFERENCE)
    return timing.reduce(runs, timed)


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
