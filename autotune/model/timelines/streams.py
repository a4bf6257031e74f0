"""What each launch of a plan follows: on an NPU's streams, or in the CPU back end's walk."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from moe_triton.backends.npu.schedule import BEGIN, schedule
from moe_triton.core.plan import Phases, Plan, Stream, device_launches


@dataclass(frozen=True)
class Step:
    """The place of a launch.

    Attributes:
        stream: that it runs on.
        after: indices of the launches whose end it follows directly.
        events: of those, and `BEGIN`, whose end it waits for by an event.
    """

    stream: Stream
    after: tuple[int, ...] = ()
    events: tuple[int, ...] = ()


@dataclass(frozen=True)
class Order:
    """A plan's launches in place.

    Attributes:
        steps: one per launch.
        end: index of a launch that the call's end waits for by an event; None if it needs none.
    """

    steps: tuple[Step, ...]
    end: int | None = None


Streams = Callable[[Plan], Order]
"""How a back end runs a plan."""


def npu_streams(plan: Plan) -> Order:
    """An NPU's: two streams where the plan overlaps (CANN 9 and later), kept in order by events."""
    return _npu(plan, plan.two_streams)


def one_stream(plan: Plan) -> Order:
    """An NPU's before CANN 9: one launch after the other on the user's stream."""
    return _npu(plan, False)


def cpu_walk(plan: Plan) -> Order:
    """The CPU back end's (``host/plan_runner.cpp``): neighbours in pairs where the second runs alongside."""
    steps: list[Step] = []
    before: tuple[int, ...] = ()
    launches = device_launches(plan.launches)
    done = 0
    while done < len(launches):
        is_pair = plan.overlap and done + 1 < len(launches) and launches[done + 1][0].alongside
        last: list[int] = []
        for phases in launches[done : done + 1 + is_pair]:
            last += _ends(phases, len(steps))
            steps += _phases(phases, Step(phases[0].stream, before), len(steps))
        before, done = tuple(last), done + 1 + is_pair
    return Order(tuple(steps))


def _phases(phases: Phases, first: Step, number: int) -> list[Step]:
    """A launch: each phase follows the one before it on the same blocks, of which a split launch has two."""
    steps = [first]
    for before, (earlier, phase) in enumerate(itertools.pairwise(phases), number):
        steps.append(first if phase.on_first != earlier.on_first else Step(first.stream, (before,)))
    return steps


def _ends(phases: Phases, number: int) -> tuple[int, ...]:
    """The phases that a launch ends with: the last one on each of its blocks."""
    pairs = enumerate(itertools.pairwise(phases), number)
    switched = (before for before, (earlier, phase) in pairs if phase.on_first != earlier.on_first)
    return *switched, number + len(phases) - 1


def _npu(plan: Plan, two_streams: bool) -> Order:
    launches = device_launches(plan.launches)
    scheduled = schedule([phases[0] for phases in launches], two_streams)
    last_of: list[tuple[int, ...]] = [(BEGIN,)]  # phases of each launch, from the call's begin on
    last: dict[Stream, tuple[int, ...]] = {}
    steps: list[Step] = []
    for phases, launch in zip(launches, scheduled.launches, strict=True):
        after = last.get(launch.stream, ())
        events = () if launch.waits_for is None else last_of[launch.waits_for + 1]
        last[launch.stream] = _ends(phases, len(steps))
        last_of.append(last[launch.stream])
        steps += _phases(phases, Step(launch.stream, after, events), len(steps))
    return Order(tuple(steps), None if scheduled.end is None else last_of[scheduled.end + 1][-1])
