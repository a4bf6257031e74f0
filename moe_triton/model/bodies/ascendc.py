"""The bodies of the Ascend C kernels: what `moe_triton.model.bodies.sends` and
`moe_triton.model.bodies.waits` count, priced for a machine.

Each stage takes as long as the block that takes longest in it. Copies take their latencies and their bytes,
scalar code its accesses and the instructions around them; an access to global memory that finds its line in
the core's data cache is priced like one to the unified buffer. Waits for other ranks are no part of a body:
a waiting kernel costs what it does once everything has arrived (`moe_triton.model.timelines.timeline` adds
the rest).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from moe_triton.layout import STAMP_BYTES, STATUS_ENTRY_BYTES
from moe_triton.model.bodies import movement
from moe_triton.model.bodies import sends as ascendc_sends
from moe_triton.model.bodies import waits as ascendc_waits
from moe_triton.model.bodies.counts import Counted, Counts
from moe_triton.model.bodies.movement import core_loop, merged, us_of
from moe_triton.model.constants import Machine
from moe_triton.model.cost import Body, Cost, Work

SCALAR_PER_SLOT = 60
"""Instructions on registers for the address of one slot: a division, products by strides, checks of
extents. Assumed: the emulation does not see instructions on registers.
"""

SCALAR_PER_ENTRY = 20
"""Instructions on registers for one status entry. Assumed, too."""


def _scalar(machine: Machine, did: Counts, per_item: int = 0) -> np.ndarray:
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


def _loads(machine: Machine, did: Counts, latencies: np.ndarray) -> np.ndarray:
    """Cycles of each block's copies from global memory, so many of which something waits for."""
    rate = movement.bytes_per_cycle(machine, len(did.loads))
    cycles: np.ndarray = latencies * machine.load_latency_cycles + did.load_bytes / rate
    return cycles


def _stores(machine: Machine, did: Counts, latencies: np.ndarray) -> np.ndarray:
    """Cycles of each block's copies to global memory, so many of which something waits for."""
    rate = movement.bytes_per_cycle(machine, len(did.stores))
    cycles: np.ndarray = latencies * machine.store_latency_cycles + did.store_bytes / rate
    return cycles


def _slowest(machine: Machine, cycles: np.ndarray) -> float:
    """Microseconds of the block that takes longest."""
    return us_of(machine, float(cycles.max()))


def _start(machine: Machine, counted: Counted) -> float:
    """Microseconds before the first loop: words in global memory, the table of windows, kept words."""
    did = counted.stages["start"]
    cycles = _scalar(machine, did) + did.vector * machine.vector_latency_cycles
    return _slowest(machine, cycles + _stores(machine, did, np.minimum(did.stores, 1)))


def _tables(machine: Machine, counted: Counted) -> float:
    """Microseconds of tables of indices; a core waits for each of its chunks."""
    did = counted.stages["tables"]
    flags = did.turns * 2 * machine.flag_cycles
    return _slowest(machine, _scalar(machine, did) + _loads(machine, did, did.turns) + flags)


def _loop(machine: Machine, did: Counts, pipes: tuple[np.ndarray, np.ndarray, np.ndarray]) -> float:
    """Microseconds of the slowest block's double-buffered loop, from the cycles of each pipe."""
    turns = zip(did.turns.tolist(), *(cycles.tolist() for cycles in pipes), strict=True)
    return max(core_loop(machine, n, [each / n for each in cycles]) if n else 0.0 for n, *cycles in turns)


def _rows(work: Work, machine: Machine, counted: Counted, row_bytes: int, loop_us: float) -> dict[str, float]:
    return movement.written_remotely(
        machine, counted.rows, row_bytes, work.traffic.tiers, work.blocks, loop_us
    )


def _hops(work: Work, machine: Machine, counted: Counted) -> float:
    """Microseconds of the hops of flags and entries."""
    tiers = work.traffic.tiers
    return movement.hops(machine, movement.remote(counted.flags, tiers), tiers, work.blocks)


def _cost(counted: Counted, parts: Mapping[str, float]) -> Cost:
    total = counted.total
    sent = int(total.sent_bytes.sum())
    return Cost(parts, int(total.load_bytes.sum()), int(total.store_bytes.sum()) - sent, sent)


