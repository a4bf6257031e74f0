"""`Replay`: what one program of a kernel does with its core's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from autotune.model.bodies.replay.instructions import Stream
from autotune.model.bodies.replay.pipes import Core, Marks, Span, idle
from autotune.model.bodies.replay.times import SUM, cycles_of, parts_of
from autotune.model.constants import Machine


@dataclass(frozen=True)
class Replay:
    """One core's time, in cycles.

    Attributes:
        cycles: until everything is complete. parts: cycles on the critical path, by what they went to
            (`autotune.model.bodies.replay.pipes.PARTS`); their sum is `cycles`.
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
    streams: Sequence[Stream],
    machine: Machine,
    bytes_per_cycle: float,
    with_spans: bool = False,
    skips: bool = True,
) -> Replay:
    """Replays programs on one core, one after the other.

    Args:
        bytes_per_cycle: of one copy.
        with_spans: keep every instruction.
        skips: multiply turns that repeat instead of running them all, which changes no number.

    Raises:
        ToolchainError: a flag is waited for that is not set, or one is set twice.
    """
    spans: list[Span] | None = [] if with_spans else None
    core = Core(machine, bytes_per_cycle, spans, skips)
    for stream in streams:
        core.run(stream)
    end = core.end
    idle(core.units.values(), end)
    turns, slope = _slope(core.marks, {loop for stream in streams for loop in stream.innermost})
    stalls = {
        pipe: {cause: cycles_of(ticks) for cause, ticks in unit.stalls.items()}
        for pipe, unit in core.units.items()
    }
    busy = {pipe: cycles_of(unit.busy) for pipe, unit in core.units.items()}
    return Replay(cycles_of(end >> SUM), parts_of(end), busy, stalls, turns, slope, spans or ())


def _slope(marks: Mapping[int, Marks], innermost: Set[int]) -> tuple[int, float]:
    """Turns of the loop that takes longest, and cycles for one of them.

    A mark's time is that of a replay that ends there.

    Args:
        innermost: loops without another one of run-time length in them.
    """
    longest, turns, slope = 0, 0, 0.0
    for loop in innermost & marks.keys():
        begins, end = marks[loop].begins, marks[loop].end
        if begins and end - begins[0] > longest:
            longest, turns = end - begins[0], len(begins)
            slope = cycles_of(end - begins[turns // 2]) / (turns - turns // 2)
    return turns, slope
