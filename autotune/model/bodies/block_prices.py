"""What `autotune.model.bodies.blocks` counts, priced for a machine."""

from __future__ import annotations

import numpy as np

from autotune.model.bodies import blocks, movement, posts
from autotune.model.bodies.counts import Counted, reached
from autotune.model.bodies.movement import merged
from autotune.model.bodies.pricing import (
    SCALAR_PER_ENTRY,
    SCALAR_PER_SLOT,
    cost_of,
    loaded_cycles,
    pipelined_us,
    scalar_cycles,
    slowest,
    start_us,
    stored_cycles,
    tables_us,
)
from autotune.model.constants import Machine
from autotune.model.cost import Cost, Work


def flags(work: Work, machine: Machine, counted: Counted) -> dict[str, float]:
    """Headers or flags of the ranks of a block's share; a barrier of the pipe behind each header's counts."""
    did = counted.stages["flags"]
    cycles = scalar_cycles(machine, did, SCALAR_PER_ENTRY)
    cycles += stored_cycles(machine, did, did.barriers + np.minimum(did.stores, 1))
    tiers = reached(work)
    hops = movement.hops(machine, movement.remote(counted.flags, tiers), tiers, work.blocks)
    return {"flags": slowest(machine, cycles), "hops": hops}


def _rows(work: Work, machine: Machine, counted: Counted, row_bytes: int) -> dict[str, float]:
    did = counted.stages["rows"]
    pipes = (
        scalar_cycles(machine, did, SCALAR_PER_SLOT),
        loaded_cycles(machine, did, did.loads),
        stored_cycles(machine, did, did.turns),
    )
    tiers, loop_us = reached(work), pipelined_us(machine, did, pipes)
    return movement.written_remotely(machine, counted.rows, row_bytes, tiers, work.blocks, loop_us)


def _posted(work: Work, machine: Machine, counted: Counted, parts: dict[str, float]) -> Cost:
    """With the blocks that are posted while others are made: what a core tells and looks at, and items."""
    if "posts" not in counted.stages:
        return cost_of(counted, parts)
    told, ends, asked = (counted.stages[name] for name in ("told", "ends", "posts"))
    cycles = scalar_cycles(machine, told) + told.barriers * machine.store_latency_cycles
    cycles += scalar_cycles(machine, ends, SCALAR_PER_ENTRY) + loaded_cycles(machine, ends, ends.turns)
    cycles += stored_cycles(machine, ends, np.minimum(ends.turns, ends.stores))
    cycles += scalar_cycles(machine, asked, SCALAR_PER_ENTRY) + stored_cycles(machine, asked, asked.stores)
    cost = cost_of(counted, parts | {"items": slowest(machine, cycles)})
    making = cost.us - sum(cost.parts.get(name, 0.0) for name in ("scalar", "starts", "flags"))
    return posts.with_messages(work, machine, cost, making)


def blocks_end(work: Work, machine: Machine) -> Cost:
    """One flag to every rank."""
    counted = posts.blocks_end(work)
    return cost_of(counted, {"scalar": start_us(machine, counted), **flags(work, machine, counted)})


def blocks_send(work: Work, machine: Machine) -> Cost:
    """Headers, then rows to their places in the receivers' blocks."""
    counted = blocks.blocks_send(work)
    did = counted.stages["starts"]
    starts = slowest(machine, scalar_cycles(machine, did) + loaded_cycles(machine, did, did.loads))
    parts = merged(
        {"scalar": start_us(machine, counted), "starts": starts, "tables": tables_us(machine, counted)},
        _rows(work, machine, counted, work.number("row_step")),
        flags(work, machine, counted),
    )
    return _posted(work, machine, counted, parts)


def blocks_return(work: Work, machine: Machine) -> Cost:
    """A walk over all entries, rows to their places, headers."""
    counted = blocks.blocks_return(work)
    parts = merged(
        {"scalar": start_us(machine, counted), "tables": tables_us(machine, counted)},
        _rows(work, machine, counted, work.number("row_step")),
        flags(work, machine, counted),
    )
    return _posted(work, machine, counted, parts)


def blocks_wait(work: Work, machine: Machine) -> Cost:
    """Looks at each block, one after the other, and its counts."""
    counted = blocks.blocks_wait(work)
    poll, store = counted.stages["poll"], counted.stages["store"]
    looks = loaded_cycles(machine, poll, poll.loads) + scalar_cycles(machine, poll, SCALAR_PER_ENTRY)
    looks += poll.loads * 2 * machine.flag_cycles
    stores = scalar_cycles(machine, store, SCALAR_PER_ENTRY)
    stores += stored_cycles(machine, store, np.minimum(store.stores, 1))
    parts = {
        "scalar": start_us(machine, counted),
        "poll": slowest(machine, looks),
        "store": slowest(machine, stores),
    }
    return cost_of(counted, parts)
