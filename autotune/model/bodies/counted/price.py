"""The price of a launch that was counted: its cores' clock, and the wires and hops of what leaves the device.

The clock is that of replayed Triton kernels (`autotune.model.bodies.replay.pipes`). Kernels mark their steps
for traces; of each kind of step the slowest core counts, or, where that takes longer, what it has for other
devices (`autotune.model.bodies.movement`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.model.bodies import movement
from autotune.model.bodies.counted.library import MISSED, Did
from autotune.model.bodies.counted.run import Ran
from autotune.model.bodies.counted.steps import REGISTERS_PER_COPY, Steps
from autotune.model.bodies.replay.instructions import Stream
from autotune.model.bodies.replay.pipes import Core
from autotune.model.bodies.replay.times import SUM, cycles_of
from autotune.model.constants import Machine
from autotune.model.cost import Cost, Messages, UnknownWorkError, Work
from autotune.model.topology import hop_us
from autotune.model.traffic import Tier
from moe_triton.core import ascendc

CLOCKED = 2
"""Cores that are clocked: of those with most to do in all so many, and of those with most for one pipe."""

NAMES = {
    ascendc.TRACE_BLOCK: "cores",
    ascendc.TRACE_WRITE: "write",
    ascendc.TRACE_SYNC: "sync",
    ascendc.TRACE_FLAG: "flags",
    ascendc.TRACE_WRITE_AND_FLAG: "rows",
    ascendc.TRACE_POLL: "poll",
    ascendc.TRACE_POST: "posts",
}
"""What kinds of steps are called among the parts of a price: the first one is of all that is unmarked."""


def counted(work: Work, machine: Machine) -> Cost:
    """The time of a launch of an Ascend C kernel: `autotune.model.cost.Body`.

    Raises:
        UnknownWorkError: it is no launch of a plan, or it depends on what the model does not know.
    """
    if work.place is None:
        raise UnknownWorkError(f"{work.kernel.name} has a price as a launch of a plan only")
    run, index = work.place.run, work.place.index
    if run.ran(index)[work.place.number].steps.posting and "rdma_gb_per_s" not in machine.constants:
        raise UnknownWorkError(f"{work.kernel.name}: {machine.name} has no constants of a network; A2 has")
    return priced(run.ran(index)[work.place.number], work.traffic.tiers, machine, run.cores(index), run.rings)


def priced(ran: Ran, tiers: Sequence[Tier], machine: Machine, cores: int, rings: bool) -> Cost:
    """The price of a launch.

    Args:
        ran: what it did.
        tiers: how far each rank is.
        machine: that it runs on.
        cores: of this device that work at the same time, which share the memory's rate.
        rings: whether a processor of its own posts (AICPU), for which the cores ring.
    """
    steps, rate = ran.steps, movement.bytes_per_cycle(machine, cores)
    post_us = 0.0 if rings or not steps.posting else machine.post_aiv_us
    away = _away(steps, tiers, machine)
    # Who posts does so at times of its own; which of the others is the slowest their sums say.
    blocks = dict.fromkeys([*slow(steps, machine, rate, away), *steps.posting])
    clocked = {block: clock(steps.stream(block), machine, rate, post_us) for block in blocks}
    slowest = max(clocked.values(), key=lambda each: sum(_by_step(each, away).values()))
    parts = _parts(slowest, away)
    if steps.meetings:
        parts["barrier"] = steps.meetings * machine.sync_all_us
    sent = steps.num_bytes_sent
    look_us = taking_us = 0.0
    if ran.look is not None and steps.takes_what_comes:
        look = ran.look.from_looks_on()
        each = [clock(look.stream(block), machine, rate, 0.0).us for block in slow(look, machine, rate, {})]
        look_us = max(each, default=0.0)
        taking_us = max(0.0, slowest.steps_us.get(ascendc.TRACE_POLL, 0.0) - look_us)
    return Cost(
        parts,
        steps.num_bytes(Did.LOAD),
        steps.num_bytes(Did.STORE) - sent,
        sent,
        look_us=look_us,
        taking_us=taking_us,
        messages=_messages(steps, clocked, machine, rings),
    )


def _away(steps: Steps, tiers: Sequence[Tier], machine: Machine) -> dict[int, tuple[float, float]]:
    """Of each kind of step in which anything leaves the device: microseconds of the wire, and of hops."""
    away = steps.peer >= 0
    step, peer, is_trip = steps.step[away], steps.peer[away], steps.is_trip[away]
    amount = steps.records["amount"][away].astype(np.int64)
    flight = np.zeros(len(tiers))
    for other in np.unique(peer).tolist():
        flight[other] = hop_us(machine, tiers[other])
    found = {}
    for kind in np.unique(step).tolist():
        here = step == kind
        in_flight = min(movement.BUFFERS * steps.blocks, machine.remote_writes_in_flight)
        hops_us = float(flight[peer[here & is_trip]].sum()) / in_flight
        found[kind] = movement.wire(machine, float(amount[here].sum())), hops_us
    return found


def _by_step(core: Clocked, away: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    """Of each kind of step of a core: what it does, or what all cores have for other devices meanwhile."""
    return {kind: max(us, sum(away.get(kind, (0.0,)))) for kind, us in core.steps_us.items()}


def _parts(core: Clocked, away: Mapping[int, tuple[float, float]]) -> dict[str, float]:
    """The same by its name."""
    parts: dict[str, float] = {}
    for kind, us in core.steps_us.items():
        wire_us, hops_us = away.get(kind, (0.0, 0.0))
        for name, part in ("wire", wire_us), ("hops", hops_us), (NAMES[kind], us - wire_us - hops_us):
            if part > 0:
                parts[name] = parts.get(name, 0.0) + part
    return parts


@dataclass(frozen=True)
class Clocked:
    """One core's time.

    Attributes:
        us: in all.
        steps_us: of each kind of step.
        posted_us: when it has posted each of its messages.
    """

    us: float
    steps_us: dict[int, float]
    posted_us: list[float]


def clock(stream: Stream, machine: Machine, rate: float, post_us: float) -> Clocked:
    """Runs a core.

    Args:
        stream: what it does.
        machine: whose core.
        rate: bytes of copies in a cycle.
        post_us: of each of its posts.
    """
    core = Core(machine, rate, skips=False, post_us=post_us)
    core.run(stream)

    def us(ticks: int) -> float:
        return movement.us_of(machine, cycles_of(ticks))

    found: dict[int, float] = {}
    begin, kind = 0, ascendc.TRACE_BLOCK
    for mark, at in [*core.steps, (ascendc.TRACE_BLOCK, core.end >> SUM)]:
        found[kind] = found.get(kind, 0.0) + us(at - begin)
        begin, kind = at, mark
    return Clocked(us(core.end >> SUM), found, [us(at) for at in core.posted])


def slow(steps: Steps, machine: Machine, rate: float, away: Mapping[int, tuple[float, float]]) -> list[int]:
    """The blocks that have most to do: if their pipes waited for one another, and if they did not."""
    busy = _busy(steps, machine, rate)
    found: list[int] = []
    for together in (busy.sum(axis=0), busy.max(axis=0)):
        for kind, us in away.items():
            at_least = sum(us) * machine.clock_ghz * 1e3
            together[kind] = np.where(together[kind] > 0, np.maximum(together[kind], at_least), 0.0)
        found += np.argsort(-together.sum(axis=0), kind="stable")[:CLOCKED].tolist()
    return list(dict.fromkeys(found))


def _busy(steps: Steps, machine: Machine, rate: float) -> np.ndarray:
    """(4, kinds of steps, blocks) cycles of each pipe, with the latencies of its copies."""
    records, did = steps.records, steps.records["did"]
    amount = records["amount"].astype(float)
    place = steps.step * steps.blocks + steps.block
    size = len(NAMES) + 2

    def summed(cycles: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        found = np.bincount(place[wanted], cycles[wanted], minlength=size * steps.blocks)
        return found.reshape(size, steps.blocks)

    scalar = np.full(len(records), float(machine.issue_cycles))
    is_local, is_global = did == Did.LOCAL, did == Did.GLOBAL
    scalar[is_local] = machine.scalar_local_cycles * amount[is_local]
    is_missed = records["flags"][is_global] & MISSED != 0
    scalar[is_global] = np.where(is_missed, machine.scalar_global_cycles, machine.scalar_local_cycles)
    scalar[steps.is_copy] += REGISTERS_PER_COPY * machine.scalar_cycles
    vector = machine.vector_latency_cycles + amount / machine.vector_bytes_per_cycle
    return np.stack(
        [
            summed(scalar, np.ones(len(records), bool)),
            summed(vector, did == Did.VECTOR),
            summed(machine.load_latency_cycles + amount / rate, did == Did.LOAD),
            summed(machine.store_latency_cycles + amount / rate, did == Did.STORE),
        ]
    )


def _messages(steps: Steps, clocked: dict[int, Clocked], machine: Machine, rings: bool) -> Messages | None:
    """What a launch posts, in the order in which its port takes it."""
    if not steps.posting:
        return None
    pairs = [(*steps.posts_of(block), clocked[block]) for block in steps.posting]
    peers = np.concatenate([ranks for ranks, _, _ in pairs])
    num_bytes = np.concatenate([numbers for _, numbers, _ in pairs])
    asked = np.concatenate([each.posted_us for _, _, each in pairs])
    asked = asked - max(each.us for each in clocked.values())  # from the launch's end on
    # Cores ring at about the same time: in the time of one post, what is for the next ranks comes first.
    behind = (peers - steps.rank - 1) % steps.num_ranks
    slot = np.floor((asked - asked.min()) / machine.post_aicpu_us) if rings else asked
    order = np.lexsort((np.arange(len(peers)), behind, slot))
    posted = np.maximum.accumulate(asked[order])
    if rings:
        before = machine.post_aicpu_us * np.arange(posted.size)
        posted = np.maximum.accumulate(posted - before) + before + machine.post_aicpu_us
    return Messages(peers[order], num_bytes[order], posted)
