"""The clock of one vector core: four pipes that work in order and side by side.

S runs control flow and scalar instructions in the order of the program, and hands the others' instructions to
their queues. A pipe takes its queue in order. What an instruction takes:

- a copy occupies MTE2 or MTE3 for its bytes, and is complete a latency later; the next copy may begin
  meanwhile;
- a vector instruction occupies V for its latency and its bytes;
- a flag that is set is seen by the other pipe `flag_cycles` after all that was before it on its own pipe is
  complete; a pipe that waits for a flag stands still until then;
- a barrier makes a pipe wait until all that was before it is complete; one of all pipes makes S wait too.

An instruction leaves its queue when it begins, and S waits while a queue is full. Every time is the end of a
chain of spans, of which each began when the one before it ended, and knows what those were
(`autotune.model.bodies.replay.times`). The chain that ends last is the critical path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from autotune.model.bodies.replay.attributes import EVERY_PIPE, PIPES
from autotune.model.bodies.replay.folding import Piece, Repeat
from autotune.model.bodies.replay.instructions import Instruction, Stream
from autotune.model.bodies.replay.times import BYTES, FLAGS, GLOBAL, SCALAR, SUM, VECTOR, cycles_of, span
from autotune.model.constants import Machine
from moe_triton.core.errors import ToolchainError

EMPTY, BARRIER, TAIL = "empty queue", "barrier", "end of the program"

NUM_EVENT_IDS = 8
"""Numbers of flags that a kernel sets and waits for itself; those above are a queue's, which may end set."""

Step = Callable[[], None]
Name = tuple[str | int, ...]
"""Of a time: a flag's pipes and number, or a pipe and which of its times."""


@dataclass(frozen=True)
class Span:
    """An instruction on its pipe, in cycles."""

    pipe: str
    name: str
    begin: float
    end: float
    num_bytes: int = 0


@dataclass
class Marks:
    """Turns of a loop, by when all that was issued before would be complete, in ticks.

    Attributes:
        begins: of each turn.
        end: of the loop, the last time that it ended.
    """

    begins: list[int] = field(default_factory=list)
    end: int = 0


@dataclass
class Unit:
    """One pipe.

    Attributes:
        begun: when the last instructions began, as many as the queue has entries.
        free: when it can begin with the next instruction.
        done: when all that it has begun is complete.
        busy: ticks occupied.
        stalls: ticks in which it could have worked, by cause.
    """

    begun: deque[int]
    free: int = 0
    done: int = 0
    busy: int = 0
    stalls: dict[str, int] = field(default_factory=dict)

    def stall(self, cause: str, until: int) -> None:
        """Stands still until a time, if that is yet to come."""
        if until > self.free:
            gap = (until >> SUM) - (self.free >> SUM)
            self.stalls[cause] = self.stalls.get(cause, 0) + gap
            self.free = until
            if until > self.done:
                self.done = until


@dataclass(frozen=True)
class _State:
    """A core between two turns of a loop.

    Attributes:
        now: when S is free.
        times: all that may decide when later instructions begin, by what it is of. Of the entries of a queue
            those after `now`, counted from the last one: S does not wait for the others.
    """

    now: int
    times: dict[Name, int]

    def is_later_than(self, other: _State) -> bool:
        """Whether this is the other state, only later: what follows is then as after the other one.

        Either a time is later by as much as S is; or nothing has changed it, and it lies before all that is
        compared with it.
        """
        shift, before, times = self.now - other.now, other.now, other.times
        return self.times.keys() == times.keys() and all(
            time - (was := times[name]) == shift or time == was <= before for name, time in self.times.items()
        )


@dataclass(frozen=True)
class _Totals:
    """What a core has counted so far."""

    busy: dict[str, int]
    stalls: dict[str, dict[str, int]]
    num_begins: dict[int, int]
    ends: dict[int, int]


