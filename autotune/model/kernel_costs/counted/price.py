"""The price of a launch that was counted: its cores' clock, and the wires and hops of what leaves the device.

The clock is that of replayed Triton kernels (`autotune.model.kernel_costs.clock`). Kernels mark their steps
for traces; of each kind of step the slowest core counts, or, where that takes longer, what it has for other
devices (`autotune.model.kernel_costs.movement`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.model.constants import NETWORK, POST_AICPU, Machine
from autotune.model.cost import Cost, Messages, NoNetworkError, UnknownWorkError, Work
from autotune.model.kernel_costs import clock, movement
from autotune.model.kernel_costs.counted.library import MISSED, REDUCES, Did
from autotune.model.kernel_costs.counted.run import Ran
from autotune.model.kernel_costs.counted.steps import Steps
from autotune.model.kernel_costs.movement import us_of
from autotune.model.topology import hop_us
from autotune.model.traffic import Tier
from moe_triton.core import ascendc

REGISTERS_PER_COPY = 20
"""Instructions on registers for each copy and each post: its addresses, checks of extents. Assumed: the
emulation does not see instructions on registers."""

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
        NoNetworkError: it posts, and the machine cannot.
    """
    if work.place is None:
        raise UnknownWorkError(f"{work.kernel.name} has a price as a launch of a plan only")
    run, index = work.place.run, work.place.index
    if run.ran(index)[work.place.number].steps.posting:
        _check_network(work.kernel.name, machine, run.rings)
    cost = priced(run.ran(index)[work.place.number], work.traffic.tiers, machine, run.cores(index), run.rings)
    return replace(cost, is_in_series=bool(work.arguments.get("in_series", 0)))


def _check_network(kernel: str, machine: Machine, rings: bool) -> None:
    """Raises unless a machine has what posts depend on."""
    if missing := [name for name in NETWORK if name not in machine.constants]:
        raise NoNetworkError(f"{kernel}: {machine.name} has no constants of a network ({', '.join(missing)})")
    if rings and POST_AICPU not in machine.constants:
        raise NoNetworkError(f"{kernel}: {machine.name} has no AICPU that posts ({POST_AICPU}); A2 has")


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
    away = _away(steps, tiers, machine)
    blocks = clocked(steps, machine, rate, 0.0 if rings or not steps.posting else machine.post_aiv_us)
    slowest = max(blocks, key=lambda each: _us(each.steps_us, away))
    parts = _parts(slowest, away)
    if steps.meetings:
        parts["barrier"] = steps.meetings * machine.sync_all_us
    sent = steps.num_bytes_sent
    look_us = taking_us = 0.0
    if ran.look is not None and steps.takes_what_comes:
        look_us = max(block.us for block in clocked(ran.look.from_looks_on(), machine, rate, 0.0))
        taken = {kind: us for kind, us in slowest.steps_us.items() if kind != ascendc.TRACE_BLOCK}
        taking_us = max(0.0, _us(taken, away) - look_us)
    return Cost(
        parts,
        steps.num_bytes(Did.LOAD),
        steps.num_bytes(Did.STORE) - sent,
        sent,
        look_us=look_us,
        taking_us=taking_us,
        blocks_us=tuple(block.us for block in blocks),
        posting=steps.posting,
        messages=_messages(steps, blocks, machine, rings),
    )


def _away(steps: Steps, tiers: Sequence[Tier], machine: Machine) -> dict[int, tuple[float, float]]:
    """Microseconds of the wire, and of hops, in each kind of step in which anything leaves the device."""
    away = steps.peer >= 0
    step, peer, is_trip = steps.step[away], steps.peer[away], steps.is_trip[away]
    did, amount = steps.records["did"][away], steps.records["amount"][away].astype(np.int64)
    flight = np.zeros(len(tiers))
    for other in np.unique(peer).tolist():
        flight[other] = hop_us(machine, tiers[other])
    us_by_kind = {}
    for kind in np.unique(step).tolist():
        here = step == kind
        in_flight = min(movement.BUFFERS * steps.blocks, machine.remote_writes_in_flight)
        hops_us = float(flight[peer[here & is_trip]].sum()) / in_flight
        us_by_kind[kind] = _wire(did[here], peer[here], amount[here], machine), hops_us
    return us_by_kind


def _wire(did: np.ndarray, peer: np.ndarray, amount: np.ndarray, machine: Machine) -> float:
    """Microseconds of the wire for some copies to other devices and from them, which have a link each way."""
    total = float(amount.sum())
    most = {kind: _most(peer[did == kind], amount[did == kind]) for kind in (Did.STORE, Did.LOAD)}
    return max(movement.wire(machine, total, most[kind], reads=kind is Did.LOAD) for kind in most)


def _most(peer: np.ndarray, amount: np.ndarray) -> float:
    """Bytes of the peer with most of them; 0 where there are none."""
    return float(np.bincount(peer, amount).max(initial=0))


def _us(steps_us: Mapping[int, float], away: Mapping[int, tuple[float, float]]) -> float:
    """In each kind of step what a core does, or what all cores have for other devices meanwhile."""
    return sum(max(us, sum(away.get(kind, (0.0,)))) for kind, us in steps_us.items())


def _parts(core: Block, away: Mapping[int, tuple[float, float]]) -> dict[str, float]:
    """The same by its names."""
    parts: dict[str, float] = {}
    for kind, us in core.steps_us.items():
        wire_us, hops_us = away.get(kind, (0.0, 0.0))
        for name, part in ("wire", wire_us), ("hops", hops_us), (NAMES[kind], us - wire_us - hops_us):
            if part > 0:
                parts[name] = parts.get(name, 0.0) + part
    return parts


