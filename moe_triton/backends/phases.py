"""Launches of several phases as back ends see them: which phase belongs to which, how long each took, what it
has reported, and what they are called in torch's profiler.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch._C import _autograd
from torch.autograd import profiler

from moe_triton.core.ascendc import REPORT_MISMATCH
from moe_triton.core.plan import Phases, Plan, device_launches, num_first_blocks
from moe_triton.core.records import REPORT

CYCLES_PER_US = 50  # of Ascend C's GetSystemCycle


class Span(NamedTuple):
    """How long a phase took, by the cycles of its launch.

    Attributes:
        begin, end: where they stand; -1: it took as long as its launch, without the later phases.
        of: the first phase of the launch that has this one's time in its own; -1: none.
    """

    begin: int = -1
    end: int = -1
    of: int = -1


class PhaseTimes:
    """A plan's launches, and memory for the times that those of several phases write.

    Args:
        plan: whose launches.
        device: where they run.

    Attributes:
        launches: what is launched, each with its phases.
    """

    def __init__(self, plan: Plan, device: torch.device | str = "cpu") -> None:
        self.launches = device_launches(plan.launches)
        self._firsts = list(accumulate(map(len, self.launches), initial=0))
        # A launch has a time more than phases.
        self._cycles = torch.zeros(len(plan.launches) + len(self.launches), dtype=torch.int64, device=device)

    def of(self, first: int) -> torch.Tensor:
        """Where the launch writes that begins with this phase, counted over the whole plan."""
        return self._cycles[first + self._firsts.index(first) :]

    def phases_with(self, number: int) -> Phases:
        """The phases of the launch that one phase belongs to, counted over the whole plan."""
        return self.launches[bisect_right(self._firsts, number) - 1]

    @property
    def cycles(self) -> torch.Tensor:
        """What launches of several phases write: when each phase has ended."""
        return self._cycles

    def spans(self) -> list[Span]:
        """Of each phase, where it stands in `cycles` how long it took."""
        spans: list[Span] = []
        for phases in self.launches:
            first = len(spans)
            begin, is_split = first + self._firsts.index(first), num_first_blocks(phases) > 0
            latest = {False: begin, True: begin}
            for number, phase in enumerate(phases):
                end = begin + number + 1
                if len(phases) == 1 or (number == 0 and not is_split):
                    spans.append(Span())
                elif is_split:
                    spans.append(Span(latest[phase.on_first], end))
                else:
                    spans.append(Span(end - 1, end, first))
                latest[phase.on_first] = end
        return spans

    def durations_us(self, of_launches: Sequence[float]) -> list[float]:
        """Microseconds of each phase.

        Args:
            of_launches: of each launch, where its first phase stands. What is outside of all phases counts as
                the first one's, unless phases ran beside each other.
        """
        cycles = self._cycles.tolist()
        durations_us: list[float] = []
        for number, span in enumerate(self.spans()):
            if span.begin < 0:
                durations_us.append(of_launches[number])
                continue
            durations_us.append((cycles[span.end] - cycles[span.begin]) / CYCLES_PER_US)
            if span.of >= 0:
                durations_us[span.of] = max(0.0, durations_us[span.of] - durations_us[number])
        return durations_us


def first_code(report: torch.Tensor) -> tuple[int, int]:
    """The first code other than 0 in a launch's report, (phases, blocks, words) on the host; 0 for none.

    A mismatch comes first: it is why others time out.

    Returns:
        The code, and the number of the phase that reported it, among those that ran.
    """
    codes = report[:, :, REPORT.word("code")]
    positions = (codes == REPORT_MISMATCH).nonzero()
    if not len(positions):
        positions = codes.nonzero()
    if not len(positions):
        return 0, 0
    phase, block = positions[0].tolist()
    return int(codes[phase, block]), phase


def names_of(phases: Phases) -> str:
    """The steps of a launch, for errors."""
    return ", ".join(phase.step for phase in phases)


def is_profiled() -> bool:
    """Whether a profiler looks at this thread: torch's, or one that takes the ranges of torch's."""
    return profiler._is_profiler_enabled or _autograd._profiler_enabled()


def name_of(plan: Plan) -> str:
    """What a run of a plan is called, like "moe_triton::dispatch"."""
    return f"moe_triton::{plan.operator}{plan.half}"


def launch_names(plan: Plan, launches: Sequence[Phases]) -> list[str]:
    """What launches with all their phases are called, like "moe_triton::dispatch: send, wait"."""
    name = name_of(plan)
    return [f"{name}: {names_of(phases)}" for phases in launches]


def step_names(plan: Plan) -> list[str]:
    """What each phase is called, as the plan numbers them, like "moe_triton::dispatch: send"."""
    name = name_of(plan)
    return [f"{name}: {launch.step}" for launch in plan.launches]


def recorded(name: str) -> AbstractContextManager[object]:
    """What is inside, as a range."""
    return profiler.record_function(name)
