"""The bodies of the Ascend C kernels, priced for a machine: what `autotune.model.bodies.sends`,
`autotune.model.bodies.direct`, `autotune.model.bodies.blocks`, `autotune.model.bodies.waits`,
`autotune.model.bodies.offsets` and `autotune.model.bodies.combines` count.

Each stage takes as long as the block that takes longest in it. Copies take their latencies and their bytes,
scalar code its accesses and the instructions around them; an access to global memory that finds its line in
the core's data cache is priced like one to the unified buffer. Waits for other ranks are no part of a body:
a waiting kernel costs what it does once everything has arrived (`autotune.model.timelines.timeline` adds
the rest).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autotune.model.bodies import block_prices, movement, post_prices
from autotune.model.bodies import blocks as ascendc_blocks
from autotune.model.bodies import combines as ascendc_combines
from autotune.model.bodies import direct as ascendc_direct
from autotune.model.bodies import offsets as ascendc_offsets
from autotune.model.bodies import posts as ascendc_posts
from autotune.model.bodies import receives as ascendc_receives
from autotune.model.bodies import sends as ascendc_sends
from autotune.model.bodies import waits as ascendc_waits
from autotune.model.bodies.counts import Counted, Counts, reached
from autotune.model.bodies.movement import merged
from autotune.model.bodies.pricing import (
    SCALAR_PER_ENTRY,
    SCALAR_PER_SLOT,
    cost_of,
    loaded_cycles,
    pipelined_us,
    polled_cycles,
    scalar_cycles,
    slowest,
    start_us,
    stored_cycles,
    tables_us,
)
from autotune.model.constants import Machine
from autotune.model.cost import Body, Cost, Work
from moe_triton.layout import STAMP_BYTES, STATUS_ENTRY_BYTES


def _rows(work: Work, machine: Machine, counted: Counted, row_bytes: int, loop_us: float) -> dict[str, float]:
    return movement.written_remotely(machine, counted.rows, row_bytes, reached(work), work.blocks, loop_us)


def _hops(work: Work, machine: Machine, counted: Counted) -> float:
    """Microseconds of the hops of flags and entries."""
    tiers = reached(work)
    return movement.hops(machine, movement.remote(counted.flags, tiers), tiers, work.blocks)


def _flags(work: Work, machine: Machine, counted: Counted) -> dict[str, float]:
    """Status entries to all ranks; where they were counted at the receivers, or were not, nothing."""
    if "flags" not in counted.stages:
        return {}
    did = counted.stages["flags"]
    cycles = scalar_cycles(machine, did, SCALAR_PER_ENTRY) + loaded_cycles(machine, did, did.loads)
    cycles += stored_cycles(machine, did, np.minimum(did.stores, 1))
    return {"flags": slowest(machine, cycles), "hops": _hops(work, machine, counted)}


def _priced_sends(
    work: Work, machine: Machine, counted: Counted, slot_bytes: int, *, awaits_loads: bool = False
) -> Cost:
    """Rows of tokens to slots: a row is loaded once for all of a token's results that a block has.

    With ``awaits_loads`` scalar code waits for each of them before it goes on.
    """
    did = counted.stages["rows"]
    # Copies of one visit to its slots follow one another; the next visit's buffer waits for the last of them.
    # The barrier before its flags waits for the row.
    scalar, loaded = scalar_cycles(machine, did, SCALAR_PER_SLOT), loaded_cycles(machine, did, did.loads)
    stored = stored_cycles(machine, did, did.turns + did.barriers)
    pipes = (scalar + loaded, stored) if awaits_loads else (scalar, loaded, stored)
    parts = merged(
        {"scalar": start_us(machine, counted), "tables": tables_us(machine, counted)},
        _rows(work, machine, counted, slot_bytes, pipelined_us(machine, did, pipes)),
        _flags(work, machine, counted),
    )
    return cost_of(counted, parts)


def dispatch_send(work: Work, machine: Machine) -> Cost:
    """A status entry for every expert, then rows; behind each, once it is there, a stamp with its flag."""
    counted = ascendc_sends.dispatch_send(work)
    return _priced_sends(work, machine, counted, work.number("row_bytes") + STAMP_BYTES)


def inband_send(work: Work, machine: Machine) -> Cost:
    """Status entries first, then rows in blocks that carry their flags; stamps go into loaded rows."""
    counted, slot_bytes = ascendc_sends.inband_send(work), ascendc_sends.inband_slot_bytes(work)
    return _priced_sends(work, machine, counted, slot_bytes, awaits_loads=True)


def direct_send(work: Work, machine: Machine) -> Cost:
    """Rows to their places in the receivers' outputs, stamps and several scales apart."""
    counted = ascendc_direct.direct_send(work)
    slot_bytes = work.number("row_bytes") + work.number("scale_bytes") + STAMP_BYTES
    cost = _priced_sends(work, machine, counted, slot_bytes)
    return replace(cost, parts={**cost.parts, **_direct_tables(machine, counted)})


