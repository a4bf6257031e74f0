"""`replayed`: the time of a launch of a Triton kernel, from what the NPU compiler made of the kernel.

Every program is listed, programs that issue the same are replayed once, and the slowest core counts. Cores
share the memory: while n of them copy, a pipe's copies have 1/n of the machine's bandwidth, and no more than
a single core can have; and a launch never takes less than all bytes of all programs at the machine's
bandwidth.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autotune.model.bodies.clock import BYTES
from autotune.model.bodies.replay.instructions import Stream
from autotune.model.bodies.replay.program import Argument, ReplayError, named, streams_of
from autotune.model.bodies.replay.result import Replay, timed
from autotune.model.constants import Machine
from autotune.model.cost import Cost, Work
from autotune.npu_compiler.socs import SOC_OF_PRODUCT
from moe_triton.core.kernel import TritonKernel

KEPT_LAUNCHES, KEPT_REPLAYS = 256, 1024


@dataclass(frozen=True)
class Replayed:
    """A launch.

    Attributes:
        slowest: the replay of the slowest core, with the memory's part if that is the bound.
        read, written: bytes of global memory, of all programs.
        bytes_per_cycle: of one pipe's copies.
        active: cores that copy anything.
    """

    slowest: Replay
    read: int
    written: int
    bytes_per_cycle: float
    active: int


def replayed(work: Work, machine: Machine) -> Cost:
    """The time of a launch: `autotune.model.cost.Body`.

    Raises:
        ToolchainError: the compiler rejects the kernel, or the model does not know something that is in it.
        ReplayError: its control flow depends on data that the launch does not have.
    """
    kernel = work.kernel
    assert isinstance(kernel, TritonKernel), kernel.name
    for name, value in work.arguments.items():
        if isinstance(value, tuple):
            raise ReplayError(f"argument {name} of {kernel.name} is a region, which no Triton kernel takes")
    soc = SOC_OF_PRODUCT[work.traffic.config.product]
    arguments: Mapping[str, Argument] = work.arguments  # type: ignore[assignment]
    found = replay_of(kernel, soc, arguments, work.blocks, machine)
    us_per_cycle = 1e-3 / machine.clock_ghz
    parts = {part: cycles * us_per_cycle for part, cycles in found.slowest.parts.items()}
    return Cost(parts, found.read, found.written, detail=dict(found.slowest.busy))


def replay_of(
    kernel: TritonKernel,
    soc: str,
    arguments: Mapping[str, Argument],
    blocks: int,
    machine: Machine,
    with_spans: bool = False,
) -> Replayed:
    """Replays a launch.

    Args:
        kernel: built for the NPU.
        soc: name of the chip that it is compiled for.
        arguments: by name: numbers, and tables for pointers.
        blocks: programs.
        with_spans: keep every instruction of the slowest core.

    Raises:
        ToolchainError, ReplayError: see `replayed`.
    """
    key = tuple(_key_of(arguments[arg.name]) for arg in kernel.args)
    launch = _launch(_Call(kernel, soc, blocks, key, arguments))
    with named(kernel.name):
        return _replay(launch, machine, with_spans)


def _key_of(value: Argument) -> int | bytes | None:
    if isinstance(value, int):
        return value
    return None if value.values is None else value.values.tobytes()


@dataclass(frozen=True)
class _Call:
    """A launch's kernel and arguments.

    Attributes:
        key: stands for the arguments.
    """

    kernel: TritonKernel
    soc: str
    blocks: int
    key: tuple[int | bytes | None, ...]
    arguments: Mapping[str, Argument] = field(compare=False)


@dataclass(frozen=True, eq=False)
class _Launch:
    """What the programs of a launch issue, in their order."""

    streams: Sequence[Stream]
    _by_core: dict[int, list[list[Stream]]] = field(default_factory=dict)

    @functools.cached_property
    def read(self) -> int:
        return sum(stream.bytes_of("MTE2") + stream.bytes_of("S") for stream in self.streams)

    @functools.cached_property
    def written(self) -> int:
        return sum(stream.bytes_of("MTE3") for stream in self.streams)

    @functools.cached_property
    def active(self) -> int:
        """Programs that copy anything."""
        return sum(1 for stream in self.streams if stream.bytes_of("MTE2") + stream.bytes_of("MTE3"))

    def by_core(self, cores: int) -> list[list[Stream]]:
        """The programs of each core, in order; of cores that do the same, one."""
        if cores not in self._by_core:
            self._by_core[cores] = self._different(cores)
        return self._by_core[cores]

    def _different(self, cores: int) -> list[list[Stream]]:
        given = [list(self.streams[core::cores]) for core in range(min(cores, len(self.streams)))]
        different = {tuple(stream.codes.tobytes() for stream in streams): streams for streams in given}
        return list(different.values())


@functools.lru_cache(maxsize=KEPT_LAUNCHES)
def _launch(call: _Call) -> _Launch:
    return _Launch(streams_of(call.kernel, call.soc, call.arguments, call.blocks))


@functools.lru_cache(maxsize=KEPT_REPLAYS)
def _replay(launch: _Launch, machine: Machine, with_spans: bool) -> Replayed:
    cores = int(machine.cores)
    active = max(1, min(launch.active, cores))
    together = machine.stream_bytes_per_cycle * cores
    rate = min(machine.stream_bytes_per_cycle_alone, together / active)
    each = [timed(streams, machine, rate, with_spans) for streams in launch.by_core(cores)]
    slowest = max(each, key=lambda replay: replay.cycles)
    at_least = (launch.read + launch.written) / together
    return Replayed(_not_below(slowest, at_least), launch.read, launch.written, rate, active)


def _not_below(replay: Replay, cycles: float) -> Replay:
    """A replay in which pipes also wait for the memory that all cores share, each turn as long."""
    slope = max(replay.cycles_per_turn, cycles / replay.turns if replay.turns else 0.0)
    missing = cycles - replay.cycles
    if missing <= 0:
        return replace(replay, cycles_per_turn=slope)
    stalls = {pipe: {**causes, BYTES: missing} for pipe, causes in replay.stalls.items()}
    parts = {**replay.parts, BYTES: replay.parts[BYTES] + missing}
    return replace(replay, cycles=cycles, parts=parts, stalls=stalls, cycles_per_turn=slope)
