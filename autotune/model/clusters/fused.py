"""Ascend's own fused operators, dispatch and combine in one launch each, as a timeline of the same kernel
costs.

Written once from the published design (four steps: send, flag, wait, arrange; all cores take part in each)
and used to hold the model against published times (`autotune.model.fits.validate`). Dispatch quantises a
row for each result, between its load and its store, and has two barriers of all cores: before its flags
and after its waits. Combine has none: a flag follows each row, and the cores that wait for a token sum it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autotune.model.constants import Machine
from autotune.model.kernel_costs import movement
from autotune.model.kernel_costs.movement import core_loop, load_cycles, store_cycles, us_of, vector_cycles
from autotune.model.topology import hop_us, tiers
from moe_triton.layout import STATUS_ENTRY_BYTES, UB_ALIGN, WORD_BYTES, align

SCALAR_PER_SLOT, SCALAR_PER_ENTRY = 60, 20
"""Instructions on registers for the address of one slot, a division, products by strides, checks of
extents; and for one status entry. Assumed.
"""

FP32_BYTES = 4
QUANTISE = 10
"""Vector instructions over a row in fp32: to fp32, abs, three of a maximum, times, to int32, to fp16, to
int8, scale.
"""

SUM = 3
"""Vector instructions over a result in fp32: to fp32, times its weight, add."""

COUNT = 3
"""Vector instructions over all ids, for the place of one of them: compare, select, add."""


@dataclass(frozen=True)
class Call:
    """One call of a fused operator, on a rank like all others.

    Attributes:
        product: "A2" or "A3".
        ranks: of the group, one per device.
        tokens: of each rank.
        topk: experts of each token.
        experts: of the group.
        hidden: elements of a row.
        most_rows: rows that the rank with most of them receives.
        cores: that take part; the machine's if 0.
    """

    product: str
    ranks: int
    tokens: int
    topk: int
    experts: int
    hidden: int
    most_rows: float
    cores: int = 0

    @property
    def rows(self) -> int:
        """Results of one rank's tokens."""
        return self.tokens * self.topk

    @property
    def slot_bytes(self) -> int:
        """Bytes of a quantised row, its scale and its origin, as they are sent."""
        return align(self.hidden, UB_ALIGN) + 2 * UB_ALIGN

    def tiers(self) -> tuple[str, ...]:
        """How far each rank is from the first one."""
        return tiers(self.product, self.ranks, 0)

    def cores_of(self, machine: Machine) -> int:
        """How many cores take part."""
        return self.cores or int(machine.cores)


Phases = dict[str, Mapping[str, float]]
"""Parts in microseconds of each phase, by its name, in order."""


def total(phases: Phases) -> float:
    """Microseconds of phases that follow one another."""
    return sum(sum(parts.values()) for parts in phases.values())


def dispatch(call: Call, machine: Machine) -> Phases:
    """Phases of a dispatch whose ranks reach each other's memory."""
    reach, cores = call.tiers(), call.cores_of(machine)
    rows = np.full(call.ranks, call.rows / call.ranks)
    flags = movement.remote(np.full(call.ranks, call.experts / call.ranks), reach)
    entries = math.ceil(call.experts / cores)
    flag_cycles = entries * (4 * machine.scalar_local_cycles + SCALAR_PER_ENTRY * machine.scalar_cycles)
    return {
        "start": {"start": machine.fused_start_us},
        "count": {"cores": counting(call, machine)},
        "send": movement.written_remotely(
            machine, rows, call.slot_bytes, reach, cores, quantising(call, machine)
        ),
        "barrier": {"barrier": machine.sync_all_us},
        "flag": {
            "flags": us_of(machine, flag_cycles + machine.store_latency_cycles),
            "hops": movement.hops(machine, flags, reach, cores),
        },
        "wait": arrival(call, machine, call.slot_bytes),
        "second barrier": {"barrier": machine.sync_all_us},
        "arrange": {"cores": arranging(call, machine)},
    }


def combine(call: Call, machine: Machine) -> Phases:
    """Phases of a combine whose ranks reach each other's memory."""
    reach, cores, row_bytes = call.tiers(), call.cores_of(machine), 2 * call.hidden
    rows = np.full(call.ranks, call.most_rows / call.ranks)
    scalar = 4 * machine.scalar_local_cycles + SCALAR_PER_SLOT * machine.scalar_cycles
    store = store_cycles(machine, row_bytes, cores) + store_cycles(machine, STATUS_ENTRY_BYTES, cores)
    loop = core_loop(machine, call.most_rows / cores, (scalar, load_cycles(machine, row_bytes, cores), store))
    return {
        "start": {"start": machine.fused_start_us},
        "send": movement.written_remotely(machine, rows, row_bytes, reach, cores, loop),
        "wait": {"hops": max(hop_us(machine, tier) for tier in reach), "poll": machine.flag_latency_us},
        "sum": {"cores": summing(call, machine)},
    }


def counting(call: Call, machine: Machine) -> float:
    """Microseconds until a core knows its rows' places: each is a count of equal ids before it."""
    cores = call.cores_of(machine)
    ids_bytes = call.rows * WORD_BYTES
    reduced = machine.vector_reduce_factor * vector_cycles(machine, ids_bytes)
    each = vector_cycles(machine, ids_bytes, COUNT) + reduced
    each += 2 * machine.flag_cycles + machine.scalar_local_cycles
    own = math.ceil(call.rows / cores) + math.ceil(call.experts / cores)
    return us_of(machine, load_cycles(machine, ids_bytes, cores) + own * each)


def quantising(call: Call, machine: Machine) -> float:
    """Microseconds of the slowest core's loop: load a row, quantise it, hand it to the copy out."""
    cores = call.cores_of(machine)
    scalar = 9 * machine.scalar_local_cycles + SCALAR_PER_SLOT * machine.scalar_cycles
    load = load_cycles(machine, 2 * call.hidden, cores)
    store = store_cycles(machine, call.slot_bytes, cores)
    vector = vector_cycles(machine, FP32_BYTES * call.hidden, QUANTISE)
    return core_loop(machine, call.rows / cores, (scalar, load, vector, store))


def arrival(call: Call, machine: Machine, row_bytes: int) -> dict[str, float]:
    """Until the last flag is seen: the farthest hop, the poll, and what the busiest rank gets more than
    others.
    """
    more = (call.most_rows - call.rows) / call.ranks * row_bytes  # from each rank
    return {
        "hops": max(hop_us(machine, tier) for tier in call.tiers()),
        "poll": machine.flag_latency_us,
        "wire": movement.wire(machine, more * (call.ranks - 1), more),
    }


def arranging(call: Call, machine: Machine) -> float:
    """Microseconds of the slowest core's loop from the window to the output."""
    cores = call.cores_of(machine)
    scalar = 4 * machine.scalar_local_cycles + SCALAR_PER_SLOT * machine.scalar_cycles
    copied = (step(machine, call.slot_bytes, cores) for step in (load_cycles, store_cycles))
    return core_loop(machine, call.most_rows / cores, (scalar, *copied))


def summing(call: Call, machine: Machine) -> float:
    """Microseconds of the slowest core's loop over its tokens' results."""
    cores = call.cores_of(machine)
    results = math.ceil(call.tokens / cores) * call.topk
    load = load_cycles(machine, 2 * call.hidden, cores)
    vector = vector_cycles(machine, FP32_BYTES * call.hidden, SUM)
    return core_loop(machine, results, (machine.scalar_local_cycles, load, vector))
