"""What each launch of a plan follows: on an NPU's streams, or in the CPU back end's walk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_triton.backends.npu.schedule import schedule
from moe_triton.core.plan import Plan, Stream


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
    return _npu(plan, plan.overlap)


def one_stream(plan: Plan) -> Order:
    """An NPU's before CANN 9: one launch after the other on the user's stream."""
    return _npu(plan, False)


def cpu_walk(plan: Plan) -> Order:
    """The CPU back end's (``host/plan_runner.cpp``): neighbours in pairs where the second runs alongside."""
    steps: list[Step] = []
    before: tuple[int, ...] = ()
    launches = plan.launches
    while len(steps) < len(launches):
        first = len(steps)
        is_pair = plan.overlap and first + 1 < len(launches) and launches[first + 1].alongside
        group = tuple(range(first, first + 1 + is_pair))
        steps += [Step(launches[number].stream, before) for number in group]
        before = group
    return Order(tuple(steps))


def _npu(plan: Plan, two_streams: bool) -> Order:
    scheduled = schedule(plan.launches, two_streams)
    last: dict[Stream, int] = {}
    steps = []
    for number, launch in enumerate(scheduled.launches):
        after = (last[launch.stream],) if launch.stream in last else ()
        events = () if launch.waits_for is None else (launch.waits_for,)
        steps.append(Step(launch.stream, after, events))
        last[launch.stream] = number
    return Order(tuple(steps), scheduled.end)
