"""What ranks on several hosts measure: rounds by all routes, bytes that went between hosts, and idle NICs.

Routes are those of `benchmarks.compare`, and one for each of our schemes that leads between hosts. They run
in random order in each iteration, as bf16 and as int8 alike, and deliver the same before they are timed and
afterwards. Hosts are namespaces, so ranks have one clock, and a time is the last rank out minus the first
rank in.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.compare.cases import Case, Sample
from benchmarks.compare.rank import M_MMAP_MAX, Run, apart, measure, reduce, together
from benchmarks.compare.routes.base import Inputs, Route, check_routes
from benchmarks.compare.routes.collectives import AllGather, AllToAllV, Gloo, Mpi
from benchmarks.compare.routes.mpi_native import MpiNative
from benchmarks.compare.routes.ours import Slots
from benchmarks.harness import keep_freed_memory
from benchmarks.servers.runs import nic_seconds
from benchmarks.sizes import SIZES
from moe_triton import EPBuffer
from moe_triton.core.config import Product
from moe_triton.starting_line import StartingLine


class Ours(NamedTuple):
    """A route of ours.

    Attributes:
        product, comm_alg: see `EPBuffer`.
        share: bytes of a window over those of its data, about: what is posted lies there, too.
    """

    product: Product
    comm_alg: str
    share: float


OURS = {
    "A3 fullmesh_v1": Ours("A3", "fullmesh_v1", 3.0),
    "A2 fullmesh": Ours("A2", "fullmesh", 2.1),
    "A3 hierarchy": Ours("A3", "hierarchy", 1.1),
    "A2 hierarchy": Ours("A2", "hierarchy", 1.1),
}
GLOO, NATIVE = "gloo_alltoallv", "mpi_native"
FORMATS = "", "int8"
OF_PARTIAL_ROWS = 2.0**-6
"""Servers' sums travel as bf16, of 8 bits, and are mostly below 4."""
WARM_UP = 3
LINE = "line"


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        tokens: T, of each rank.
        iterations: of each route.
        folder: which all ranks reach.
        schemes: of `OURS`.
        has_mpi: mpirun has started the ranks.
        is_apart: dispatch and combine have times of their own, and others' routes have none.
        idle_s: for which NICs are looked at while nothing is posted.
    """

    tokens: int
    iterations: int
    folder: str
    schemes: Sequence[str] = tuple(OURS)
    has_mpi: bool = False
    is_apart: bool = False
    idle_s: float = 0.0


@dataclass(frozen=True)
class Found:
    """What one rank has measured.

    Attributes:
        samples: of all ranks together; on rank 0 alone.
        posted: bytes to other hosts of the last dispatch and combine, by "route, rows".
        idle: of a core, what a NIC took while nothing was posted.
        mpi: what that library calls itself.
    """

    samples: list[Sample]
    posted: dict[str, list[int]]
    idle: float = 0.0
    mpi: str = ""


class FileLine(StartingLine):
    """A starting line on hosts that share a folder, and no /dev/shm."""

    def __init__(self, path: Path) -> None:
        self._rank, self._num_ranks, self._round = dist.get_rank(), dist.get_world_size(), 0
        if self._rank == 0:
            path.write_bytes(bytes(mmap.PAGESIZE))
        dist.barrier()
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._counts = (ctypes.c_int64 * (mmap.PAGESIZE // 8)).from_buffer(self._memory)  # type: ignore[assignment]


class Hierarchy(Slots):
    """By way of servers, which sum by weight what their ranks have: in another order."""

    def dispatch(self) -> None:
        """Sends tokens with their weights."""
        x, ids, weights = self.inputs.x, self.inputs.ids32, self.inputs.weights
        self._received = self.buffer.dispatch(x, ids, weights, quantize=self.quantize or None)

    def combine(self) -> None:
        """Combines what the experts answered."""
        super().combine()
        assert self.delivered is not None
        self.delivered = self.delivered._replace(exact=False, absolute=OF_PARTIAL_ROWS)


class ByMpi(Route):
    """A route by MPI that ranks leave together.

    Nothing of MPI goes on outside of its calls: who leaves it for gloo with a message still to be sent keeps
    others waiting for ever.
    """

    def __init__(self, route: Route, comm: Any) -> None:
        self._route, self._comm = route, comm

    def dispatch(self) -> None:
        """Tokens to their experts' ranks."""
        self._route.dispatch()

    def combine(self) -> None:
        """Answers back to their tokens, and the weighted sum."""
        self._route.combine()
        self.delivered = self._route.delivered

    def settle(self) -> None:
        """Waits for all ranks, inside MPI."""
        super().settle()
        self._route.settle()
        self._comm.Barrier()


