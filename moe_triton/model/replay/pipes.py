"""The clock of one vector core: four pipes that work in order and side by side.

S runs control flow and scalar instructions in the order of the program, and hands the others' instructions to
their queues. A pipe takes its queue in order. What an instruction takes:

- a copy occupies MTE2 or MTE3 for its bytes, and is complete a latency later; the next copy may begin
  meanwhile;
- a vector instruction occupies V for its latency and its bytes;
- a flag that is set is seen by the other pipe `flag_cycles` after all that was before it on its own pipe is
  complete; a pipe that waits for a flag stands still until then;
- a barrier makes a pipe wait until all that was before it is complete; one of all pipes makes S wait too.

An instruction leaves its queue when it begins, and S waits while a queue is full. Time is kept with what it
was spent on: every moment is the end of a chain of spans, of which each began when the one before it ended.
The chain that ends last is the critical path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from moe_triton.core.errors import ToolchainError
from moe_triton.model.constants import Machine
from moe_triton.model.replay.attributes import EVERY_PIPE, PIPES
from moe_triton.model.replay.instructions import Instruction, Stream

SCALAR, GLOBAL, BYTES, VECTOR, FLAGS = "scalar", "scalar loads", "memory bandwidth", "vector", "flags"
PARTS = (SCALAR, GLOBAL, "MTE2", BYTES, VECTOR, "MTE3", FLAGS)
"""What time on the critical path goes to: instructions of S and their issue; scalar accesses to global
memory; latency of loads; bytes of copies; vector instructions; latency of stores; flags between pipes."""

EMPTY, BARRIER, TAIL = "empty queue", "barrier", "end of the program"


class Moment:
    """A time in cycles, and what it was spent on.

    Attributes:
        at: cycles from the begin of the program.
        before: the moment at which the last span began.
        part: what the last span went to, one of `PARTS`.
    """

    __slots__ = ("at", "before", "part")  # a replay makes one for every instruction

    def __init__(self, at: float, before: Moment | None = None, part: str = "") -> None:
        self.at, self.before, self.part = at, before, part

    def later(self, part: str, cycles: float) -> Moment:
        """This many cycles on."""
        return Moment(self.at + cycles, self, part)

    def parts(self) -> dict[str, float]:
        """Cycles by what they went to; their sum is `at`."""
        found = dict.fromkeys(PARTS, 0.0)
        moment = self
        while moment.before is not None:
            found[moment.part] += moment.at - moment.before.at
            moment = moment.before
        return found


BEGIN = Moment(0.0)


@dataclass(frozen=True)
class Span:
    """An instruction on its pipe, in cycles."""

    pipe: str
    name: str
    begin: float
    end: float
    num_bytes: int = 0


@dataclass(frozen=True)
class Mark:
    """Where a turn of a loop begins, or the loop ends: when all that was issued before would be complete."""

    loop: int
    is_end: bool
    at: float


@dataclass
class Unit:
    """One pipe.

    Attributes:
        free: when it can begin with the next instruction.
        done: when all that it has begun is complete.
        begun: when the last instructions began, as many as the queue has entries.
        busy: cycles occupied.
        stalls: cycles in which it could have worked, by cause.
    """

    begun: deque[Moment]
    free: Moment = BEGIN
    done: Moment = BEGIN
    busy: float = 0.0
    stalls: dict[str, float] = field(default_factory=dict)

    def stall(self, cause: str, until: Moment) -> None:
        """Stands still until a moment, if that is yet to come."""
        gap = until.at - self.free.at
        if gap > 0:
            self.stalls[cause] = self.stalls.get(cause, 0.0) + gap
            self.free = until
            if until.at > self.done.at:
                self.done = until


class Core:
    """Runs streams, one after the other.

    Args:
        machine: its constants, in cycles.
        bytes_per_cycle: of one pipe's copies.
        spans: gets every instruction, if given.
    """

    def __init__(self, machine: Machine, bytes_per_cycle: float, spans: list[Span] | None = None) -> None:
        self.machine, self.bytes_per_cycle, self.spans = machine, bytes_per_cycle, spans
        entries = int(machine.queue_entries)
        self.units = {pipe: Unit(deque(maxlen=entries)) for pipe in PIPES}
        self.marks: list[Mark] = []
        self._scalar = self.units["S"]
        self._flags: dict[tuple[str, str, int], Moment] = {}
        self._issue_cycles = machine.issue_cycles

    @property
    def end(self) -> Moment:
        """When everything is complete."""
        return max((unit.done for unit in self.units.values()), key=lambda moment: moment.at)

    def run(self, stream: Stream) -> None:
        """Runs a program.

        Raises:
            ToolchainError: it waits for a flag that is not set, sets one twice, or leaves one set.
        """
        steps: dict[int, Callable[[], None]] = {}
        for code in stream.codes:
            step = steps.get(code)
            if step is None:
                step = steps[code] = self._step(stream.instructions[code])
            step()
        if self._flags:
            raise ToolchainError(f"flags are still set at the end: {sorted(self._flags)}")

    def _step(self, one: Instruction) -> Callable[[], None]:
        return _STEPS[one.kind](self, one)

    def _work(self, pipe: str, part: str, cycles: float) -> None:
        """S works."""
        unit = self.units[pipe]
        unit.busy += cycles
        unit.done = unit.free = unit.free.later(part, cycles)

    def _issue(self, unit: Unit, pipe: str) -> Moment:
        """S hands an instruction to a queue.

        Returns:
            When the pipe has it in front of itself: S is ready, and the pipe has done what was before it.
        """
        scalar = self._scalar
        if len(unit.begun) == unit.begun.maxlen:
            scalar.stall(f"full queue of {pipe}", unit.begun[0])
        cycles = self._issue_cycles
        scalar.busy += cycles
        scalar.done = scalar.free = scalar.free.later(SCALAR, cycles)
        unit.stall(EMPTY, scalar.free)
        unit.begun.append(unit.free)
        return unit.free

    def _copy(self, one: Instruction) -> Callable[[], None]:
        cycles = one.num_bytes / self.bytes_per_cycle
        m = self.machine
        latency = m.load_latency_cycles if one.pipe == "MTE2" else m.store_latency_cycles
        return partial(self._occupy, one, cycles, BYTES, latency, one.pipe)

    def _vector(self, one: Instruction) -> Callable[[], None]:
        m = self.machine
        factor = getattr(m, one.factor) if one.factor else 1.0
        cycles = m.vector_latency_cycles + factor * one.num_bytes / m.vector_bytes_per_cycle
        return partial(self._occupy, one, cycles, VECTOR, 0.0, VECTOR)

    def _occupy(self, one: Instruction, cycles: float, part: str, latency: float, then: str) -> None:
        unit = self.units[one.pipe]
        begin = self._issue(unit, one.pipe)
        unit.free = begin.later(part, cycles)
        unit.busy += cycles
        unit.done = unit.free.later(then, latency) if latency else unit.free
        if self.spans is not None:
            self.spans.append(Span(one.pipe, one.name, begin.at, unit.free.at, one.num_bytes))

    def _scalars(self, one: Instruction) -> Callable[[], None]:
        return partial(self._work, "S", SCALAR, one.count * self.machine.scalar_cycles)

    def _access(self, one: Instruction) -> Callable[[], None]:
        m = self.machine
        cycles, part = (m.scalar_global_cycles, GLOBAL) if one.is_global else (m.scalar_local_cycles, SCALAR)
        return partial(self._load, one, cycles, part)

    def _load(self, one: Instruction, cycles: float, part: str) -> None:
        begin = self._scalar.free.at
        self._work("S", part, cycles)
        if self.spans is not None:
            self.spans.append(Span("S", one.name, begin, begin + cycles, one.num_bytes))

    def _set(self, one: Instruction) -> Callable[[], None]:
        key = one.pipe, one.other, one.event
        return partial(self._raise, one.pipe, key, self.machine.flag_cycles)

    def _raise(self, pipe: str, key: tuple[str, str, int], cycles: float) -> None:
        unit = self._taken(pipe)
        if key in self._flags:
            raise ToolchainError(f"the flag {key} is set again before it is waited for")
        self._flags[key] = unit.done.later(FLAGS, cycles)

    def _wait(self, one: Instruction) -> Callable[[], None]:
        return partial(self._await, one.pipe, (one.other, one.pipe, one.event))

    def _await(self, pipe: str, key: tuple[str, str, int]) -> None:
        unit = self._taken(pipe)
        if key not in self._flags:
            raise ToolchainError(f"the flag {key} is waited for before it is set")
        unit.stall(f"flag of {key[0]}", self._flags.pop(key))

    def _taken(self, pipe: str) -> Unit:
        """The pipe, with a flag or barrier in front of it."""
        unit = self.units[pipe]
        if pipe == "S":
            self._work("S", SCALAR, self.machine.scalar_cycles)
        else:
            self._issue(unit, pipe)
        return unit

    def _barrier(self, one: Instruction) -> Callable[[], None]:
        return self._all if one.pipe == EVERY_PIPE else partial(self._alone, one.pipe)

    def _alone(self, pipe: str) -> None:
        unit = self._taken(pipe)
        unit.stall(BARRIER, unit.done)

    def _all(self) -> None:
        self._work("S", SCALAR, self.machine.scalar_cycles)
        self._scalar.stall(BARRIER, self.end)

    def _mark(self, one: Instruction) -> Callable[[], None]:
        return lambda: self.marks.append(Mark(one.count, one.kind == "end", self.end.at))


_STEPS: dict[str, Callable[[Core, Instruction], Callable[[], None]]] = {
    "scalar": Core._scalars,
    "element": Core._access,
    "copy": Core._copy,
    "vector": Core._vector,
    "set": Core._set,
    "wait": Core._wait,
    "barrier": Core._barrier,
    "turn": Core._mark,
    "end": Core._mark,
}


def idle(units: Iterable[Unit], end: float) -> None:
    """Charges each pipe with the time from its last instruction to the end of the program."""
    for unit in units:
        unit.stalls[TAIL] = end - unit.free.at
