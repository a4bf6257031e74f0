"""`replayed`: the time of a launch of a Triton kernel, from what the NPU compiler made of the kernel.

A program's control flow runs on the arguments of the launch: integers and tables of integers. Whatever else a
kernel reads (rows, flags, what vector instructions leave in the unified buffer) is unknown; a kernel whose
control flow depends on that is refused.

Every program is listed, programs that issue the same are replayed once, and the slowest core counts. Cores
share the memory: while n of them copy, a pipe's copies have 1/n of the machine's bandwidth, and no more than
a single core can have; and a launch never takes less than all bytes of all programs at the machine's
bandwidth.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from autotune.model.constants import Machine
from autotune.model.cost import Cost, Table, Work
from autotune.model.kernel_costs import clock
from autotune.model.kernel_costs.clock import ALL_PIPES, BEFORE, BYTES, OP, SPAN, Kind, cycles_of, ticks_of
from autotune.model.kernel_costs.counted import library
from autotune.model.kernel_costs.replay.instructions import DIVIDE_FACTOR, Instruction, Stream
from autotune.model.kernel_costs.replay.operations import EVERY_PIPE, PIPES, UNKNOWN, Number, UndecidedError
from autotune.model.kernel_costs.replay.translate import (
    GENERATED,
    GRID_ARGUMENTS,
    SYSTEM_ARGUMENTS,
    Translation,
    translated,
)
from autotune.npu_compiler.compile import kernel_function
from autotune.npu_compiler.socs import SOC_OF_PRODUCT, soc_named
from moe_triton.core.errors import MoeTritonError, ToolchainError
from moe_triton.core.kernel import Arg, TritonKernel

_PIPES = {EVERY_PIPE: ALL_PIPES, **{pipe: number for number, pipe in enumerate(library.PIPES)}}
KEPT_LAUNCHES, KEPT_REPLAYS = 256, 1024
Argument = int | Table
_INTEGERS = {f"*i{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)}


class ReplayError(MoeTritonError):
    """A kernel cannot be replayed: the message names it and its operation."""


@contextmanager
def named(kernel: str) -> Iterator[None]:
    """Has errors say which kernel they are about."""
    try:
        yield
    except ToolchainError as error:
        raise ToolchainError(f"{kernel} cannot be replayed: {error}") from None


@functools.cache
def translation_of(kernel: TritonKernel, soc: str) -> Translation:
    """A kernel as the NPU compiler made it, as Python.

    Args:
        kernel: built for the NPU.
        soc: name of the chip.

    Raises:
        ToolchainError: the compiler rejects it, or the model does not know something that is in it.
        ReplayError: the compiled function takes other arguments.
    """
    function = kernel_function(kernel, soc_named(soc))
    with named(kernel.name):
        translation = translated(function)
    if translation.num_arguments != len(kernel.args):
        raise ReplayError(
            f"the NPU's {kernel.name} takes {translation.num_arguments} arguments beside the system's, not "
            f"{len(kernel.args)}"
        )
    return translation


def streams_of(
    kernel: TritonKernel, soc: str, arguments: Mapping[str, Argument], programs: int
) -> list[Stream]:
    """What each program of a launch issues.

    Args:
        kernel: built for the NPU.
        soc: name of the chip.
        arguments: by name: numbers, and tables for pointers.
        programs: number of programs, in x.

    Raises:
        ToolchainError: see `translation_of`.
        ReplayError: control flow depends on data, or a table ends before what is read of it.
    """
    return recorded(kernel, translation_of(kernel, soc), arguments, programs)


def recorded(
    kernel: TritonKernel, translation: Translation, arguments: Mapping[str, Argument], programs: int
) -> list[Stream]:
    """`streams_of` of a translated kernel."""
    recorder = _Recorder(kernel, translation, [_value(arg, arguments[arg.name]) for arg in kernel.args])
    return [recorder.stream(program, (programs, 1, 1)) for program in range(programs)]


def _value(arg: Arg, given: Argument) -> int | np.ndarray | None:
    if not isinstance(given, Table):
        return int(given)
    element = _INTEGERS.get(arg.type)
    if given.values is None or element is None:
        return None
    flat = np.ascontiguousarray(given.values).reshape(-1).view(np.uint8)
    whole = flat[: flat.size // element.itemsize * element.itemsize]
    return whole.view(element)


@dataclass
class _Recorder:
    """Records what programs of one launch issue.

    Attributes:
        values: the user's arguments: a number, the integers behind a pointer, or None if they are not known.
    """

    kernel: TritonKernel
    translation: Translation
    values: list[int | np.ndarray | None]

    def __post_init__(self) -> None:
        self._instructions = list(self.translation.instructions)
        self._sized: dict[tuple[int, int], int] = {}

    def stream(self, program: int, grid: tuple[int, int, int]) -> Stream:
        """What one program issues."""
        codes = array("L")
        numbers = [value if isinstance(value, int) else 0 for value in self.values]
        arguments = [*[0] * SYSTEM_ARGUMENTS, *numbers, *grid]
        assert len(grid) == GRID_ARGUMENTS
        try:
            self.translation.run(codes.append, self._code_of, self._element, program, *arguments)
        except (UndecidedError, ZeroDivisionError) as error:
            why = "divides by 0" if isinstance(error, ZeroDivisionError) else "depends on data"
            raise ReplayError(
                f"the control flow of {self.kernel.name} cannot be replayed: it {why}, in "
                f"{self._where(error)}"
            ) from None
        return Stream(codes, self._instructions, self.translation.innermost)

    def _where(self, error: Exception) -> str:
        """The operation that the innermost line of generated code came from."""
        operation, frame = "its arguments", error.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code.co_filename == GENERATED:
                operation = self.translation.operations.get(frame.tb_lineno, operation)
            frame = frame.tb_next
        return operation

    def _code_of(self, template: int, number: int) -> int:
        """The code of an instruction whose bytes, or event, are only known now."""
        key = template, number
        code = self._sized.get(key)
        if code is None:
            code = self._sized[key] = len(self._instructions)
            self._instructions.append(self._filled(self.translation.instructions[template], number))
        return code

    def _filled(self, template: Instruction, number: Number) -> Instruction:
        known = int(number)  # or it is undecided
        if template.kind in ("set", "wait"):
            return replace(template, event=known)
        return replace(template, num_bytes=known)

    def _element(self, argument: int, place: Number) -> Number:
        """A scalar load from an argument."""
        index = argument - SYSTEM_ARGUMENTS
        values = self.values[index] if 0 <= index < len(self.values) else None
        if values is None or isinstance(values, int) or place is UNKNOWN:
            return UNKNOWN
        if not 0 <= cast(int, place) < values.size:
            name = self.kernel.args[index].name
            raise ReplayError(
                f"{self.kernel.name} reads element {place} of {name}, of which {values.size} are known"
            )
        return int(values.item(cast(int, place)))


@dataclass(frozen=True)
class Span:
    """An instruction on its pipe, in cycles."""

    pipe: str
    name: str
    begin: float
    end: float
    num_bytes: int = 0


@dataclass(frozen=True)
class Replay:
    """One core's time, in cycles.

    Attributes:
        cycles: until everything is complete. parts: cycles on the critical path, by what they went to
            (`autotune.model.kernel_costs.clock.PARTS`); their sum is `cycles`.
        busy: by pipe: occupied.
        stalls: by pipe and cause: not occupied. With `busy` they sum to `cycles`, for each pipe.
        turns: of the innermost loop of run-time length that takes longest: a row, for most kernels.
        cycles_per_turn: how much longer one more turn takes: the slope over the second half of the turns.
            Without such a loop it is 0; and a turn takes no less than its share of the launch's bytes.
        spans: instructions on their pipes, if they were asked for.
    """

    cycles: float
    parts: Mapping[str, float]
    busy: Mapping[str, float]
    stalls: Mapping[str, Mapping[str, float]]
    turns: int
    cycles_per_turn: float
    spans: Sequence[Span] = ()

    @property
    def bound(self) -> str:
        """What takes the largest part of the critical path."""
        return max(self.parts, key=lambda part: self.parts[part])


def timed(
    streams: Sequence[Stream], machine: Machine, bytes_per_cycle: float, with_spans: bool = False
) -> Replay:
    """Replays programs of one launch on one core, one after the other.

    Args:
        bytes_per_cycle: of one copy.
        with_spans: keep every instruction.

    Raises:
        ToolchainError: a flag is waited for that is not set, or one is set twice.
    """
    first = streams[0]
    codes = np.concatenate([np.array(stream.codes, np.int64) for stream in streams])
    ops = np.zeros(len(first.instructions), OP)
    for code in np.unique(codes).tolist():
        ops[code] = _op(first.instructions[code], machine, bytes_per_cycle)
    (core,) = clock.cores(ops[codes], np.array([len(codes)]), machine, with_spans)
    events = core.events
    turns, slope = _slope(first, codes[events["op"]], events)
    spans = _spans(first, codes[events["op"]], events) if with_spans else ()
    busy, stalls = core.busy, core.stalls
    busy, stalls = {pipe: busy[pipe] for pipe in PIPES}, {pipe: stalls[pipe] for pipe in PIPES}
    return Replay(float(cycles_of(core.end)), core.parts, busy, stalls, turns, slope, spans)


def _op(one: Instruction, m: Machine, bytes_per_cycle: float) -> tuple[int, ...]:
    """An `OP`."""
    kind, ticks, latency, noted = Kind.SCALAR, 0.0, 0.0, 0
    match one.kind:
        case "scalar":
            ticks = one.count * m.scalar_cycles
        case "element":
            kind = Kind.GLOBAL if one.is_global else Kind.SCALAR
            ticks = m.scalar_global_cycles if one.is_global else m.scalar_local_cycles
        case "copy":
            kind, ticks = Kind.COPY, one.num_bytes / bytes_per_cycle
            latency = m.load_latency_cycles if one.pipe == "MTE2" else m.store_latency_cycles
        case "vector":
            factor = {"": 1, "divide": DIVIDE_FACTOR}.get(one.factor) or m.vector_reduce_factor
            kind, ticks = (
                Kind.VECTOR,
                m.vector_latency_cycles + factor * one.num_bytes / m.vector_bytes_per_cycle,
            )
        case "set":
            kind, ticks = Kind.SET, m.flag_cycles
        case "wait":
            kind = Kind.WAIT
        case "barrier":
            kind = Kind.BARRIER
        case "turn" | "end":
            noted = BEFORE
    other = _PIPES[one.other] if one.other else 0
    return kind, _PIPES[one.pipe], other, noted, one.event, 0, int(ticks_of(ticks)), int(ticks_of(latency))


def _spans(stream: Stream, codes: np.ndarray, events: np.ndarray) -> list[Span]:
    spans = []
    for code, (_, what, *times) in zip(codes.tolist(), events.tolist(), strict=True):
        one = stream.instructions[code]
        if what == SPAN and one.kind in ("copy", "vector", "element"):
            begin, end = cycles_of(np.array(times)).tolist()
            spans.append(Span(one.pipe, one.name, begin, end, one.num_bytes))
    return spans


def _slope(stream: Stream, codes: np.ndarray, events: np.ndarray) -> tuple[int, float]:
    """Turns of the loop that takes longest, and cycles for one of them.

    A mark's time is that of a replay that ends there.

    Args:
        stream: of the launch.
        codes: (E,) of the instructions that events are of.
        events: (E,) of `autotune.model.kernel_costs.clock.Clocked`.
    """
    marks = {
        (one.kind, one.count): events["begin"][(codes == code) & (events["what"] == BEFORE)]
        for code, one in enumerate(stream.instructions)
        if one.kind in ("turn", "end") and one.count in stream.innermost
    }
    longest, turns, slope = 0, 0, 0.0
    for loop in stream.innermost:
        begins, ends = (marks.get((kind, loop), events["begin"][:0]) for kind in ("turn", "end"))
        end = int(ends[-1]) if len(ends) else 0
        if len(begins) and end - begins[0] > longest:
            longest, turns = end - begins[0], len(begins)
            slope = float(cycles_of(end - begins[turns // 2])) / (turns - turns // 2)
    return turns, slope


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
    launch = replay_of(kernel, soc, arguments, work.blocks, machine)
    us_per_cycle = 1e-3 / machine.clock_ghz
    parts = {part: cycles * us_per_cycle for part, cycles in launch.slowest.parts.items()}
    return Cost(parts, launch.read, launch.written, detail=dict(launch.slowest.busy))


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
            given = [list(self.streams[core::cores]) for core in range(min(cores, len(self.streams)))]
            different = {tuple(stream.codes.tobytes() for stream in streams): streams for streams in given}
            self._by_core[cores] = list(different.values())
        return self._by_core[cores]


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