@dataclass(frozen=True)
class Block:
    """One core's time.

    Attributes:
        us: in all.
        steps_us: of each kind of step.
        posted_us: when it has posted each of its messages.
    """

    us: float
    steps_us: dict[int, float]
    posted_us: list[float]


def clocked(steps: Steps, machine: Machine, rate: float, post_us: float) -> list[Block]:
    """Runs the cores of a launch.

    Args:
        steps: what they do.
        machine: whose cores.
        rate: bytes of copies in a cycle.
        post_us: of each post.
    """
    blocks = []
    us_per_tick = us_of(machine, 1 / clock.TICKS_PER_CYCLE)
    cores = clock.cores(ops_of(steps, machine, rate, post_us), steps.ends, machine)
    for begin, core in zip(steps.begins.tolist(), cores, strict=True):
        is_mark = core.events["what"] == clock.BEFORE
        kinds = steps.marks[begin + core.events["op"][is_mark]].tolist()
        times = np.r_[0, core.events["begin"][is_mark], core.end] * us_per_tick
        of_steps: dict[int, float] = {}
        for kind, us in zip([ascendc.TRACE_BLOCK, *kinds], np.diff(times).tolist(), strict=True):
            of_steps[kind] = of_steps.get(kind, 0.0) + us
        posted_us = core.events["begin"][~is_mark] * us_per_tick
        blocks.append(Block(float(times[-1]), of_steps, posted_us.tolist()))
    return blocks


def ops_of(steps: Steps, machine: Machine, rate: float, post_us: float) -> np.ndarray:
    """(N,) `autotune.model.kernel_costs.clock.OP` of what a launch's cores do: see `clocked`."""
    records, did = steps.records, steps.records["did"]
    amount, flags = records["amount"].astype(float), records["flags"]
    ops = np.zeros(len(records), clock.OP)  # marks and meetings take no time: see `Steps.meetings`
    cycles, latency = np.zeros(len(records)), np.zeros(len(records))
    for kind in np.unique(did).tolist():
        here = did == kind
        match Did(kind):
            case Did.LOAD | Did.STORE:
                ops["kind"][here], cycles[here] = clock.Kind.COPY, amount[here] / rate
                is_load = kind == Did.LOAD
                latency[here] = machine.load_latency_cycles if is_load else machine.store_latency_cycles
            case Did.VECTOR:
                factor = np.where(flags[here] & REDUCES, machine.vector_reduce_factor, 1.0)
                work = factor * amount[here] / machine.vector_bytes_per_cycle
                ops["kind"][here], cycles[here] = clock.Kind.VECTOR, machine.vector_latency_cycles + work
            case Did.LOCAL:
                cycles[here] = machine.scalar_local_cycles * amount[here]
            case Did.GLOBAL:
                is_missed = flags[here] & MISSED > 0
                ops["kind"][here] = np.where(is_missed, clock.Kind.GLOBAL, clock.Kind.SCALAR)
                cycles[here] = np.where(is_missed, machine.scalar_global_cycles, machine.scalar_local_cycles)
            case Did.DROP:
                cycles[here] = machine.issue_cycles
            case Did.POST:
                cycles[here] = machine.issue_cycles + post_us * machine.clock_ghz * 1e3
                ops["noted"][here] = clock.AFTER
            case Did.SET:
                ops["kind"][here], cycles[here] = clock.Kind.SET, machine.flag_cycles
            case Did.WAIT:
                ops["kind"][here] = clock.Kind.WAIT
            case Did.BARRIER:
                ops["kind"][here] = clock.Kind.BARRIER
        if kind in (Did.LOAD, Did.STORE, Did.POST):
            ops["before"][here] = clock.ticks_of(REGISTERS_PER_COPY * machine.scalar_cycles)
    is_wait = did == Did.WAIT
    ops["pipe"] = np.where(is_wait, records["other"], records["pipe"])
    ops["other"] = np.where(is_wait, records["pipe"], records["other"])
    ops["event"] = records["amount"]
    ops["ticks"], ops["latency"] = clock.ticks_of(cycles), clock.ticks_of(latency)
    ops["noted"] |= np.where(steps.marks[:-1] >= 0, clock.BEFORE, 0).astype(np.uint8)
    return ops


def _messages(steps: Steps, blocks: Sequence[Block], machine: Machine, rings: bool) -> Messages | None:
    """What a launch posts, in the order in which its port takes it."""
    if not steps.posting:
        return None
    pairs = [(*steps.posts_of(block), blocks[block]) for block in steps.posting]
    peers = np.concatenate([ranks for ranks, _, _ in pairs])
    num_bytes = np.concatenate([numbers for _, numbers, _ in pairs])
    asked = np.concatenate([each.posted_us for _, _, each in pairs])
    asked = asked - max(block.us for block in blocks)  # from the launch's end on
    # Cores ring at about the same time: in the time of one post, what is for the next ranks comes first.
    behind = (peers - steps.rank - 1) % steps.num_ranks
    slot = np.floor((asked - asked.min()) / machine.post_aicpu_us) if rings else asked
    order = np.lexsort((np.arange(len(peers)), behind, slot))
    posted = np.maximum.accumulate(asked[order])
    if rings:
        before = machine.post_aicpu_us * np.arange(posted.size)
        posted = np.maximum.accumulate(posted - before) + before + machine.post_aicpu_us
    return Messages(peers[order], num_bytes[order], posted)