def _flags(work: Work, machine: Machine, counted: Counted) -> dict[str, float]:
    """Status entries to all ranks; where they were counted at the receivers, or were not, nothing."""
    if "flags" not in counted.stages:
        return {}
    did = counted.stages["flags"]
    cycles = _scalar(machine, did, SCALAR_PER_ENTRY) + _loads(machine, did, did.loads)
    cycles += _stores(machine, did, np.minimum(did.stores, 1))
    return {"flags": _slowest(machine, cycles), "hops": _hops(work, machine, counted)}


def _barrier(machine: Machine, counted: Counted) -> dict[str, float]:
    syncs = int(counted.total.syncs.max())
    return {"barrier": syncs * machine.sync_all_us} if syncs else {}


def _priced_sends(work: Work, machine: Machine, counted: Counted, slot_bytes: int) -> Cost:
    """Rows of tokens to slots: a row is loaded once for all of a token's results that a block has."""
    did = counted.stages["rows"]
    # Copies of one visit to its slots follow one another; the next visit's buffer waits for the last of them.
    pipes = (
        _scalar(machine, did, SCALAR_PER_SLOT),
        _loads(machine, did, did.loads),
        _stores(machine, did, did.turns),
    )
    parts = merged(
        {"scalar": _start(machine, counted), "tables": _tables(machine, counted)},
        _rows(work, machine, counted, slot_bytes, _loop(machine, did, pipes)),
        _barrier(machine, counted),
        _flags(work, machine, counted),
    )
    return _cost(counted, parts)


def dispatch_send(work: Work, machine: Machine) -> Cost:
    """Rows with stamps, a barrier of all cores, a status entry for every expert."""
    counted = ascendc_sends.dispatch_send(work)
    return _priced_sends(work, machine, counted, work.number("row_bytes") + STAMP_BYTES)


def inband_send(work: Work, machine: Machine) -> Cost:
    """Status entries first, then rows in blocks that carry their flags."""
    return _priced_sends(
        work, machine, ascendc_sends.inband_send(work), ascendc_sends.inband_slot_bytes(work)
    )


def direct_send(work: Work, machine: Machine) -> Cost:
    """Rows to their places in the receivers' outputs, stamps and several scales apart."""
    counted = ascendc_sends.direct_send(work)
    slot_bytes = work.number("row_bytes") + work.number("scale_bytes") + STAMP_BYTES
    return _priced_sends(work, machine, counted, slot_bytes)


def counts_send(work: Work, machine: Machine) -> Cost:
    """All counts to every rank, a barrier of the pipe, a flag each."""
    counted = ascendc_sends.counts_send(work)
    did = counted.stages["entries"]
    # The barrier waits for the counts, the kernel's end for the flags.
    cycles = _scalar(machine, did, SCALAR_PER_ENTRY) + _loads(machine, did, np.minimum(did.loads, 1))
    cycles += _stores(machine, did, np.minimum(did.stores, 2))
    cost = _cost(counted, {})
    parts = {
        "scalar": _start(machine, counted),
        "cores": _slowest(machine, cycles),
        "wire": movement.wire(machine, cost.sent),
        "hops": _hops(work, machine, counted),
    }
    return _cost(counted, parts)


def post_status(work: Work, machine: Machine) -> Cost:
    """One entry to every rank."""
    counted = ascendc_sends.post_status(work)
    return _cost(counted, {"scalar": _start(machine, counted), **_flags(work, machine, counted)})


def combine_send(work: Work, machine: Machine) -> Cost:
    """Each result to its token's slot, a barrier of the copying pipe, its flag."""
    counted = ascendc_sends.combine_send(work)
    did = counted.stages["rows"]
    # The barrier before a flag waits for its row.
    pipes = (
        _scalar(machine, did, SCALAR_PER_SLOT),
        _loads(machine, did, did.loads),
        _stores(machine, did, did.turns + did.barriers),
    )
    row_bytes = work.number("row_bytes") + STATUS_ENTRY_BYTES * (work.number("flag_rows") != 0)
    parts = merged(
        {"scalar": _start(machine, counted), "tables": _tables(machine, counted)},
        _rows(work, machine, counted, row_bytes, _loop(machine, did, pipes)),
    )
    return _cost(counted, parts)


