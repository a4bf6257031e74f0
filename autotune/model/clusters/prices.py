"""What the operators of a group cost on some of its ranks: traffic and a machine in, priced plans out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from autotune.model.clusters.group import OPERATORS, Group, OperatorName, middle
from autotune.model.constants import Machine
from autotune.model.floor import Floor, floor_of
from autotune.model.kernel_costs.counted.run import standing_for
from autotune.model.kernel_costs.pulls import with_pulls
from autotune.model.kernel_costs.remembered import KernelCosts
from autotune.model.sensitivity import Judged, judged
from autotune.model.timelines.timeline import Timeline, walk_some
from autotune.model.traffic import Traffic
from moe_triton.core.plan import Plan
from moe_triton.schemes.scheme import Scheme


@dataclass(frozen=True)
class PricedPlan:
    """One operator of one rank.

    Attributes:
        plan: its launches.
        timeline: when they run.
        floor: bytes that must move.
        floor_us: how long those take.
    """

    plan: Plan
    timeline: Timeline
    floor: Floor
    floor_us: float

    @property
    def us(self) -> float:
        """Microseconds that the whole operator takes."""
        return self.timeline.total_us

    def seen_by_host_us(self, machine: Machine) -> float:
        """From the host's call until it has seen the operator's end, where it waits for that."""
        return self.us + machine.call_overhead_us


@dataclass(frozen=True)
class Call:
    """Dispatch and combine of ranks that stand for a group, ready to be priced on machines.

    Attributes:
        group: of the ranks.
        traffics: of each of them.
        kernel_costs: of kernels, which know what reading from other ranks takes.
    """

    group: Group
    traffics: tuple[Traffic, ...]
    kernel_costs: KernelCosts

    @staticmethod
    def typical(group: Group, kernel_costs: KernelCosts) -> Call:
        """The call of the rank that receives the median number of rows.

        Examples:
            >>> call = Call.typical(Group(ranks=8, tokens=16), kernel_cost_of)
            >>> len(call.traffics)
            1
        """
        ids = group.draw()
        return Call.of(group, kernel_costs, ids, middle(group.received(ids)))

    @staticmethod
    def of(group: Group, kernel_costs: KernelCosts, ids: np.ndarray, *ranks: int) -> Call:
        """The call of some ranks.

        Args:
            group: of the ranks.
            kernel_costs: of kernels.
            ids: (EP, T, K) experts that were drawn.
            ranks: whose waits end when the slowest of them has sent.
        """
        return Call(group, tuple(group.traffic(ids, rank) for rank in ranks), with_pulls(kernel_costs))

    def priced(self, operator: OperatorName, machine: Machine) -> list[PricedPlan]:
        """The price of one operator on each of the ranks.

        Args:
            operator: its name.
            machine: that each rank is.

        Raises:
            ArgumentError: the scheme's operators cannot be in a graph.

        Examples:
            >>> call = Call.typical(Group(ranks=8, tokens=16), kernel_cost_of)
            >>> (priced,) = call.priced("combine", machine_named("A3"))
            >>> 10 < priced.us < 200
            True
        """
        plan = self.plan(operator, machine)
        variant = self.group.variants()[operator]
        floors = [floor_of(variant, traffic) for traffic in self.traffics]
        lines = self._walked(plan, machine)
        return [PricedPlan(plan, *both, both[1].us(machine)) for both in zip(lines, floors, strict=True)]

    def judged(self, operator: OperatorName, machine: Machine) -> Judged:
        """What the price of an operator on the slowest rank depends on, and how far off it may be.

        Settings of the plan stay those of the machine: blocks do not change with a constant. See `priced`.
        """
        plan = self.plan(operator, machine)
        return judged(lambda tried: max(line.total_us for line in self._walked(plan, tried)), machine)

    def plan(self, operator: OperatorName, machine: Machine) -> Plan:
        """The launches of every rank: their numbers of ranks make no difference."""
        return self.group.plans(machine, self.traffics[0].rank)[operator]

    def _walked(self, plan: Plan, machine: Machine) -> list[Timeline]:
        run = standing_for(plan, self.traffics, *self._ranks(plan, machine))
        mode, kernel_costs = self.group.mode, self.kernel_costs
        return walk_some(plan, self.traffics, machine, mode=mode, kernel_costs=kernel_costs, run=run)

    def _ranks(
        self, plan: Plan, machine: Machine
    ) -> tuple[Callable[[int], Plan] | None, Callable[[int], Scheme]]:
        """Plans and schemes of all ranks; where none passes anything on, plans differ in numbers alone."""
        operator = next(name for name in OPERATORS if name == plan.operator)

        def plan_of(rank: int) -> Plan:
            return self.group.plans(machine, rank)[operator]

        relays = self.group.scheme(machine).tables_of(self.group.config) is not None
        return plan_of if relays else None, partial(self.group.scheme, machine)