def key(route: str, quantize: str) -> str:
    """By which a route's bytes are told."""
    return f"{route}, {quantize or 'bf16'}"


def rounds(rank: int, num_ranks: int, given: dict[str, Any]) -> dict[str, Any]:
    """Measures on this rank, and returns a `Found` as JSON has it."""
    setting = Setting(**given)
    torch.set_num_threads(1)
    keep_freed_memory()
    ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0)  # as in `benchmarks.compare`
    mpi: Any = importlib.import_module("mpi4py.MPI") if setting.has_mpi else None
    inputs = Inputs.random(rank, num_ranks, setting.tokens)
    line = FileLine(Path(setting.folder) / LINE)
    with ExitStack() as stack:
        buffers = {
            name: stack.enter_context(
                EPBuffer(
                    num_max_tokens_per_rank=setting.tokens,
                    product=OURS[name].product,
                    comm_alg=OURS[name].comm_alg,
                    **SIZES,
                )
            )
            for name in setting.schemes
        }
        by_format = {each: _routes(inputs, buffers, each, mpi) for each in FORMATS}
        for _ in range(WARM_UP):
            posted = _check(by_format, buffers)
        runs = [
            run
            for quantize, routes in by_format.items()
            for run in _runs(routes, Case(num_ranks, setting.tokens, quantize), line, setting.is_apart)
        ]
        samples = reduce(runs, measure(runs, line, setting.iterations, 0, lambda _: None))
        _check(by_format, buffers)
        idle = _idle_share(line, setting.idle_s, len(buffers))
        dist.barrier()
    version = mpi.Get_library_version().split(",")[0] if mpi else ""
    return asdict(Found(samples, posted, idle, version))


def _routes(inputs: Inputs, buffers: Mapping[str, EPBuffer], quantize: str, mpi: Any) -> dict[str, Route]:
    routes: dict[str, Route] = {GLOO: AllToAllV(inputs, Gloo(), quantize)}
    for name, buffer in buffers.items():
        ours = Hierarchy if OURS[name].comm_alg == "hierarchy" else Slots
        routes[name] = ours(inputs, buffer, quantize)
    if mpi:
        comm = mpi.COMM_WORLD
        by_mpi: dict[str, Route] = {
            "mpi_alltoallv": AllToAllV(inputs, Mpi(comm), quantize),
            "mpi_allgather": AllGather(inputs, Mpi(comm), quantize),
            NATIVE: MpiNative(inputs, comm, quantize),
        }
        routes |= {name: ByMpi(route, comm) for name, route in by_mpi.items()}
    return routes


def _check(
    by_format: Mapping[str, dict[str, Route]], buffers: Mapping[str, EPBuffer]
) -> dict[str, list[int]]:
    """Holds all routes against gloo's, and returns the bytes that each of ours has posted to other hosts."""
    posted = {}
    for quantize, routes in by_format.items():
        check_routes(routes, GLOO)
        for name, buffer in buffers.items():
            traffic = buffer.traffic("dispatch"), buffer.traffic("combine")
            assert all(traffic), "hosts are reached by queues"
            posted[key(name, quantize)] = [
                each.payload_bytes.between + each.framing_bytes.between for each in traffic if each
            ]
    return posted


def _runs(routes: Mapping[str, Route], case: Case, line: StartingLine, is_apart: bool) -> Sequence[Run]:
    if is_apart:
        ours = [name for name in routes if name in OURS]
        return [Run(name, case, functools.partial(apart, routes[name], line)) for name in ours]
    return [Run(name, case, functools.partial(together, route)) for name, route in routes.items()]


def _idle_share(line: StartingLine, seconds: float, num_nics: int) -> float:
    if not seconds:
        return 0.0
    line.wait()
    before = nic_seconds()
    time.sleep(seconds)
    return (nic_seconds() - before) / seconds / num_nics
