"""The bodies of the Ascend C kernels: one formula each, from the loops of
``kernels_ascendc/include/<kernel>.h``.

Each core's loop is counted by pipe: copies by their bytes and latencies, scalar code by its accesses to
memory and the instructions around them. Waits for other ranks are no part of a body: a waiting kernel costs
what it does once everything has arrived (`moe_triton.model.timeline` adds the rest).
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from moe_triton.layout import (
    BLOCK_BYTES,
    BLOCK_DATA_BYTES,
    STAMP_BYTES,
    STATUS_ENTRY_BYTES,
    UB_ALIGN,
    WORD_BYTES,
)
from moe_triton.model import movement
from moe_triton.model.constants import Machine
from moe_triton.model.cost import Body, Cost, Table, Work
from moe_triton.model.movement import core_loop, load_cycles, merged, store_cycles, us_of, vector_cycles

TABLE_ENTRIES = 1024
"""Indices that a core keeps in its local memory at a time (send_plan.h, combine_wait.h)."""

SCALAR_PER_SLOT = 60
"""Instructions on registers for the address of one slot: a division, products by strides, checks of
extents.
"""

SCALAR_PER_ENTRY = 20
"""Instructions on registers for one status entry."""

MOST_SLOTS_AT_ONCE = 32
"""Slots that a row, once loaded, is written to (send_plan.h), and rows that are polled together
(inband_receive.h).
"""


def _scalar(machine: Machine, local: float, registers: float) -> float:
    """Cycles of scalar code: accesses to local memory, and instructions on registers."""
    return local * machine.scalar_local_cycles + registers * machine.scalar_cycles


def _start(work: Work, machine: Machine, global_reads: int) -> float:
    """Microseconds before the first loop: the zone and other words in global memory, and the table of
    peers.
    """
    return us_of(machine, global_reads * machine.scalar_global_cycles)


def _share(total: float, work: Work) -> int:
    """Of the block that has most."""
    return math.ceil(total / work.blocks)


def _part_of_tokens(work: Work) -> float:
    """The share of a call's tokens that a launch has."""
    whole = work.traffic.topk_idx.shape[0]
    return work.number("num_tokens") / whole if whole else 0.0


def _rows_of(work: Work, name: str) -> int:
    """A number of rows that stands in memory.

    Raises:
        NotImplementedError: the model does not know what stands there.
    """
    value = work.arguments[name]
    if not isinstance(value, Table) or value.values is None or not value.values.size:
        raise NotImplementedError(f"the model does not know what {name} of {work.kernel.name} points to")
    return int(value.values[-1] if name == "recv_offsets" else value.values[0])


def _tables(work: Work, machine: Machine, entries: float, tables: int) -> float:
    """Microseconds of loading tables of indices, of all chunks; the core waits for each chunk."""
    chunks = math.ceil(entries / TABLE_ENTRIES)
    each = load_cycles(machine, min(entries, TABLE_ENTRIES) * WORD_BYTES, work.blocks)
    queued = (tables - 1) * min(entries, TABLE_ENTRIES) * WORD_BYTES
    more = queued / movement.bytes_per_cycle(machine, work.blocks)
    return us_of(machine, chunks * (each + more + 2 * machine.flag_cycles))


