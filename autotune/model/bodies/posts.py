"""What the blocks of the Ascend C kernels do that post to queues, counted as `autotune.model.bodies.sends`
counts those that write, and the messages that they post.

Taken for granted: nothing is refused or reported, and no queue is full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autotune.model.bodies.counts import (
    Counted,
    Counts,
    block_of,
    chunks,
    counts,
    each_block,
    end,
    filled,
    filled_by,
    found_zone,
    fresh,
    is_queued,
    is_remote,
    kept,
    lines_of_table,
    lookups,
    no_ranks,
    num_parts,
    parts_of,
)
from autotune.model.bodies.sends import ENTRIES_PER_POST
from autotune.model.constants import Machine
from autotune.model.cost import Cost, Messages, Table, UnknownWorkError, Work
from moe_triton.core.records import TRAFFIC
from moe_triton.layout import ORIGIN, STATUS_ENTRY_BYTES, UB_ALIGN, WORD_BYTES
from moe_triton.layout.call_word import operator_of

UNIT_WORDS = UB_ALIGN // WORD_BYTES


@dataclass(frozen=True)
class Posted:
    """What a launch posts.

    Attributes:
        peers, num_bytes: (N,) of each message.
    """

    peers: np.ndarray
    num_bytes: np.ndarray


def owner_of(work: Work, ranks: np.ndarray) -> np.ndarray:
    """The block whose queue leads to each rank (``Poster::IsOwner``)."""
    return np.asarray(ranks % work.blocks)


def _behind(work: Work) -> np.ndarray:
    """Queued ranks in the order in which they are posted to: from the one behind this one on."""
    first, peers = work.traffic.rank + 1, np.flatnonzero(is_queued(work))
    return np.concatenate([peers[peers >= first], peers[peers < first]])


def _traffic(work: Work, adds: bool = False) -> Counts:
    """What each block says of what it has posted."""
    asked = int(work.has("traffic"))
    words = counts(
        work,
        scalar_local=asked * TRAFFIC.num_words,
        stores=asked,
        store_bytes=asked * TRAFFIC.num_bytes,
    )
    return words + fresh(work, asked * adds * TRAFFIC.num_words)


# Blocks.


def rows_of_blocks(work: Work) -> np.ndarray:
    """(EP,) rows in the block for each rank: as they stand in memory, or as the call has them."""
    rows = work.arguments["rows_to"]
    if isinstance(rows, Table) and rows.values is not None:
        return rows.values
    is_dispatch = operator_of(work.number("call")) == "dispatch"
    return work.traffic.sent if is_dispatch else work.traffic.received


def _ends(work: Work, before: np.ndarray) -> Counts:
    """A unit of flags behind the rows of each rank's block; `before`: lines that have been read."""
    ranks, queued = np.arange(work.number("num_ranks")), is_queued(work)
    blocks, posts = owner_of(work, ranks), work.number("out_offset") != 0
    own, away = each_block(work, blocks), each_block(work, blocks[is_remote(work)])
    return counts(
        work,
        stores=own,
        store_bytes=own * UB_ALIGN,
        sent_bytes=away * UB_ALIGN,
        scalar_local=UNIT_WORDS,
        scalar_global=own + each_block(work, blocks, 1 + posts * ~queued),
        lines=own + filled_by(work, filled(work, blocks, ranks, before)),
        dropped=own,
        items=own,
    )


def blocks_end(work: Work) -> Counted:
    """FLAG2 of each rank's block, where none is posted."""
    ranks = work.number("num_ranks")
    start = found_zone(work) + end(work) + fresh(work, 1)
    start += counts(work, dropped=lines_of_table(ranks))
    stages = {"start": start, "flags": _ends(work, np.zeros(0, np.int64))}
    return Counted(stages, no_ranks(work), np.ones(ranks, np.int64))


