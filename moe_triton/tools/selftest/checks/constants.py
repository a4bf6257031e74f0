"""The model's constants that can be measured through the back end.

Each figure that has the name of a constant of the model's list is that constant: the median of
several passes, with the lowest and the highest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import torch
import torch.distributed as dist

from moe_triton.backends.base import Backend
from moe_triton.core import ascendc
from moe_triton.core.kernel import AscendCKernel
from moe_triton.core.plan import Placeholder, Plan, joined
from moe_triton.kernels import Case, Shape, Sizes, families
from moe_triton.schemes.fullmesh.ascendc import COMBINE_SEND, FUSED
from moe_triton.tools.selftest.check import HIDDEN, Check, Finding, Place, Settings
from moe_triton.tools.selftest.checks.environment import BACKEND, cpu_ghz
from moe_triton.tools.selftest.checks.windows import FLAGS, WRITES
from moe_triton.tools.selftest.cpu_probe import CONSTANTS as CPU_CONSTANTS
from moe_triton.tools.selftest.cpu_probe import CpuProbe
from moe_triton.tools.selftest.kernel_cases import MANY_LAUNCHES, ReadyCase, prepare, tiny_plan
from moe_triton.tools.selftest.timing import Line, fit_line, median_us, over_passes
from moe_triton.tools.selftest.wires import Wires, launch_of_zeros

STAGE = "constants"
ROW_BYTES = 2 * HIDDEN
COPY_BYTES = tuple(1 << n for n in range(16, 27, 2))
WRITE_ROWS = (1, 4, 16, 64, 256)
ALL_BLOCKS, ONE_BLOCK = "stream_gb_per_s", "stream_alone_gb_per_s"
FIT = "worst_error_of_the_fit"
HOP = "hop_us"  # of a write to the nearest neighbour; which one that is, the product says


def constant_checks(settings: Settings, ranks: int) -> list[Check]:
    """One device first, then two of them."""
    of_cpu = Check("work of ranks that share a CPU", STAGE, measure_cpu, ranks=ranks, needs=(WRITES,))
    return [
        Check("launches", STAGE, measure_launches, needs=(BACKEND,)),
        Check("memcpy", STAGE, measure_memcpy, needs=(BACKEND,)),
        Check("streaming kernels", STAGE, measure_streaming, needs=(BACKEND,)),
        Check("barrier of all cores", STAGE, measure_sync_all, ranks=ranks, needs=(FLAGS,)),
        Check("flag latency", STAGE, measure_flags, ranks=ranks, needs=(FLAGS,)),
        Check("writes to a peer", STAGE, measure_writes, ranks=ranks, needs=(WRITES,)),
        *([of_cpu] if settings.backend == "cpu" else []),
    ]


def measure_launches(place: Place) -> Finding:
    """The time of a plan of one nearly empty launch, and of each further launch."""
    one, two_and_more = (tiny_plan(place.backend, launches) for launches in (1, MANY_LAUNCHES))

    def measure() -> dict[str, float]:
        one_us, many_us = _median_of(place, one), _median_of(place, two_and_more)
        added_us = max(0.0, (many_us - one_us) / (MANY_LAUNCHES - 1))
        return {"call_overhead_us": one_us, "launch_stream_us": added_us}

    figures = over_passes(measure, ("call_overhead_us", "launch_stream_us"))
    if place.settings.backend == "cpu":
        figures["cores"] = float(place.backend.num_blocks(1))
        if ghz := cpu_ghz():
            figures["clock_ghz"] = ghz
    return Finding(figures=figures)


def measure_sync_all(place: Place) -> Finding:
    """Two phases that find nothing to do, with a barrier of all cores between them and without."""
    backend, blocks = place.backend, place.backend.num_blocks(1)
    if blocks == 1:
        return Finding(skipped="one block has no others to wait for")
    report = torch.zeros(2, blocks, ascendc.REPORT_WORDS, dtype=torch.int32, device=backend.device)

    def sending(then: AscendCKernel) -> Callable[[], int]:
        phases = [
            launch_of_zeros(kernel.name, kernel, "communication", blocks, report=Placeholder("report"))
            for kernel in (COMBINE_SEND, then)
        ]
        plan = Plan("selftest", 0, tuple(joined(phases, FUSED)))
        executable = backend.compile(plan, report, {"report": report})
        return lambda: executable.run({})

    without, with_barrier = sending(ascendc.DISPATCH_WAIT), sending(ascendc.POST_STATUS)

    def measure() -> dict[str, float]:
        us = [_median_of(place, send) for send in (without, with_barrier)]
        return {"without_us": us[0], "with_us": us[1], "sync_all_us": max(0.0, us[1] - us[0])}

    figures = over_passes(measure, ("sync_all_us",)) if place.rank == 0 else {}
    dist.barrier()
    return Finding(figures=figures)


def measure_memcpy(place: Place) -> Finding:
    """Copies on the device, of growing size."""
    sizes = COPY_BYTES[:-1] if place.settings.quick else COPY_BYTES
    source, target = (torch.ones(sizes[-1], dtype=torch.uint8, device=place.backend.device) for _ in range(2))

    def measure() -> dict[str, float]:
        us = {
            size: _median_of(place, lambda n=size: target[:n].copy_(source[:n]))  # type: ignore[misc]
            for size in sizes
        }
        line = _line("copies", us)
        return {"memcpy_gb_per_s": line.gb_per_s, "memcpy_latency_us": line.latency_us, FIT: line.worst_error}

    return _finding(measure, ("memcpy_gb_per_s",))


def measure_streaming(place: Place) -> Finding:
    """Bandwidth of kernels that are bound by memory, on all blocks and on one."""
    backend = place.backend
    tokens = 64 if place.settings.quick else 512
    blocks = backend.num_blocks(1)
    shape = Shape(hidden=HIDDEN, target=backend.name, zoned=False)
    sizes = Sizes(tokens, seed=place.settings.seed, unrouted=0)
    cases = [Case(family, shape, sizes) for family in families().values() if family.streams]
    ready = [
        (case, number, rate, prepare(case, backend, number))
        for case in cases
        for number, rate in ((blocks, ALL_BLOCKS), (1, ONE_BLOCK))
    ]

    def measure() -> dict[str, float]:
        figures = {"blocks": float(blocks), ALL_BLOCKS: 0.0, ONE_BLOCK: 0.0}
        for case, number, rate, prepared in ready:
            gb_per_s = _rate_of(case, prepared, backend, _iterations(place.settings))
            figures[f"{case.name}, {number} block(s): gb_per_s"] = gb_per_s
            figures[rate] = max(figures[rate], gb_per_s)
        return figures

    return Finding(figures=over_passes(measure, (ALL_BLOCKS, ONE_BLOCK)))


def measure_flags(place: Place) -> Finding:
    """Consecutive barriers: flags from every rank to every rank, less the time of two launches."""
    wires = Wires(place.backend, 32, 1, place.settings.wait_s)
    two_launches = tiny_plan(place.backend, 2)

    def measure() -> dict[str, float]:
        dist.barrier()
        barrier_us = _median_of(place, wires.post_and_wait)
        wires.barrier()  # raises if one of those has timed out
        launches_us = _median_of(place, two_launches)
        return {
            "barrier_us": barrier_us,
            "two_launches_us": launches_us,
            "flag_latency_us": max(0.0, barrier_us - launches_us),
        }

    with closing(wires):
        figures = over_passes(measure, ("flag_latency_us",))
        dist.barrier()
    return Finding(figures=figures)


def measure_writes(place: Place) -> Finding:
    """Rank 0 writes to rank 1's window, of growing size, while all others wait."""
    backend = place.backend
    wires = Wires(backend, ROW_BYTES, WRITE_ROWS[-1], place.settings.wait_s)
    rows = torch.ones(WRITE_ROWS[-1], ROW_BYTES, dtype=torch.uint8, device=backend.device)
    numbers = torch.tensor((0, *WRITE_ROWS), dtype=torch.int32).to(backend.device)

    def write(i: int) -> float:
        return _median_of(place, lambda: wires.send(1, rows, number=numbers[i : i + 1]))

    def measure() -> dict[str, float]:
        nothing_us = write(0)
        line = _line("writes", {n * ROW_BYTES: write(i) for i, n in enumerate(WRITE_ROWS, 1)})
        return {
            "remote_write_gb_per_s": line.gb_per_s,
            HOP: max(0.0, line.latency_us - nothing_us),  # without a launch that writes nothing
            "no_rows_us": nothing_us,
            FIT: line.worst_error,
        }

    with closing(wires):
        finding = _finding(measure, ("remote_write_gb_per_s", HOP)) if place.rank == 0 else Finding()
        dist.barrier()
    return finding


