"""`Replay`: what one program of a kernel does with its core's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.model.bodies import clock
from autotune.model.bodies.clock import ALL_PIPES, BEFORE, OP, SPAN, Kind, cycles_of, ticks_of
from autotune.model.bodies.counted import library
from autotune.model.bodies.replay.attributes import EVERY_PIPE, PIPES
from autotune.model.bodies.replay.functions import DIVIDE_FACTOR
from autotune.model.bodies.replay.instructions import Instruction, Stream
from autotune.model.constants import Machine

_PIPES = {EVERY_PIPE: ALL_PIPES, **{pipe: number for number, pipe in enumerate(library.PIPES)}}


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
            (`autotune.model.bodies.clock.PARTS`); their sum is `cycles`.
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
    found = []
    for code, (_, what, *times) in zip(codes.tolist(), events.tolist(), strict=True):
        one = stream.instructions[code]
        if what == SPAN and one.kind in ("copy", "vector", "element"):
            begin, end = cycles_of(np.array(times)).tolist()
            found.append(Span(one.pipe, one.name, begin, end, one.num_bytes))
    return found


def _slope(stream: Stream, codes: np.ndarray, events: np.ndarray) -> tuple[int, float]:
    """Turns of the loop that takes longest, and cycles for one of them.

    A mark's time is that of a replay that ends there.

    Args:
        stream: of the launch.
        codes: (E,) of the instructions that events are of.
        events: (E,) of `autotune.model.bodies.clock.Clocked`.
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