def parts_posted(work: Work, before: np.ndarray) -> dict[str, Counts]:
    """What a launch that makes blocks does to post them, part by part; nothing where it posts none. Parts are
    made, by all blocks, at the first look.

    Args:
        work: the launch.
        before: lines of the table of windows that have been read.
    """
    if not work.number("out_offset"):
        return {}
    ranks, parts = np.arange(work.number("num_ranks")), num_parts(work)
    blocks, queued = owner_of(work, ranks), is_queued(work)
    own, each = each_block(work, blocks), each_block(work, blocks[queued])
    looks = each_block(work, np.unique(blocks * parts + parts_of(work)) // parts)
    messages = 1 + (work.number("end_offset") != 0)
    told = fresh(work, 2) + counts(
        work, vector=1, scalar_local=parts, stores=parts, store_bytes=parts * UB_ALIGN, barriers=parts
    )
    seen = counts(
        work,
        loads=looks,
        load_bytes=looks * work.blocks * UB_ALIGN,
        scalar_local=looks * work.blocks,
        turns=looks,
    )
    asked = counts(
        work,
        scalar_global=own + (3 + messages) * each,
        lines=each,
        dropped=each,
        items=messages * each,
    )
    return {"told": told, "ends": _ends(work, before) + seen, "posts": asked + _traffic(work)}


def _made(work: Work, peers: np.ndarray) -> np.ndarray:
    """(N,) the share of all rows that is there when the part with this rank's block is made."""
    rows, parts = rows_of_blocks(work), parts_of(work)
    made = np.bincount(parts, rows, num_parts(work)).cumsum()
    return np.asarray((made / max(made[-1], 1))[parts[peers]])


def posted_blocks(work: Work) -> Posted:
    """A message for each other rank; where queues keep no order inside one, two."""
    peers = _behind(work)
    rows = rows_of_blocks(work)[peers]
    num_bytes = work.number("rows_offset") + rows * work.number("row_step")
    if work.number("end_offset"):
        both = np.stack([num_bytes, np.full_like(num_bytes, UB_ALIGN)], axis=1)
        return Posted(np.repeat(peers, 2), both.reshape(-1))
    return Posted(peers, num_bytes + UB_ALIGN)


# Rows of fullmesh.


def _start(work: Work, ranks: int) -> Counts:
    start = found_zone(work) + fresh(work, 1) + end(work)
    return start + counts(work, dropped=lines_of_table(ranks))


def _rows_by_rank(work: Work) -> np.ndarray:
    """(EP, localE) rows of a dispatch for each expert.

    Raises:
        UnknownWorkError: there are shared experts, or counts that the model does not know.
    """
    if work.number("num_shared_ranks"):
        raise UnknownWorkError(f"{work.kernel.name}: the model knows nothing of shared experts' results")
    rows = work.arguments["counts"]
    if not isinstance(rows, Table) or rows.values is None:
        raise UnknownWorkError(f"{work.kernel.name}: the model does not know how many rows there are")
    return rows.values.reshape(work.traffic.config.num_ranks, -1)


def dispatch_post(work: Work) -> Counted:
    """For each queued rank its rows, expert by expert; then its entries."""
    rows = _rows_by_rank(work)
    ranks, experts = np.arange(rows.shape[0]), rows.shape[1]
    queued, blocks = is_queued(work), owner_of(work, ranks)
    own, each = each_block(work, blocks), each_block(work, blocks[queued])
    messages = each_block(work, blocks[queued], (rows[queued] > 0).sum(axis=1))
    loads = int(chunks(experts, ENTRIES_PER_POST))
    start = _start(work, ranks.size) + counts(work, vector=1) + fresh(work, work.has("combine_kind"))
    posts = counts(
        work,
        loads=each * loads,
        load_bytes=each * experts * WORD_BYTES,
        stores=each * loads,
        store_bytes=each * experts * STATUS_ENTRY_BYTES,
        scalar_local=5 * each * experts,
        scalar_global=own + 3 * each + 2 * messages,
        lines=filled_by(work, filled(work, blocks, ranks)),
        turns=each,
        items=each * experts,
    )
    return Counted({"start": start, "posts": posts + _traffic(work)}, no_ranks(work), no_ranks(work))


def posted_rows(work: Work) -> Posted:
    """For each queued rank a message for every expert that gets rows, then its entries."""
    rows, peers, num_bytes = _rows_by_rank(work), [], []
    slots = work.arguments["slots"]
    assert isinstance(slots, tuple)
    stride = slots[-2]  # of the last dimension, its index
    for peer in _behind(work).tolist():
        of_experts = [(count - 1) * stride + work.number("slot_bytes") for count in rows[peer] if count]
        num_bytes += [*of_experts, rows.shape[1] * STATUS_ENTRY_BYTES]
        peers += [peer] * (len(of_experts) + 1)
    return Posted(np.array(peers, np.int64), np.array(num_bytes, np.int64))


def _sources(work: Work) -> np.ndarray:
    """(A,) the rank that each result goes back to."""
    experts, ranks = work.traffic.recv_counts.shape
    return np.repeat(np.tile(np.arange(ranks), experts), work.traffic.recv_counts.reshape(-1))


def combine_post(work: Work) -> Counted:
    """Every block looks at all results: those for its queues are posted, each with its flag behind it."""
    sources, ranks = _sources(work), np.arange(work.number("num_ranks"))
    queued, blocks = is_queued(work), owner_of(work, sources)
    is_flagged = int(work.number("flag_rows") != 0)
    own, mine = each_block(work, owner_of(work, ranks)), each_block(work, blocks)
    posted = each_block(work, blocks[queued[sources]])
    flags = each_block(work, owner_of(work, ranks[queued])) * is_flagged
    loads = chunks(sources.size, ENTRIES_PER_POST)
    asked = np.r_[ranks, sources] if is_flagged else sources
    lines = filled(work, owner_of(work, asked), asked)
    start = _start(work, ranks.size) + fresh(work, is_flagged + (work.number("num_entries") > 0))
    posts = counts(
        work,
        loads=loads,
        load_bytes=sources.size * ORIGIN.num_bytes,
        stores=flags,
        store_bytes=flags * STATUS_ENTRY_BYTES,
        scalar_local=sources.size + 2 * posted,
        scalar_global=own * is_flagged + mine + (2 + is_flagged) * posted,
        lines=filled_by(work, lines),
        vector=is_flagged,
        turns=loads,
        items=posted * (1 + is_flagged),
    )
    return Counted({"start": start, "posts": posts + _traffic(work)}, no_ranks(work), no_ranks(work))


def posted_results(work: Work) -> Posted:
    """Each result for a queued rank, and its flag."""
    sources = _sources(work)
    peers = sources[is_queued(work)[sources]]
    num_bytes = np.full_like(peers, work.number("row_bytes"))
    if not work.number("flag_rows"):
        return Posted(peers, num_bytes)
    both = np.stack([num_bytes, np.full_like(peers, STATUS_ENTRY_BYTES)], axis=1)
    return Posted(np.repeat(peers, 2), both.reshape(-1))


def post_status(work: Work) -> Counted:
    """An entry to every rank; those of queued ones are posted."""
    ranks, queued = np.arange(work.number("num_ranks")), is_queued(work)
    blocks, remote = block_of(work, ranks.size), is_remote(work)
    own, away = each_block(work, blocks[~queued]), each_block(work, blocks[remote])
    start = found_zone(work) + fresh(work, work.has("count")) + kept(work, "combine_kind") + end(work)
    start += counts(work, dropped=lines_of_table(ranks.size), vector=1, scalar_local=3)
    lines = filled(work, blocks, ranks)
    flags = counts(
        work,
        stores=own,
        store_bytes=own * STATUS_ENTRY_BYTES,
        sent_bytes=away * STATUS_ENTRY_BYTES,
        scalar_global=lookups(work, blocks, ranks),
        lines=filled_by(work, lines),
        items=own,
    )
    stages = {"start": start, "flags": flags}
    if work.number("out_offset"):
        owners = owner_of(work, ranks)
        mine, each = each_block(work, owners), each_block(work, owners[queued])
        asked = counts(
            work,
            stores=each,
            store_bytes=each * STATUS_ENTRY_BYTES,
            scalar_global=mine + 3 * each,
            lines=filled_by(work, filled(work, owners, ranks, lines)),
            items=each,
        )
        stages["posts"] = asked + _traffic(work, adds=True) + fresh(work, 1)
    return Counted(stages, no_ranks(work), np.ones(ranks.size, np.int64))


def posted_entries(work: Work) -> Posted:
    """One for each queued rank."""
    peers = np.flatnonzero(is_queued(work))
    return Posted(peers, np.full_like(peers, STATUS_ENTRY_BYTES))


_MESSAGES: dict[str, Callable[[Work], Posted]] = {
    "blocks_send": posted_blocks,
    "blocks_return": posted_blocks,
    "dispatch_post": posted_rows,
    "combine_post": posted_results,
    "post_status": posted_entries,
}
RINGING = frozenset({"blocks_send", "blocks_return"})
"""Kernels whose messages are posted by a processor of their own, one after the other (AICPU), and not by the
cores, each those of its own queues.
"""


def with_messages(work: Work, machine: Machine, cost: Cost, making_us: float = 0.0) -> Cost:
    """The cost of a launch that posts, with what it posts; posts of cores are a part of its time.

    Args:
        work, machine, cost: of the launch.
        making_us: of it, at its end, in which it makes blocks that are posted as they are made.

    Raises:
        UnknownWorkError: the machine has no network.
    """
    if not work.number("out_offset"):
        return cost
    if "rdma_gb_per_s" not in machine.constants:
        raise UnknownWorkError(f"{work.kernel.name}: {machine.name} has no constants of a network; A2 has")
    posted = _MESSAGES[work.kernel.name](work)
    if work.kernel.name in RINGING:
        before_us = machine.post_aicpu_us * np.arange(posted.peers.size)
        made_us = making_us * (_made(work, posted.peers) - 1)
        times = machine.post_aicpu_us + before_us + np.maximum.accumulate(made_us - before_us)
        return replace(cost, messages=Messages(posted.peers, posted.num_bytes, times))
    blocks = owner_of(work, posted.peers)
    each = np.bincount(blocks, minlength=work.blocks)
    order = np.argsort(blocks, kind="stable")
    number = np.empty(blocks.size, np.int64)  # of each message among its core's
    number[order] = np.arange(blocks.size) - np.repeat(each.cumsum() - each, each)
    most = int(each.max(initial=0))
    times = machine.post_aiv_us * (number + 1 - most)
    first = np.argsort(times, kind="stable")
    messages = Messages(posted.peers[first], posted.num_bytes[first], times[first])
    return replace(cost, parts={**cost.parts, "posts": machine.post_aiv_us * most}, messages=messages)
