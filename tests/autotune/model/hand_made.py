"""Plans made by hand, with kernel costs that take what is written beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from autotune.model.constants import Machine, machine_named
from autotune.model.cost import Cost, KernelCost, Work
from autotune.model.kernel_costs.counted.run import Awaited, PlanRun
from autotune.model.kernel_costs.remembered import KernelCosts
from autotune.model.timelines.timeline import Timeline, walk_some
from autotune.model.traffic import Traffic, traffic_of
from moe_triton.core.config import Config
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.core.plan import Launch, Plan, Stream, Value
from moe_triton.schemes.fullmesh.ascendc import DISPATCH_ROWS, DISPATCH_SEND

LAUNCH_US, EVENT_US, HOP_US, FLAG_US = 4.0, 2.0, 0.5, 0.25
MACHINE = machine_named("A3").replaced(
    {
        "launch_graph_us": LAUNCH_US,
        "launch_stream_us": 2 * LAUNCH_US,
        "event_us": EVENT_US,
        "hop_sibling_us": HOP_US,
        "hop_node_us": HOP_US,
        "flag_latency_us": FLAG_US,
        "remote_write_gb_per_s": 1.0,  # a thousand bytes a microsecond
    }
)
LATENCY_US = HOP_US + FLAG_US


def walk(plan: Plan, traffic: Traffic, machine: Machine, **how: Any) -> Timeline:
    """The timeline of one rank that stands for all."""
    (only,) = walk_some(plan, [traffic], machine, **how)
    return only


def compute(name: str, alongside: bool = False, stream: Stream = "compute") -> Launch:
    """A Triton kernel without arguments."""
    kernel = TritonKernel(name, None, (), {}, lambda *_: None)
    return Launch(name, kernel, (), 1, stream, alongside)


def communicate(
    step: str, kernel: AscendCKernel, alongside: bool = False, blocks: int = 1, **given: Value
) -> Launch:
    """An Ascend C kernel, with what is given and 0 for the rest."""
    values = tuple(given.get(arg.name, 0) for arg in kernel.args)
    return Launch(step, kernel, values, blocks, "communication", alongside)


def send(step: str = "send", alongside: bool = False) -> Launch:
    """Rows with flags."""
    return communicate(step, DISPATCH_SEND, alongside)


def wait(step: str = "wait", alongside: bool = False) -> Launch:
    """For rows."""
    return communicate(step, DISPATCH_ROWS, alongside)


def plan_of(*launches: Launch, overlap: bool = True) -> Plan:
    """A dispatch."""
    return Plan("dispatch", 0, launches, overlap)


def kernel_costs_of(us: Mapping[str, float]) -> KernelCosts:
    """Costs of kernels by the name of the kernel."""

    def kernel_cost_of(kernel: AscendCKernel | TritonKernel) -> KernelCost:
        def kernel_cost(work: Work, machine: Machine) -> Cost:
            return Cost({"fixed": us[kernel.name]})

        return kernel_cost

    return kernel_cost_of


@dataclass(frozen=True)
class HandMadeRun:
    """What a run of a plan says, as it is written here.

    Attributes:
        ranks: EP.
        awaits: for a launch, by its number, the launches that it waits for, on all ranks, and for which share
            of each.
        written: for a launch, bytes that reach each rank.
    """

    ranks: int
    awaits: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    written: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def ran(self, index: int) -> list[SimpleNamespace]:
        """See `PlanRun`."""
        return [SimpleNamespace(written=each, posted=0) for each in self.written.get(index, [0] * self.ranks)]

    def awaited(self, index: int, number: int) -> Awaited:
        """See `PlanRun`."""
        of = self.awaits.get(index, {})
        launch = np.repeat(np.array(list(of), np.int64), self.ranks)
        share = np.repeat(np.array(list(of.values()), float), self.ranks)
        return Awaited(launch, np.tile(np.arange(self.ranks), len(of)), share, np.zeros(len(launch), bool))

    def made(self, index: int, number: int) -> dict[str, np.ndarray]:
        """See `PlanRun`."""
        return {}


def run_of(
    awaits: Mapping[int, Mapping[int, float]],
    written: Mapping[int, Sequence[int]] | None = None,
    ranks: int = 2,
) -> PlanRun:
    """A run that says so."""
    return cast(PlanRun, HandMadeRun(ranks, awaits, written or {}))


def traffics_of(ids: object, num_experts: int = 2) -> list[Traffic]:
    """Of every rank: (EP, T, K) expert ids, all ranks in one node."""
    routed = np.array(ids)
    num_ranks, tokens, topk = routed.shape
    config = Config(num_ranks, tokens, 64, topk, num_experts, relaxed=True)
    tiers = [tuple("self" if a == b else "node" for a in range(num_ranks)) for b in range(num_ranks)]
    return [traffic_of(config, rank, routed, tiers[rank]) for rank in range(num_ranks)]


TWO_RANKS = [[[0], [1]], [[0], [1]]]
"""Each of two ranks has two tokens: one for itself, and one for the other."""
