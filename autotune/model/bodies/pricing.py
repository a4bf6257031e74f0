"""What the formulas of the Ascend C kernels are made of: cycles of each block's pipes, from what it does."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autotune.model.bodies import movement
from autotune.model.bodies.counts import Counted, Counts
from autotune.model.bodies.movement import core_loop, us_of
from autotune.model.constants import Machine
from autotune.model.cost import Cost

SCALAR_PER_SLOT = 60
"""Instructions on registers for the address of one slot: a division, products by strides, checks of
extents. Assumed: the emulation does not see instructions on registers.
"""

SCALAR_PER_ENTRY = 20
"""Instructions on registers for one status entry. Assumed, too."""


def scalar_cycles(machine: Machine, did: Counts, per_item: int = 0) -> np.ndarray:
    """Cycles of each block's scalar pipe; every instruction of another pipe is issued by it."""
    near = did.scalar_local + did.scalar_global - did.lines
    issued = did.loads + did.stores + did.dropped + did.vector + did.barriers
    cycles: np.ndarray = (
        near * machine.scalar_local_cycles
        + did.lines * machine.scalar_global_cycles
        + issued * machine.issue_cycles
        + did.items * per_item * machine.scalar_cycles
    )
    return cycles


def loaded_cycles(
    machine: Machine, did: Counts, latencies: np.ndarray, cores: int | None = None
) -> np.ndarray:
    """Cycles of each block's copies from global memory, so many of which something waits for; `cores`
    if more than these blocks share the memory's rate.
    """
    rate = movement.bytes_per_cycle(machine, cores or len(did.loads))
    cycles: np.ndarray = latencies * machine.load_latency_cycles + did.load_bytes / rate
    return cycles


def stored_cycles(
    machine: Machine, did: Counts, latencies: np.ndarray, cores: int | None = None
) -> np.ndarray:
    """Cycles of each block's copies to global memory, so many of which something waits for; `cores`
    if more than these blocks share the memory's rate.
    """
    rate = movement.bytes_per_cycle(machine, cores or len(did.stores))
    cycles: np.ndarray = latencies * machine.store_latency_cycles + did.store_bytes / rate
    return cycles


def slowest(machine: Machine, cycles: np.ndarray) -> float:
    """Microseconds of the block that takes longest."""
    return us_of(machine, float(cycles.max()))


def start_us(machine: Machine, counted: Counted) -> float:
    """Microseconds before the first loop: words in global memory, the table of windows, kept words."""
    did = counted.stages["start"]
    cycles = scalar_cycles(machine, did) + did.vector * machine.vector_latency_cycles
    return slowest(machine, cycles + stored_cycles(machine, did, np.minimum(did.stores, 1)))


def tables_us(machine: Machine, counted: Counted) -> float:
    """Microseconds of tables of indices; a core waits for each of its chunks."""
    did = counted.stages["tables"]
    flags = did.turns * 2 * machine.flag_cycles
    return slowest(machine, scalar_cycles(machine, did) + loaded_cycles(machine, did, did.turns) + flags)


def pipelined_us(machine: Machine, did: Counts, pipes: tuple[np.ndarray, ...]) -> float:
    """Microseconds of the slowest block's double-buffered loop, from the cycles of each pipe."""
    turns = zip(did.turns.tolist(), *(cycles.tolist() for cycles in pipes), strict=True)
    return max(core_loop(machine, n, [each / n for each in cycles]) if n else 0.0 for n, *cycles in turns)


def cost_of(counted: Counted, parts: Mapping[str, float]) -> Cost:
    """Parts of the time, and bytes as they are counted."""
    total = counted.total
    sent = int(total.sent_bytes.sum())
    return Cost(parts, int(total.load_bytes.sum()), int(total.store_bytes.sum()) - sent, sent)


def polled_cycles(machine: Machine, did: Counts, per_item: int = 0) -> np.ndarray:
    """Cycles of loading flags and reducing them to a number, which scalar code reads."""
    each = loaded_cycles(machine, did, did.turns) + scalar_cycles(machine, did, per_item)
    reduced = did.turns * machine.vector_latency_cycles + did.load_bytes / machine.vector_bytes_per_cycle
    cycles: np.ndarray = each + machine.vector_reduce_factor * reduced + did.turns * 2 * machine.flag_cycles
    return cycles