def _sends(work: Work, machine: Machine, slot_bytes: int, stores: int, extra_loads: int = 0) -> Cost:
    """Rows of tokens to slots: a row is loaded once for all of a token's results that a block has.

    Args:
        work: of a kernel with the arguments of send_plan.h.
        machine: that sends.
        slot_bytes: that are written for a row, without its stamp.
        stores: copies to each slot, the stamp's included.
        extra_loads: of single blocks, for each slot.
    """
    traffic, part = work.traffic, _part_of_tokens(work)
    rows = traffic.sent * part
    if "kept_rank" in work.arguments and work.number("kept_rank") >= 0:
        rows = movement.remote(rows, traffic.tiers)
    results = _share(work.number("num_tokens") * work.number("topk"), work)
    slots = min(results, math.ceil(float(rows.sum()) / work.blocks))
    per_visit = min(work.number("topk"), MOST_SLOTS_AT_ONCE) if work.number("rows_per_token") == 1 else 1
    visits = min(results, math.ceil(results / per_visit) + (1 if per_visit > 1 else 0))
    slots_of_visit = slots / visits if visits else 0.0
    row_bytes = work.number("row_bytes")
    scalar = (
        _scalar(machine, 9, SCALAR_PER_SLOT) * slots_of_visit + stores * slots_of_visit * machine.issue_cycles
    )
    load = load_cycles(machine, row_bytes, work.blocks)
    load += extra_loads * slots_of_visit * load_cycles(machine, BLOCK_DATA_BYTES, work.blocks)
    rate = movement.bytes_per_cycle(machine, work.blocks)
    store = machine.store_latency_cycles + slots_of_visit * (slot_bytes + STAMP_BYTES) / rate
    loop = core_loop(machine, visits, (scalar, load, store))
    tables = 2 + work.has("topk_weights")
    parts = merged(
        {"scalar": _start(work, machine, 2), "tables": _tables(work, machine, results, tables)},
        movement.written_remotely(machine, rows, slot_bytes + STAMP_BYTES, traffic.tiers, work.blocks, loop),
    )
    leaving = int(movement.remote(rows, traffic.tiers).sum()) * (slot_bytes + STAMP_BYTES)
    staying = int(rows.sum()) * (slot_bytes + STAMP_BYTES) - leaving
    return Cost(parts, read=int(visits * work.blocks * row_bytes), written=staying, sent=leaving)


def _posts_status(work: Work, machine: Machine) -> dict[str, float]:
    """A status entry for every expert (status_entries.h)."""
    entries = work.number("num_shared_ranks") + work.number("num_experts")
    traffic, share = work.traffic, _share(entries, work)
    scalar = share * _scalar(machine, 4, SCALAR_PER_ENTRY) + machine.scalar_global_cycles
    counts = load_cycles(machine, share * WORD_BYTES, work.blocks)
    stores = machine.store_latency_cycles + share * machine.issue_cycles
    each_rank = np.full(traffic.config.num_ranks, entries / traffic.config.num_ranks)
    to_others = movement.remote(each_rank, traffic.tiers)
    return {
        "flags": us_of(machine, scalar + counts + stores),
        "hops": movement.hops(machine, to_others, traffic.tiers, work.blocks),
    }


def dispatch_send(work: Work, machine: Machine) -> Cost:
    """Rows with stamps, a barrier of all cores, a status entry for every expert."""
    cost = _sends(work, machine, work.number("row_bytes"), stores=2)
    if not work.number("post_status"):
        return cost
    parts = merged(cost.parts, {"barrier": machine.sync_all_us}, _posts_status(work, machine))
    return Cost(parts, cost.read, cost.written, cost.sent)


def inband_send(work: Work, machine: Machine) -> Cost:
    """Status entries first, then rows in blocks that carry their flags."""
    blocks = math.ceil((work.number("stamp_offset") + STAMP_BYTES) / BLOCK_DATA_BYTES)
    cost = _sends(work, machine, blocks * BLOCK_BYTES - STAMP_BYTES, stores=2, extra_loads=1)
    if not work.number("post_status"):
        return cost
    return Cost(merged(_posts_status(work, machine), cost.parts), cost.read, cost.written, cost.sent)


def direct_send(work: Work, machine: Machine) -> Cost:
    """Rows to their places in the receivers' outputs, stamps and several scales apart."""
    scales = work.number("scale_bytes")
    return _sends(work, machine, work.number("row_bytes") + scales, stores=2 + (scales > 0), extra_loads=0)