def _direct_tables(machine: Machine, counted: Counted) -> dict[str, float]:
    """Sums of counts before the rows, tables for later steps behind them."""
    starts, offsets, received = (counted.stages[name] for name in ("starts", "offsets", "counts"))
    # Two clamps and at most one sum of all counts; each instruction waits for the one before.
    summed = 3 * starts.load_bytes / machine.vector_bytes_per_cycle
    summed += starts.vector * machine.vector_latency_cycles + 2 * starts.turns * machine.flag_cycles
    cycles = scalar_cycles(machine, starts) + loaded_cycles(machine, starts, starts.turns) + summed
    parts = {"starts": slowest(machine, cycles)}
    for name, did in (("offsets", offsets), ("counts", received)):
        cycles = scalar_cycles(machine, did, SCALAR_PER_SLOT) + loaded_cycles(machine, did, did.turns)
        parts[name] = slowest(machine, cycles + stored_cycles(machine, did, did.turns))
    return parts


def counts_send(work: Work, machine: Machine) -> Cost:
    """All counts to every rank, a barrier of the pipe, a flag each."""
    counted = ascendc_sends.counts_send(work)
    did = counted.stages["entries"]
    # The barrier waits for the counts, the kernel's end for the flags.
    cycles = scalar_cycles(machine, did, SCALAR_PER_ENTRY) + loaded_cycles(
        machine, did, np.minimum(did.loads, 1)
    )
    cycles += stored_cycles(machine, did, np.minimum(did.stores, 2))
    cost = cost_of(counted, {})
    parts = {
        "scalar": start_us(machine, counted),
        "cores": slowest(machine, cycles),
        "wire": movement.wire(machine, cost.sent),
        "hops": _hops(work, machine, counted),
    }
    return cost_of(counted, parts)


def combine_send(work: Work, machine: Machine) -> Cost:
    """Each result to its token's slot, a barrier of the copying pipe, its flag."""
    counted = ascendc_combines.combine_send(work)
    did = counted.stages["rows"]
    # The barrier before a flag waits for its row.
    pipes = (
        scalar_cycles(machine, did, SCALAR_PER_SLOT),
        loaded_cycles(machine, did, did.loads),
        stored_cycles(machine, did, did.turns + did.barriers),
    )
    row_bytes = work.number("row_bytes") + STATUS_ENTRY_BYTES * (work.number("flag_rows") != 0)
    parts = merged(
        {"scalar": start_us(machine, counted), "tables": tables_us(machine, counted)},
        _rows(work, machine, counted, row_bytes, pipelined_us(machine, did, pipes)),
    )
    return cost_of(counted, parts)


def exchange_send(work: Work, machine: Machine) -> Cost:
    """Consecutive rows to one rank's slots, with their scales and a header."""
    counted = ascendc_sends.exchange_send(work)
    did, header = counted.stages["rows"], counted.stages["header"]
    # Scales come in a copy for many rows, which the first of them waits for.
    pipes = (
        scalar_cycles(machine, did, SCALAR_PER_ENTRY),
        loaded_cycles(machine, did, did.loads),
        stored_cycles(machine, did, did.turns),
    )
    head = scalar_cycles(machine, header) + loaded_cycles(machine, header, header.loads)
    head += stored_cycles(machine, header, np.minimum(header.stores, 1))
    slot_bytes = ascendc_sends.exchange_slot_bytes(work)
    parts = merged(
        {"scalar": start_us(machine, counted) + slowest(machine, head)},
        _rows(work, machine, counted, slot_bytes, pipelined_us(machine, did, pipes)),
    )
    return cost_of(counted, parts)


def dispatch_wait(work: Work, machine: Machine) -> Cost:
    """A look at the status entries, their counts, and zeros in their places."""
    counted = ascendc_waits.dispatch_wait(work)
    poll, store = counted.stages["poll"], counted.stages["store"]
    # Zeros before a poll and after it, over all entries each time.
    zeros = poll.turns * machine.vector_latency_cycles + poll.load_bytes / machine.vector_bytes_per_cycle
    stores = 2 * zeros + stored_cycles(machine, store, store.turns + np.minimum(store.turns, 1))
    parts = {
        "scalar": start_us(machine, counted)
        + slowest(machine, scalar_cycles(machine, store, SCALAR_PER_ENTRY)),
        "poll": slowest(machine, polled_cycles(machine, poll)),
        "store": slowest(machine, stores),
    }
    return cost_of(counted, parts)


