"""`Timeline`: when each launch of a plan begins and ends on a machine, and where the time goes.

A launch begins when those that it follows have ended, on an NPU's streams or in the CPU back end's walk
(`Streams`), after what an event and the launch itself take. It takes as long as its body, and where it waits
for other ranks, until their data is there (`autotune.model.timelines.arrivals`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from autotune.model.constants import Machine
from autotune.model.cost import Cost, Place, work_of
from autotune.model.kernel_costs.counted.run import PlanRun, standing_for
from autotune.model.kernel_costs.remembered import KernelCosts
from autotune.model.timelines.arrivals import WalkedRanks
from autotune.model.traffic import Traffic
from moe_triton.backends.npu.schedule import BEGIN, schedule
from moe_triton.core.plan import Launch, Phases, Plan, Stream, device_launches, synced_phases

Mode = Literal["stream", "graph"]
"""Whether the host launches every time, or a captured graph runs."""

Arrivals = Callable[[Launch, int], float]
"""When all that a launch waits for is there, in us: by the launch, and its number among the plan's waits."""

LAUNCHES, EVENTS, WAITS = "launches", "events", "waits"


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


@dataclass(frozen=True)
class Span:
    """One launch on a timeline. Times in us since the call began on the first of the ranks.

    Attributes:
        launch: of the plan.
        stream: that it runs on.
        begin_us, end_us: from its first block's begin to its last one's end. A phase that posts ends while
            cores that have no queue are in the next one.
        waited_us: of these, how long it only waited for other ranks: the last part of them, or of a launch
            that takes what comes as it comes all that it has nothing to do.
        event_us, launch_us: how long before its begin it waited for an event, and was launched.
        follows: index of the span that it began after; None for the call's begin.
        cost: of its body.
    """

    launch: Launch
    stream: Stream
    begin_us: float
    end_us: float
    waited_us: float
    event_us: float
    launch_us: float
    follows: int | None
    cost: Cost


@dataclass(frozen=True)
class Timeline:
    """A plan on one rank.

    Attributes:
        plan: that ran.
        rank: on which.
        begin_us: when the call began.
        spans: one per launch, in the plan's order.
        run: of the plan's kernels.
        number: of the rank, among those of the run.
        end_event_us: that the end of the call waits for an event, after the last launch.
    """

    plan: Plan
    rank: int
    begin_us: float
    spans: tuple[Span, ...]
    run: PlanRun
    number: int
    end_event_us: float = 0.0

    @property
    def end_us(self) -> float:
        """When the call has ended."""
        return max((span.end_us for span in self.spans), default=self.begin_us) + self.end_event_us

    @property
    def total_us(self) -> float:
        """From the call's begin to its end."""
        return self.end_us - self.begin_us

    @cached_property
    def critical(self) -> tuple[int, ...]:
        """Indices of the launches that the total is made of: each begins where the one before ends."""
        path: list[int] = []
        last = max(range(len(self.spans)), key=lambda i: self.spans[i].end_us, default=None)
        while last is not None:
            path.append(last)
            last = self.spans[last].follows
        return tuple(reversed(path))

    @cached_property
    def parts(self) -> dict[str, float]:
        """The total in us, in order: launches, events, waits for other ranks, and kernel costs by step."""
        spans = [self.spans[index] for index in self.critical]
        us_by_part = {
            LAUNCHES: sum(span.launch_us for span in spans),
            EVENTS: sum(span.event_us for span in spans) + self.end_event_us,
            WAITS: sum(span.waited_us for span in spans),
        }
        # Of a phase that posts, what cores without a queue have gone on with meanwhile counts instead.
        begins = [*(span.begin_us for span in spans[1:]), math.inf]
        for span, next_begin in zip(spans, begins, strict=True):
            step, end_us = span.launch.step, min(span.end_us, next_begin)
            us_by_part[step] = us_by_part.get(step, 0.0) + end_us - span.begin_us - span.waited_us
        return us_by_part


def walk_some(
    plan: Plan,
    traffics: Sequence[Traffic],
    machine: Machine,
    *,
    mode: Mode = "graph",
    kernel_costs: KernelCosts,
    streams: Streams = npu_streams,
    arrivals: Arrivals | None = None,
    run: PlanRun | None = None,
) -> list[Timeline]:
    """The timelines of some ranks of a group that stand for the others, which send as the slowest of them.

    Args:
        plan: of the first of them.
        traffics: of these ranks, the slowest sender's among them.
        machine: that each rank is.
        mode: how launches come to the device.
        kernel_costs: of kernels: `autotune.model.kernel_costs.kernel_cost.kernel_cost_of`, or others.
        streams: how the back end runs the plan.
        arrivals: when peers' data is there, if that is known.
        run: of the plan on these ranks, where plans differ in more than their ranks' numbers.

    Raises:
        UnknownWorkError: a launch waits for something that nobody sends, or depends on what is not known.
    """
    group = WalkedRanks(run or standing_for(plan, traffics), traffics, machine, True)
    return _Walker(plan, group, mode, kernel_costs, streams(plan), given=arrivals).timelines()