def counts_send(work: Work, machine: Machine) -> Cost:
    """All counts to every rank, a barrier of the pipe, a flag each."""
    traffic, ranks = work.traffic, work.number("num_ranks")
    words = work.number("num_experts") + work.number("num_shared_ranks")
    share = _share(ranks, work)
    load = load_cycles(machine, words * WORD_BYTES, work.blocks)
    rate = movement.bytes_per_cycle(machine, work.blocks)
    stores = 2 * machine.store_latency_cycles + share * words * WORD_BYTES / rate
    scalar = share * _scalar(machine, 1, SCALAR_PER_ENTRY)
    to_others = movement.remote(np.full(ranks, 2.0), traffic.tiers)
    sent = (ranks - 1) * (words * WORD_BYTES + STATUS_ENTRY_BYTES)
    parts = {
        "scalar": _start(work, machine, 2),
        "cores": us_of(machine, load + stores + scalar),
        "wire": movement.wire(machine, sent),
        "hops": movement.hops(machine, to_others, traffic.tiers, work.blocks),
    }
    return Cost(parts, read=words * WORD_BYTES * work.blocks, written=words * WORD_BYTES, sent=sent)


def post_status(work: Work, machine: Machine) -> Cost:
    """One entry to every rank."""
    traffic, ranks = work.traffic, work.number("num_ranks")
    share = _share(ranks, work)
    scalar = _scalar(machine, 4, SCALAR_PER_ENTRY) + share * _scalar(machine, 1, SCALAR_PER_ENTRY)
    to_others = movement.remote(np.ones(ranks), traffic.tiers)
    parts = {
        "scalar": _start(work, machine, 2 + work.has("count")),
        "flags": us_of(machine, scalar + machine.store_latency_cycles + share * machine.issue_cycles),
        "hops": movement.hops(machine, to_others, traffic.tiers, work.blocks),
    }
    return Cost(parts, written=STATUS_ENTRY_BYTES, sent=(ranks - 1) * STATUS_ENTRY_BYTES)


def combine_send(work: Work, machine: Machine) -> Cost:
    """Each result to its token's slot, a barrier of the copying pipe, its flag."""
    traffic, row_bytes = work.traffic, work.number("row_bytes")
    rows = traffic.received
    if work.number("kept_rank") >= 0:
        rows = movement.remote(rows, traffic.tiers)
    share = _share(_rows_of(work, "recv_offsets"), work)
    scalar = _scalar(machine, 4, SCALAR_PER_SLOT)
    load = load_cycles(machine, row_bytes, work.blocks)
    store = store_cycles(machine, row_bytes, work.blocks)
    flag_bytes = STATUS_ENTRY_BYTES if work.number("flag_rows") else 0
    if flag_bytes:
        store += store_cycles(machine, flag_bytes, work.blocks)
    loop = core_loop(machine, share, (scalar, load, store))
    bytes_each = row_bytes + flag_bytes
    parts = merged(
        {"scalar": _start(work, machine, 2), "tables": _tables(work, machine, 3 * share, 1)},
        movement.written_remotely(machine, rows, bytes_each, traffic.tiers, work.blocks, loop),
    )
    leaving = int(movement.remote(rows, traffic.tiers).sum())
    staying = int(rows.sum()) - leaving
    return Cost(parts, int(rows.sum()) * row_bytes, staying * bytes_each, leaving * bytes_each)


def exchange_send(work: Work, machine: Machine) -> Cost:
    """Consecutive rows to one rank's slots, with their scales and a header."""
    traffic, row_bytes = work.traffic, work.number("row_bytes")
    count = _rows_of(work, "num_rows")
    share = _share(count, work)
    scales = work.number("scale_bytes") if work.has("scales") else 0
    store = store_cycles(machine, row_bytes, work.blocks) + (scales > 0) * machine.issue_cycles
    pipes = (_scalar(machine, 1, SCALAR_PER_ENTRY), load_cycles(machine, row_bytes, work.blocks), store)
    loop = core_loop(machine, share, pipes)
    rows = np.zeros(traffic.config.num_ranks)
    rows[work.number("peer")] = count
    bytes_each = row_bytes + scales
    parts = merged(
        {"scalar": _start(work, machine, 3)},
        movement.written_remotely(machine, rows, bytes_each, traffic.tiers, work.blocks, loop),
    )
    leaving = int(movement.remote(rows, traffic.tiers).sum())
    return Cost(parts, count * row_bytes, (count - leaving) * bytes_each, leaving * bytes_each)