def _summed(machine: Machine, did: Counts) -> np.ndarray:
    """Cycles of clamping what was loaded, three instructions one after the other, and of reducing it to a
    number, which scalar code reads.
    """
    clamped = (
        did.vector - did.barriers
    )  # each time with two barriers in between, and one before each reduction
    reduced = did.barriers - 2 * clamped
    num_bytes = did.load_bytes / machine.vector_bytes_per_cycle
    sums = reduced * machine.vector_latency_cycles + np.minimum(reduced, 2) * num_bytes
    clamps = clamped * machine.vector_latency_cycles + np.minimum(clamped, 1) * num_bytes
    flags = (did.turns + clamped + reduced) * machine.flag_cycles
    cycles: np.ndarray = 3 * clamps + machine.vector_reduce_factor * sums + flags
    return cycles


def dispatch_offsets(work: Work, machine: Machine) -> Cost:
    """Sums of the counts before a block's own entries, those entries, the slots of their rows."""
    counted = ascendc_offsets.dispatch_offsets(work)
    did, entries = counted.stages["sums"], counted.stages["entries"]
    sums = scalar_cycles(machine, did) + loaded_cycles(machine, did, did.turns) + _summed(machine, did)
    # Nothing waits for the sums' stores but the next chunk, or that of the slots; these end last.
    own = scalar_cycles(machine, entries, SCALAR_PER_ENTRY)
    last = counted.stages.get("slots", entries)
    written = stored_cycles(machine, last, last.turns)
    parts = {
        "scalar": start_us(machine, counted) + slowest(machine, own),
        "sums": slowest(machine, sums),
    }
    if "slots" in counted.stages:
        added = (
            last.vector * machine.vector_latency_cycles + last.store_bytes / machine.vector_bytes_per_cycle
        )
        written += scalar_cycles(machine, last, SCALAR_PER_SLOT) + np.where(last.vector > 0, added, 0)
    return cost_of(counted, {**parts, "store": slowest(machine, written)})


def dispatch_rows(work: Work, machine: Machine) -> Cost:
    """A look at the flags of rows, and zeros in their places."""
    return _priced_rows(machine, ascendc_waits.dispatch_rows(work))


def dispatch_take(work: Work, machine: Machine) -> Cost:
    """The same for rows that no part has taken."""
    return _priced_rows(machine, ascendc_waits.dispatch_take(work))


def _priced_rows(machine: Machine, counted: Counted) -> Cost:
    poll, store = counted.stages["poll"], counted.stages["store"]
    # Nothing waits for zeros but the kernel's end.
    stores = scalar_cycles(machine, store) + stored_cycles(machine, store, np.minimum(store.stores, 1))
    parts = {
        "scalar": start_us(machine, counted),
        "tables": tables_us(machine, counted),
        "poll": slowest(machine, polled_cycles(machine, poll, SCALAR_PER_ENTRY)),
        "store": slowest(machine, stores),
    }
    return cost_of(counted, parts)


def combine_wait(work: Work, machine: Machine) -> Cost:
    """For each token a look at its results' flags, and zeros in their places."""
    counted = ascendc_combines.combine_wait(work)
    poll, store = counted.stages["poll"], counted.stages["store"]
    # Nothing waits for zeros but the kernel's end.
    stores = scalar_cycles(machine, store) + stored_cycles(machine, store, np.minimum(store.stores, 1))
    parts = {
        "scalar": start_us(machine, counted),
        "tables": tables_us(machine, counted),
        "poll": slowest(machine, polled_cycles(machine, poll, 2 * SCALAR_PER_ENTRY)),
        "store": slowest(machine, stores),
    }
    return cost_of(counted, parts)


def combine_ready(work: Work, machine: Machine) -> Cost:
    """A look at the flags of a part's tokens, and for each its number, and zeros in their places."""
    counted = ascendc_combines.combine_ready(work)
    poll, store = counted.stages["poll"], counted.stages["store"]
    # One copy brings the flags of many tokens; each token's are summed by themselves.
    sums = poll.vector * machine.vector_latency_cycles + poll.load_bytes / machine.vector_bytes_per_cycle
    polls = loaded_cycles(machine, poll, poll.turns) + scalar_cycles(machine, poll, 2 * SCALAR_PER_ENTRY)
    polls += machine.vector_reduce_factor * sums + (poll.turns + poll.vector) * 2 * machine.flag_cycles
    # Tables are stored before they are used again.
    stores = scalar_cycles(machine, store) + stored_cycles(machine, store, store.turns)
    parts = {
        "scalar": start_us(machine, counted),
        "tables": tables_us(machine, counted),
        "poll": slowest(machine, polls),
        "store": slowest(machine, stores),
    }
    return cost_of(counted, parts)