class Core:
    """Runs streams, one after the other.

    Turns of a loop that issue the same instructions sooner or later take the same time: when the state after
    a turn is one that was there before, only later, the turns in between repeat. They are then multiplied
    instead of run, which gives the same numbers exactly.

    Args:
        machine: its constants, in cycles. Each is read when the first instruction needs it.
        bytes_per_cycle: of one pipe's copies.
        spans: gets every instruction, if given; no turn is skipped then.
        skips: whether repeated turns are multiplied.
        post_us: microseconds of S for each post.

    Attributes:
        steps: kind of each step that began, and when what was issued before it would be complete, in ticks.
        posted: when each post had been made, in ticks.
    """

    def __init__(
        self,
        machine: Machine,
        bytes_per_cycle: float,
        spans: list[Span] | None = None,
        skips: bool = True,
        post_us: float = 0.0,
    ) -> None:
        self.machine, self.bytes_per_cycle, self.spans = machine, bytes_per_cycle, spans
        entries = int(machine.queue_entries)
        self.units = {pipe: Unit(deque(maxlen=entries)) for pipe in PIPES}
        self.marks: dict[int, Marks] = {}
        self._skips = skips and spans is None
        self._scalar = self.units["S"]
        self._flags: dict[Name, int] = {}
        self._issue_span = span(SCALAR, machine.issue_cycles)
        self._steps: list[Step | None] = []
        self.steps: list[tuple[int, int]] = []
        self.posted: list[int] = []
        self._post_us = post_us

    @property
    def end(self) -> int:
        """When everything is complete."""
        return max(unit.done for unit in self.units.values())

    def run(self, stream: Stream) -> None:
        """Runs a program.

        Raises:
            ToolchainError: it waits for a flag that is not set, sets one twice, or leaves one set.
        """
        self._stream, self._steps = stream, [None] * len(stream.instructions)
        self._play(stream.pieces if self._skips else [stream.codes])
        left = [flag for flag in self._flags if int(flag[2]) < NUM_EVENT_IDS]
        if left:
            raise ToolchainError(f"flags are still set at the end: {sorted(left)}")

    def _play(self, pieces: Sequence[Piece]) -> None:
        steps = self._steps
        for piece in pieces:
            if isinstance(piece, Repeat):
                self._repeat(piece)
                continue
            for code in piece:
                step = steps[code]
                if step is None:
                    one = self._stream.instructions[code]
                    step = steps[code] = _STEPS[one.kind](self, one)
                step()

    def _repeat(self, repeat: Repeat) -> None:
        """Runs turns until one leaves the core as an earlier one did, after 1, 2, 4, ... turns; the rest are
        multiplied."""
        turn, first, before, totals = 0, 0, self._state(), self._totals()
        while turn < repeat.count:
            self._play(repeat.body)
            turn += 1
            state, each = self._state(), turn - first
            if state.is_later_than(before):
                times = (repeat.count - turn) // each
                self._skip(before, state, totals, times)
                for _ in range(repeat.count - turn - times * each):
                    self._play(repeat.body)
                return
            if turn & (turn - 1) == 0:
                first, before, totals = turn, state, self._totals()

    def _state(self) -> _State:
        now = self._scalar.free
        times: dict[Name, int] = {**self._flags}
        for pipe, unit in self.units.items():
            times[pipe, "free"], times[pipe, "done"] = unit.free, unit.done
            for place, begun in enumerate(reversed(unit.begun)):
                if begun <= now:
                    break
                times[pipe, place] = begun
        return _State(now, times)

    def _totals(self) -> _Totals:
        return _Totals(
            {pipe: unit.busy for pipe, unit in self.units.items()},
            {pipe: dict(unit.stalls) for pipe, unit in self.units.items()},
            {loop: len(marks.begins) for loop, marks in self.marks.items()},
            {loop: marks.end for loop, marks in self.marks.items()},
        )

    def _skip(self, before: _State, after: _State, totals: _Totals, times: int) -> None:
        """Goes on by a number of times what was done between two states."""
        shift = after.now - before.now
        by, ticks = times * shift, (after.now >> SUM) - (before.now >> SUM)
        changed = {name for name, time in after.times.items() if time != before.times[name]}
        for pipe, unit in self.units.items():
            unit.free += by if (pipe, "free") in changed else 0
            unit.done += by if (pipe, "done") in changed else 0
            begun = (one + by if one > after.now else one for one in unit.begun)
            unit.begun = deque(begun, maxlen=unit.begun.maxlen)
            unit.busy += times * (unit.busy - totals.busy[pipe])
            for cause, gap in unit.stalls.items():
                unit.stalls[cause] += times * (gap - totals.stalls[pipe].get(cause, 0))
        for flag in self._flags.keys() & changed:
            self._flags[flag] += by
        for loop, marks in self.marks.items():
            new = marks.begins[totals.num_begins.get(loop, 0) :]
            marks.begins += [at + number * ticks for number in range(1, times + 1) for at in new]
            marks.end += times * ticks if marks.end != totals.ends.get(loop, 0) else 0

    def _work(self, by: int) -> None:
        """S works."""
        unit = self._scalar
        unit.busy += by >> SUM
        unit.done = unit.free = unit.free + by

    def _issue(self, unit: Unit, full: str) -> int:
        """S hands an instruction to a queue.

        Args:
            unit: whose queue.
            full: the cause of a stall while it has no place.

        Returns:
            When the pipe has it in front of itself: S is ready, and the pipe has done what was before it.
        """
        begun = unit.begun
        if len(begun) == begun.maxlen:
            self._scalar.stall(full, begun[0])
        self._work(self._issue_span)
        unit.stall(EMPTY, self._scalar.free)
        begun.append(unit.free)
        return unit.free

    def _copy(self, one: Instruction) -> Step:
        m = self.machine
        latency = m.load_latency_cycles if one.pipe == "MTE2" else m.store_latency_cycles
        return self._occupying(
            one, span(BYTES, one.num_bytes / self.bytes_per_cycle), span(one.pipe, latency)
        )

    def _vector(self, one: Instruction) -> Step:
        m = self.machine
        factor = getattr(m, one.factor) if one.factor else 1.0
        cycles = m.vector_latency_cycles + factor * one.num_bytes / m.vector_bytes_per_cycle
        return self._occupying(one, span(VECTOR, cycles), 0)

    def _occupying(self, one: Instruction, by: int, latency: int) -> Step:
        unit, full, ticks = self.units[one.pipe], _full(one.pipe), by >> SUM

        def occupy() -> None:
            begin = self._issue(unit, full)
            unit.free = free = begin + by
            unit.done = free + latency
            unit.busy += ticks
            if self.spans is not None:
                self._note(one, begin, free)

        return occupy

    def _scalars(self, one: Instruction) -> Step:
        return partial(self._work, span(SCALAR, one.count * self.machine.scalar_cycles))

    def _access(self, one: Instruction) -> Step:
        m = self.machine
        local = m.scalar_local_cycles * max(1, one.count)
        by = span(GLOBAL, m.scalar_global_cycles) if one.is_global else span(SCALAR, local)

        def load() -> None:
            begin = self._scalar.free
            self._work(by)
            if self.spans is not None:
                self._note(one, begin, begin + by)

        return load

    def _drop(self, one: Instruction) -> Step:
        return partial(self._work, self._issue_span)

    def _post(self, one: Instruction) -> Step:
        by = self._issue_span + span(SCALAR, self._post_us * self.machine.clock_ghz * 1e3)

        def post() -> None:
            self._work(by)
            self.posted.append(self._scalar.free >> SUM)

        return post

    def _mark(self, one: Instruction) -> Step:
        return lambda: self.steps.append((one.count, self.end >> SUM))

    def _note(self, one: Instruction, begin: int, end: int) -> None:
        assert self.spans is not None
        begin_end = cycles_of(begin >> SUM), cycles_of(end >> SUM)
        self.spans.append(Span(one.pipe, one.name, *begin_end, one.num_bytes))

    def _set(self, one: Instruction) -> Step:
        flag, by, unit = (
            (one.pipe, one.other, one.event),
            span(FLAGS, self.machine.flag_cycles),
            self.units[one.pipe],
        )
        take = self._taking(one.pipe)

        def set_flag() -> None:
            take()
            if flag in self._flags:
                raise ToolchainError(f"the flag {flag} is set again before it is waited for")
            self._flags[flag] = unit.done + by

        return set_flag

    def _wait(self, one: Instruction) -> Step:
        flag, unit, cause = (one.other, one.pipe, one.event), self.units[one.pipe], f"flag of {one.other}"
        take = self._taking(one.pipe)

        def wait() -> None:
            take()
            if flag not in self._flags:
                raise ToolchainError(f"the flag {flag} is waited for before it is set")
            unit.stall(cause, self._flags.pop(flag))

        return wait

    def _taking(self, pipe: str) -> Callable[[], object]:
        """Puts a flag or a barrier in front of a pipe."""
        if pipe == "S":
            return partial(self._work, span(SCALAR, self.machine.scalar_cycles))
        return partial(self._issue, self.units[pipe], _full(pipe))

    def _barrier(self, one: Instruction) -> Step:
        every = one.pipe == EVERY_PIPE
        take, unit = self._taking("S" if every else one.pipe), self.units["S" if every else one.pipe]

        def barrier() -> None:
            take()
            unit.stall(BARRIER, self.end if every else unit.done)

        return barrier

    def _turn(self, one: Instruction) -> Step:
        marks = self.marks.setdefault(one.count, Marks())
        return lambda: marks.begins.append(self.end >> SUM)

    def _end(self, one: Instruction) -> Step:
        marks = self.marks.setdefault(one.count, Marks())

        def end() -> None:
            marks.end = self.end >> SUM

        return end


def _full(pipe: str) -> str:
    return f"full queue of {pipe}"


_STEPS: dict[str, Callable[[Core, Instruction], Step]] = {
    "scalar": Core._scalars,
    "element": Core._access,
    "copy": Core._copy,
    "vector": Core._vector,
    "set": Core._set,
    "wait": Core._wait,
    "barrier": Core._barrier,
    "turn": Core._turn,
    "end": Core._end,
    "drop": Core._drop,
    "post": Core._post,
    "mark": Core._mark,
}


def idle(units: Iterable[Unit], end: int) -> None:
    """Charges each pipe with the time from its last instruction to the end of the program."""
    for unit in units:
        unit.stalls[TAIL] = (end >> SUM) - (unit.free >> SUM)