def dispatch_wait(work: Work, machine: Machine) -> Cost:
    """A look at the status entries, their counts, and zeros in their places."""
    entries = work.number("num_local_experts") * work.traffic.config.num_ranks
    share = _share(entries, work)
    entry_bytes = share * STATUS_ENTRY_BYTES
    noted = 2 if work.has("waited_us") else 0
    scalar = share * _scalar(machine, 4 + noted, SCALAR_PER_ENTRY)
    poll = load_cycles(machine, entry_bytes, work.blocks) + 2 * machine.flag_cycles
    poll += machine.vector_reduce_factor * vector_cycles(machine, entry_bytes)
    zeros = 2 * vector_cycles(machine, entry_bytes) + store_cycles(machine, entry_bytes, work.blocks)
    counts = store_cycles(machine, share * WORD_BYTES, work.blocks)
    parts = {
        "scalar": _start(work, machine, 3) + us_of(machine, scalar),
        "poll": us_of(machine, poll),
        "store": us_of(machine, zeros + counts),
    }
    total = entries * STATUS_ENTRY_BYTES
    return Cost(parts, read=total, written=total + entries * WORD_BYTES)


def combine_wait(work: Work, machine: Machine) -> Cost:
    """For each token a look at its results' flags, and zeros in their places."""
    results = work.number("topk") + work.number("num_shared_experts")
    tokens, share = work.number("num_tokens"), _share(work.number("num_tokens"), work)
    entry_bytes = results * STATUS_ENTRY_BYTES
    noted = 2 * results if work.has("waited_us") else 0
    scalar = _scalar(machine, results + 2 + noted, SCALAR_PER_ENTRY * 2)
    poll = load_cycles(machine, entry_bytes, work.blocks) + 2 * machine.flag_cycles
    poll += machine.vector_reduce_factor * vector_cycles(machine, entry_bytes)
    parts = {
        "scalar": _start(work, machine, 2) + us_of(machine, share * scalar),
        "tables": _tables(work, machine, share * results, 1 + work.has("active")),
        "poll": us_of(machine, share * poll),
        "store": us_of(machine, store_cycles(machine, entry_bytes, work.blocks) if share else 0.0),
    }
    return Cost(parts, read=tokens * entry_bytes, written=tokens * entry_bytes)


def inband_receive(work: Work, machine: Machine) -> Cost:
    """For each row a look at its blocks' flags, the row to its place, its stamp, zeros in the flags'
    places.
    """
    counts = work.traffic.recv_counts.reshape(-1)
    bounds = [len(counts) * block // work.blocks for block in range(work.blocks + 1)]
    share = max(int(counts[a:b].sum()) for a, b in itertools.pairwise(bounds))
    row_bytes = work.number("row_bytes")
    blocks = math.ceil((work.number("stamp_offset") + STAMP_BYTES) / BLOCK_DATA_BYTES)
    flag_bytes = blocks * UB_ALIGN
    polls = math.ceil(share / MOST_SLOTS_AT_ONCE)
    poll = load_cycles(machine, flag_bytes * min(share, MOST_SLOTS_AT_ONCE), work.blocks)
    poll += machine.vector_reduce_factor * vector_cycles(machine, flag_bytes * min(share, MOST_SLOTS_AT_ONCE))
    small = 1 + work.has("out_scales") + work.has("out_weights")
    load = load_cycles(machine, row_bytes, work.blocks) + small * machine.issue_cycles
    store = store_cycles(machine, row_bytes, work.blocks) + flag_bytes / movement.bytes_per_cycle(
        machine, work.blocks
    )
    loop = core_loop(machine, share, (_scalar(machine, 2, SCALAR_PER_SLOT), load, store))
    parts = {
        "scalar": _start(work, machine, 2),
        "tables": _tables(work, machine, _share(len(counts), work) + 1, 1),
        "poll": us_of(machine, polls * (poll + 2 * machine.flag_cycles)),
        "cores": loop,
    }
    rows = int(counts.sum())
    return Cost(parts, rows * (row_bytes + flag_bytes + STAMP_BYTES), rows * (row_bytes + flag_bytes))


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
