"""What the plans of a group cost: sizes, a scheme and a machine in, priced plans out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.core.plan import Plan
from moe_triton.core.row_formats import row_format_of
from moe_triton.core.tuning import Tuning
from moe_triton.limits import check_config
from moe_triton.model.constants import Machine
from moe_triton.model.floor import Floor, floor_of
from moe_triton.model.remembered import Bodies
from moe_triton.model.routing import draw_ids
from moe_triton.model.sensitivity import Judged, judged
from moe_triton.model.timeline import Mode, Timeline, walk
from moe_triton.model.topology import tiers
from moe_triton.model.traffic import Traffic, traffic_of
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes import make_scheme
from moe_triton.schemes.scheme import Scheme
from moe_triton.schemes.site import Site

DTYPE = torch.bfloat16
TIMEOUT_US = 60_000_000  # of waits in plans; it makes no difference here


@dataclass(frozen=True)
class Sizes:
    """A group, what its ranks bring, and how it is dispatched.

    Attributes:
        ranks: EP.
        tokens: of each rank, in a call (BS).
        hidden: elements of a row.
        topk: experts of each token.
        experts: of the group.
        quantize: how rows travel, as `EPBuffer.dispatch` takes it.
        comm_alg: the scheme.
        parts: that operators are cut into, where they can be; as buffers do by themselves if None.
        communication_blocks: blocks that communicate while the others compute; if None, none of them, or half
            of them where parts are asked for.
        routing: how experts are drawn (`moe_triton.model.routing`).
        seed: of the draw.
    """

    ranks: int = 16
    tokens: int = 128
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    quantize: str | None = "int8"
    comm_alg: str = "fullmesh_v1"
    parts: int | None = None
    communication_blocks: int | None = None
    routing: str = "uniform"
    seed: int = 0

    @property
    def config(self) -> Config:
        """The group's settings.

        Raises:
            ArgumentError: there is no such group.
        """
        sizes = self.ranks, self.tokens, self.hidden, self.topk, self.experts
        config = Config(*sizes, scheme=self.comm_alg, relaxed=True)
        check_config(config)
        if self.parts is not None and not 1 <= self.parts <= self.tokens:
            rule = f"it must be 1 to the {self.tokens} tokens"
            raise ArgumentError("parts", self.parts, rule, "Name a number of parts.")
        return config

    def traffic(self) -> Traffic:
        """That of a typical rank: of all ranks it receives the median number of rows."""
        config = self.config
        ids = draw_ids(self.routing, self.ranks, self.tokens, self.topk, self.experts, self.seed)
        received = np.bincount(ids.ravel() // (self.experts // self.ranks), minlength=self.ranks)
        rank = int(np.argsort(received, kind="stable")[self.ranks // 2])
        return traffic_of(config, rank, ids, tiers("A3", self.ranks, rank))

    def scheme(self, machine: Machine, rank: int) -> Scheme:
        """How tokens travel from a rank of an NPU."""
        blocks = int(machine.cores)
        tuning = Tuning(communication_blocks=self.communication_blocks or 0)
        if self.parts is not None:
            each = -(-self.tokens // self.parts)
            half = blocks // 2 if self.parts > 1 and self.communication_blocks is None else 0
            tuning = Tuning(each, each, half or self.communication_blocks or 0)
        tuning.check(blocks)
        return make_scheme(Site(self.config, rank, blocks, TIMEOUT_US, "npu", tuning=tuning))

    def variants(self) -> tuple[Variant, Variant]:
        """Dispatch of bfloat16 tokens, and combine of their weighted results.

        Where a scheme has a place for results in its window, experts leave them there.
        """
        scheme = make_scheme(Site(self.config, 0, 1, TIMEOUT_US, "npu"))
        in_place = scheme.place("results", DTYPE.itemsize) is not None
        dispatch = DispatchVariant(DTYPE, row_format_of(self.quantize, self.hidden))
        return dispatch, CombineVariant(DTYPE, weights=True, in_place=in_place)


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
        """Of the whole operator."""
        return self.timeline.total_us

    def seen_by_host_us(self, machine: Machine) -> float:
        """From the host's call until it has seen the operator's end, where it waits for that."""
        return self.us + machine.call_overhead_us


@dataclass(frozen=True)
class Call:
    """Dispatch and combine of one rank of a group of ranks alike, ready to be priced on machines.

    Attributes:
        sizes: of the group.
        traffic: of the rank.
        bodies: of kernels.
    """

    sizes: Sizes
    traffic: Traffic
    bodies: Bodies

    def priced(self, variant: Variant, machine: Machine, mode: Mode) -> PricedPlan:
        """The price of one operator.

        Args:
            variant: of `Sizes.variants`.
            machine: that each rank is.
            mode: how launches come to the device.

        Raises:
            ArgumentError: the scheme's operators cannot be in a graph.
        """
        scheme = self.sizes.scheme(machine, self.traffic.rank)
        if mode == "graph" and scheme.rounds.no_graph:
            rule = scheme.rounds.no_graph.removesuffix(".")
            raise ArgumentError("mode", repr(mode), rule, "Or take mode 'stream'.")
        operator = "dispatch" if isinstance(variant, DispatchVariant) else "combine"
        plan = scheme.whole(variant, 0, scheme.site.tuning.parts(operator, self.sizes.tokens))
        timeline = walk(plan, self.traffic, machine, mode=mode, bodies=self.bodies)
        floor = floor_of(variant, self.traffic)
        return PricedPlan(plan, timeline, floor, floor.us(machine))

    def judged(self, variant: Variant, machine: Machine, mode: Mode) -> Judged:
        """What the price of an operator depends on, and how far off it may be. See `priced`.

        Settings of the plan stay those of the machine: blocks do not change with a constant.
        """
        plan = self.priced(variant, machine, mode).plan

        def answer(tried: Machine) -> float:
            return walk(plan, self.traffic, tried, mode=mode, bodies=self.bodies).total_us

        return judged(answer, machine)