def walk_ranks(
    plan: Plan,
    traffics: Sequence[Traffic],
    machine: Machine,
    *,
    mode: Mode = "graph",
    kernel_costs: KernelCosts,
    streams: Streams = npu_streams,
    begins_us: Sequence[float] | None = None,
    run: PlanRun | None = None,
) -> list[Timeline]:
    """The timelines of all ranks of a group, which wait for one another.

    Exact, since a plan's waits come after the sends that they are for: launch after launch is placed on all
    ranks.

    Args:
        plan: every rank's launches; their numbers of ranks make no difference.
        traffics: of all ranks, by rank.
        machine: that each rank is.
        mode: how launches come to the device.
        kernel_costs: of kernels: `autotune.model.kernel_costs.kernel_cost.kernel_cost_of`, or others.
        streams: how the back end runs the plan.
        begins_us: when the call begins on each rank; 0 on all if not given.
        run: of the plan on these ranks, if there is one already.

    Raises:
        UnknownWorkError: a launch waits for something that nobody sends, or depends on what is not known.
        ValueError: the traffics are not those of all ranks.
    """
    group = WalkedRanks(run or standing_for(plan, traffics), traffics, machine, False)
    return _Walker(plan, group, mode, kernel_costs, streams(plan), begins_us).timelines()


class _Walker:
    """Places launch after launch on all ranks at once: arrays are (R,) us."""

    def __init__(
        self,
        plan: Plan,
        group: WalkedRanks,
        mode: Mode,
        kernel_costs: KernelCosts,
        order: Order,
        begins_us: Sequence[float] | None = None,
        given: Arrivals | None = None,
    ) -> None:
        self.plan, self.group, self.order = plan, group, order
        self.traffics, self.machine = group.traffics, group.machine
        self.launch_us = self.machine.launch_graph_us if mode == "graph" else self.machine.launch_stream_us
        self.kernel_costs, self.given = kernel_costs, given
        self.begins = np.array([0.0] * len(self.traffics) if begins_us is None else begins_us, dtype=float)
        self.synced = synced_phases(plan.launches)
        self.ends: list[np.ndarray] = []
        self.begun: list[np.ndarray] = []
        self.costs: list[list[Cost]] = []
        self.spans: list[list[Span]] = [[] for _ in group.traffics]
        self.num_waits = 0

    def _place(self, index: int) -> None:
        """One launch, all before it being placed."""
        launch = self.plan.launches[index]
        run = self.group.run
        works = [work_of(launch, each, Place(run, index, n)) for n, each in enumerate(self.traffics)]
        costs = [self.kernel_costs(launch.kernel)(work, self.machine) for work in works]
        if index in self.synced:
            costs = [cost.after_sync(self.machine.sync_all_us) for cost in costs]
        ready, event_us, follows = self._ready(index)
        pending = launch.joined and launch.on_first == self.plan.launches[index - 1].on_first
        launch_us = 0.0 if pending else self.launch_us
        begin = ready + event_us + launch_us
        done = begin + np.array([cost.us for cost in costs])
        if pending and index not in self.synced and any(cost.posting for cost in self.costs[-1]):
            begin, done = self._beside_posts(costs)
        end = done
        there = self.group.arrivals()
        if there is not None:
            number, self.num_waits = self.num_waits, self.num_waits + 1
            if self.given:
                there = np.full_like(begin, self.given(launch, number))
            coming = np.maximum(there - begin, 0.0).tolist()
            looks = [cost.after_last_us(us) for cost, us in zip(costs, coming, strict=True)]
            end = np.maximum(done, there + np.array(looks))
        self.group.send(costs, begin, end)
        self.ends.append(end)
        self.begun.append(begin)
        self.costs.append(costs)
        stream = self.order.steps[index].stream
        for rank, spans in enumerate(self.spans):
            begin_us, end_us, done_us, event = (float(a[rank]) for a in (begin, end, done, event_us))
            before = None if follows[rank] == BEGIN else int(follows[rank])
            waited_us, cost = end_us - done_us, costs[rank]
            spans.append(Span(launch, stream, begin_us, end_us, waited_us, event, launch_us, before, cost))

    def _beside_posts(self, costs: Sequence[Cost]) -> tuple[np.ndarray, np.ndarray]:
        """When a phase begins and is done behind one that posts: who has no queue goes on with it at once."""
        began, before = self.begun[-1], self.costs[-1]
        begin = began + np.array([cost.others_us for cost in before])
        done = []
        for first, start, posted, cost in zip(began.tolist(), begin.tolist(), before, costs, strict=True):
            of_cores = zip(posted.blocks_us, cost.blocks_us, strict=True)
            last = max((earlier + us for earlier, us in of_cores), default=0.0)
            done.append(max(start + cost.us, first + last))
        return begin, np.array(done)

    def _ready(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """When what a launch follows has ended, what an event takes after that, and which launch it is."""
        step = self.order.steps[index]
        ready, event_us, follows = self.begins, np.zeros_like(self.begins), np.full(len(self.begins), BEGIN)
        for number, delay in [
            *((n, 0.0) for n in step.after),
            *((n, self.machine.event_us) for n in step.events),
        ]:
            end = self.begins if number == BEGIN else self.ends[number]
            is_later = end + delay > ready + event_us
            ready = np.where(is_later, end, ready)
            event_us = np.where(is_later, delay, event_us)
            follows = np.where(is_later, number, follows)
        return ready, event_us, follows

    def timelines(self) -> list[Timeline]:
        """Places all launches; one per rank."""
        for index in range(len(self.plan.launches)):
            self._place(index)
        timelines = []
        for rank, spans in enumerate(self.spans):
            last = max((span.end_us for span in spans), default=0.0)
            after = 0.0
            if self.order.end is not None:
                after = max(0.0, spans[self.order.end].end_us + self.machine.event_us - last)
            begin = self.begins[rank].item()
            own = self.traffics[rank].rank
            timelines.append(Timeline(self.plan, own, begin, tuple(spans), self.group.run, rank, after))
        return timelines