def inband_receive(work: Work, machine: Machine) -> Cost:
    """For each row a look at its blocks' flags, the row to its place, its stamp, zeros in the flags'
    places.
    """
    counted = ascendc_waits.inband_receive(work)
    did, poll = counted.stages["rows"], counted.stages["poll"]
    # Loads of small things follow one another, and are waited for once for rows that are polled together.
    pipes = (
        scalar_cycles(machine, did, SCALAR_PER_SLOT),
        loaded_cycles(machine, did, did.turns + poll.turns),
        stored_cycles(machine, did, did.turns),
    )
    parts = {
        "scalar": start_us(machine, counted),
        "tables": tables_us(machine, counted),
        "poll": slowest(machine, polled_cycles(machine, poll)),
        "cores": pipelined_us(machine, did, pipes),
    }
    return cost_of(counted, parts)


def dispatch_receive(work: Work, machine: Machine) -> Cost:
    """Places of rows, a look at their flags, and each row that is there from its slot to its place.

    All cores of the device share the memory's rate: those that do not receive send meanwhile.
    """
    return _received(work, machine, ascendc_receives.dispatch_receive(work))


def inband_collect(work: Work, machine: Machine) -> Cost:
    """The same of rows with flags in band.

    A look loads the flags of each row that is missing, and sums them by themselves where others are there. So
    what a look takes for each row is a part of taking it: the last looks are for few rows.
    """
    counted = ascendc_receives.inband_collect(work)
    rows, poll = counted.stages["rows"], counted.stages["poll"]
    of_flags = replace(poll, turns=0 * poll.turns, items=0 * poll.items, scalar_local=0 * poll.scalar_local)
    sums = rows.turns * (machine.vector_latency_cycles + 2 * machine.flag_cycles)
    each_row = polled_cycles(machine, of_flags) + sums
    look = slowest(machine, polled_cycles(machine, poll, SCALAR_PER_ENTRY) - polled_cycles(machine, of_flags))
    whole = _received(work, machine, counted)
    return replace(whole, look_us=look, taking_us=whole.taking_us + slowest(machine, each_row))


def _received(work: Work, machine: Machine, counted: Counted) -> Cost:
    cores = int(machine.cores)
    entries, did, poll = (counted.stages[name] for name in ("entries", "tables", "poll"))
    tidy = scalar_cycles(machine, entries) + loaded_cycles(machine, entries, entries.loads)
    tidy += stored_cycles(machine, entries, np.minimum(entries.stores, 1))
    tidy += entries.vector * machine.vector_latency_cycles
    # Each sum of counts waits for the one before; three clamps before the first.
    num_bytes = 3 * did.load_bytes + machine.vector_reduce_factor * did.vector * did.load_bytes
    sums = did.vector * (machine.vector_latency_cycles + machine.flag_cycles)
    sums = sums + num_bytes / machine.vector_bytes_per_cycle
    tables = scalar_cycles(machine, did, SCALAR_PER_ENTRY) + loaded_cycles(machine, did, 2 * did.turns)
    rows = counted.stages["rows"]
    pipes = (
        scalar_cycles(machine, rows, SCALAR_PER_SLOT),
        loaded_cycles(machine, rows, rows.turns, cores),
        stored_cycles(machine, rows, rows.turns, cores),
    )
    look = slowest(machine, polled_cycles(machine, poll, SCALAR_PER_ENTRY))
    taking = pipelined_us(machine, rows, pipes)
    parts = {
        "scalar": start_us(machine, counted),
        "entries": slowest(machine, tidy),
        "tables": slowest(machine, tables + sums),
        "poll": look,
        "cores": taking,
    }
    return replace(cost_of(counted, parts), look_us=look, taking_us=taking)


FORMULAS: dict[str, Body] = {
    body.__name__: body
    for body in (
        dispatch_send,
        counts_send,
        direct_send,
        dispatch_wait,
        dispatch_offsets,
        dispatch_rows,
        dispatch_take,
        dispatch_receive,
        inband_send,
        inband_receive,
        inband_collect,
        combine_send,
        combine_wait,
        combine_ready,
        post_prices.post_status,
        exchange_send,
        block_prices.blocks_send,
        block_prices.blocks_return,
        block_prices.blocks_end,
        block_prices.blocks_wait,
        post_prices.dispatch_post,
        post_prices.combine_post,
    )
}

_COUNTING = (
    ascendc_sends,
    ascendc_direct,
    ascendc_waits,
    ascendc_receives,
    ascendc_offsets,
    ascendc_combines,
    ascendc_blocks,
    ascendc_posts,
)
COUNTS: dict[str, Callable[[Work], Counted]] = {
    name: next(getattr(module, name) for module in _COUNTING if hasattr(module, name)) for name in FORMULAS
}
"""What is priced, by kernel."""