def exchange_send(work: Work, machine: Machine) -> Cost:
    """Consecutive rows to one rank's slots, with their scales and a header."""
    counted = ascendc_sends.exchange_send(work)
    did, header = counted.stages["rows"], counted.stages["header"]
    # Scales come in a copy for many rows, which the first of them waits for.
    pipes = (
        _scalar(machine, did, SCALAR_PER_ENTRY),
        _loads(machine, did, did.loads),
        _stores(machine, did, did.turns),
    )
    head = _scalar(machine, header) + _loads(machine, header, header.loads)
    head += _stores(machine, header, np.minimum(header.stores, 1))
    slot_bytes = ascendc_sends.exchange_slot_bytes(work)
    parts = merged(
        {"scalar": _start(machine, counted) + _slowest(machine, head)},
        _rows(work, machine, counted, slot_bytes, _loop(machine, did, pipes)),
    )
    return _cost(counted, parts)


def _polls(machine: Machine, did: Counts, per_item: int = 0) -> np.ndarray:
    """Cycles of loading flags and reducing them to a number, which scalar code reads."""
    each = _loads(machine, did, did.turns) + _scalar(machine, did, per_item)
    reduced = did.turns * machine.vector_latency_cycles + did.load_bytes / machine.vector_bytes_per_cycle
    cycles: np.ndarray = each + machine.vector_reduce_factor * reduced + did.turns * 2 * machine.flag_cycles
    return cycles


def dispatch_wait(work: Work, machine: Machine) -> Cost:
    """A look at the status entries, their counts, and zeros in their places."""
    counted = ascendc_waits.dispatch_wait(work)
    poll, store = counted.stages["poll"], counted.stages["store"]
    # Zeros before a poll and after it, over all entries each time.
    zeros = poll.turns * machine.vector_latency_cycles + poll.load_bytes / machine.vector_bytes_per_cycle
    stores = 2 * zeros + _stores(machine, store, store.turns + np.minimum(store.turns, 1))
    parts = {
        "scalar": _start(machine, counted) + _slowest(machine, _scalar(machine, store, SCALAR_PER_ENTRY)),
        "poll": _slowest(machine, _polls(machine, poll)),
        "store": _slowest(machine, stores),
    }
    return _cost(counted, parts)


def combine_wait(work: Work, machine: Machine) -> Cost:
    """For each token a look at its results' flags, and zeros in their places."""
    counted = ascendc_waits.combine_wait(work)
    poll, store = counted.stages["poll"], counted.stages["store"]
    # Nothing waits for zeros but the kernel's end.
    stores = _scalar(machine, store) + _stores(machine, store, np.minimum(store.stores, 1))
    parts = {
        "scalar": _start(machine, counted),
        "tables": _tables(machine, counted),
        "poll": _slowest(machine, _polls(machine, poll, 2 * SCALAR_PER_ENTRY)),
        "store": _slowest(machine, stores),
    }
    return _cost(counted, parts)


def inband_receive(work: Work, machine: Machine) -> Cost:
    """For each row a look at its blocks' flags, the row to its place, its stamp, zeros in the flags'
    places.
    """
    counted = ascendc_waits.inband_receive(work)
    did, poll = counted.stages["rows"], counted.stages["poll"]
    # Loads of small things follow one another, and are waited for once for rows that are polled together.
    pipes = (
        _scalar(machine, did, SCALAR_PER_SLOT),
        _loads(machine, did, did.turns + poll.turns),
        _stores(machine, did, did.turns),
    )
    parts = {
        "scalar": _start(machine, counted),
        "tables": _tables(machine, counted),
        "poll": _slowest(machine, _polls(machine, poll)),
        "cores": _loop(machine, did, pipes),
    }
    return _cost(counted, parts)


FORMULAS: dict[str, Body] = {
    body.__name__: body
    for body in (
        dispatch_send,
        counts_send,
        direct_send,
        dispatch_wait,
        inband_send,
        inband_receive,
        combine_send,
        combine_wait,
        post_status,
        exchange_send,
    )
}

COUNTS: dict[str, Callable[[Work], Counted]] = {
    counts.__name__: counts
    for counts in (
        ascendc_sends.dispatch_send,
        ascendc_sends.counts_send,
        ascendc_sends.direct_send,
        ascendc_waits.dispatch_wait,
        ascendc_sends.inband_send,
        ascendc_waits.inband_receive,
        ascendc_sends.combine_send,
        ascendc_waits.combine_wait,
        ascendc_sends.post_status,
        ascendc_sends.exchange_send,
    )
}
"""What is priced, by kernel."""