def measure_cpu(place: Place) -> Finding:
    """What ranks of a CPU take for each row, byte, entry and id, all at once."""
    with closing(CpuProbe(place.backend, place.rank, place.num_ranks, place.settings.wait_s)) as probe:
        return Finding(figures=over_passes(probe.measure, CPU_CONSTANTS if probe.works else ()))


class _NoLineError(Exception):
    """Times that do not grow with bytes."""


def _line(what: str, us_by_bytes: Mapping[int, float]) -> Line:
    if (line := fit_line(us_by_bytes)) is None:
        raise _NoLineError(f"{what} do not take longer the larger they are: {us_by_bytes} (bytes: us)")
    return line


def _finding(measure: Callable[[], Mapping[str, float]], constants: Sequence[str]) -> Finding:
    """Figures over all passes; what is wrong if times are no line."""
    try:
        return Finding(figures=over_passes(measure, constants))
    except _NoLineError as error:
        return Finding(wrong=(str(error),))


def _iterations(settings: Settings) -> int:
    """The number of iterations in one pass."""
    return 4 if settings.quick else 40


def _median_of(place: Place, call: Callable[[], object]) -> float:
    return median_us(call, place.backend, _iterations(place.settings))


def _rate_of(case: Case, ready: ReadyCase, backend: Backend, iterations: int) -> float:
    """1e9 bytes per second of the kernel itself."""
    us = []
    backend.measure(True)
    for _ in range(iterations):
        ready.executable.run(ready.bindings)
        backend.synchronize()
        us.append(ready.executable.durations_us()[case.kernel.name])
    backend.measure(False)
    assert case.bytes_moved is not None
    return case.bytes_moved / statistics.median(us) / 1e3
