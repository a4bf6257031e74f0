"""What the blocks of the Ascend C kernels do that write a block for each peer, counted as
`autotune.model.bodies.sends` counts those of the other kernels.

Taken for granted: nothing is refused or reported, and what is waited for is there at the first look.
"""

from __future__ import annotations

import numpy as np

from autotune.model.bodies.counts import (
    Counted,
    Counts,
    block_of,
    bounds,
    chunks,
    counts,
    each_block,
    end,
    filled,
    filled_by,
    found_zone,
    fresh,
    is_remote,
    kept,
    lines_of_table,
    lookups,
    no_ranks,
    num_parts,
)
from autotune.model.bodies.posts import parts_posted
from autotune.model.bodies.sends import PIECE_BYTES, Results, sent_rows
from autotune.model.cost import UnknownWorkError, Work
from moe_triton.layout import UB_ALIGN, WORD_BYTES

UNIT_WORDS = UB_ALIGN // WORD_BYTES
CHUNK_ENTRIES = 2048
"""Sums of counts that a core has in its local memory at a time (blocks_return.h)."""


def blocks_send(work: Work) -> Counted:
    """To each rank a header with its counts, then its rows, each with a stamp."""
    ranks, experts = work.number("num_ranks"), work.number("num_local_experts")
    results = Results(work)
    start = found_zone(work) + end(work) + kept(work, "dispatch_word")
    start += fresh(work, work.has("combine_kind"))
    start += counts(work, dropped=2 * lines_of_table(ranks), vector=2)
    starts = counts(work, loads=1, load_bytes=WORD_BYTES * work.number("num_experts"))
    headers, lines = _headers(work, 2 * experts + 1)
    # Each row's place and, with the first of a receiver, all of its sums.
    asked = np.unique(results.blocks[results.is_sent] + work.blocks * results.ranks[results.is_sent])
    words = 2 * results.slots + 2 * experts * each_block(work, asked % work.blocks)
    asked_lines = results.lines(lines)
    rows = sent_rows(work, results, asked_lines) + counts(work, scalar_local=words)
    stages = {"start": start, "starts": starts, "flags": headers, "tables": results.tables(), "rows": rows}
    stages |= parts_posted(work, np.union1d(lines, asked_lines))
    return Counted(stages, results.rows, np.ones(ranks, np.int64))


def _headers(work: Work, words: int) -> tuple[Counts, np.ndarray]:
    """A header to each rank of a block's share, of so many accesses each; and the lines that are read."""
    ranks, header = work.number("num_ranks"), work.number("header_words")
    has_counts = int(work.number("flag_word") >= UNIT_WORDS)
    blocks = block_of(work, ranks)
    own, away = each_block(work, blocks), each_block(work, blocks[is_remote(work)[:ranks]])
    has_any = (own > 0).astype(np.int64)
    lines = filled(work, blocks, np.arange(ranks))
    made = counts(
        work,
        stores=own * (1 + has_counts) + has_any,
        store_bytes=own * (header * WORD_BYTES + WORD_BYTES),
        sent_bytes=away * header * WORD_BYTES,
        scalar_local=own * words + 2 * has_any,
        scalar_global=lookups(work, blocks, np.arange(ranks)) + has_any,
        lines=filled_by(work, lines) + has_any,
        dropped=has_any,
        vector=has_any,
        barriers=own * has_counts,
        items=own,
    )
    return made, lines


def blocks_return(work: Work) -> Counted:
    """Results of neighbouring rows to neighbouring places, then to each rank a header."""
    ranks, entries = work.number("num_ranks"), work.number("num_entries")
    row_step = work.number("row_step")
    each = work.traffic.recv_counts.reshape(-1)
    if each.size != entries:
        raise UnknownWorkError(f"blocks_return: the model knows of {each.size} entries, not {entries}")
    ends = each.cumsum()
    share = bounds(work, int(ends[-1]))
    looks = int(chunks(entries, CHUNK_ENTRIES)) * num_parts(work)
    seen = entries * num_parts(work)
    # (blocks, entries) rows that each block sends of each entry
    first = np.maximum(share[:-1, None], (ends - each)[None, :])
    own = np.maximum(np.minimum(share[1:, None], ends[None, :]) - first, 0)
    block, entry = np.nonzero(own)
    sources = entry % ranks
    rows, away = own[block, entry], is_remote(work)[sources]
    pieces = chunks(rows * row_step, min(row_step, PIECE_BYTES))
    sent = filled(work, block, sources)
    start = found_zone(work) + end(work) + kept(work, "combine_kind") + fresh(work, 1)
    start += counts(work, dropped=lines_of_table(ranks), vector=num_parts(work))
    tables = counts(
        work,
        loads=looks,
        load_bytes=WORD_BYTES * seen,
        scalar_local=3 * seen,
        turns=looks,
        items=seen,
    )
    written = counts(
        work,
        loads=each_block(work, block, pieces),
        load_bytes=each_block(work, block, rows * row_step),
        stores=each_block(work, block, pieces),
        store_bytes=each_block(work, block, rows * row_step),
        sent_bytes=each_block(work, block, rows * row_step * away),
        scalar_local=each_block(work, block),
        scalar_global=lookups(work, block, sources),
        lines=filled_by(work, sent),
        turns=each_block(work, block, pieces),
        items=each_block(work, block),
    )
    headers, lines = _headers(work, 3)
    read_before = each_block(work, np.intersect1d(lines, sent) % work.blocks)
    headers += counts(work, lines=-read_before)
    stages = {"start": start, "tables": tables, "rows": written, "flags": headers}
    stages |= parts_posted(work, np.union1d(lines, sent))
    to_ranks = np.bincount(sources, rows, ranks).astype(np.int64)
    return Counted(stages, to_ranks, np.ones(ranks, np.int64))


def blocks_wait(work: Work) -> Counted:
    """Of each rank FLAG1, where queues keep order, the header and FLAG2; its counts to a table."""
    own = np.diff(bounds(work, work.number("num_ranks")))
    number, noted = work.number("num_local_experts"), int(work.has("waited_us"))
    expects, looks = int(work.has("expected_rows")), 2 + (work.number("end_offset") == 0)
    start = found_zone(work) + end(work) + kept(work, "kept_zone") + kept(work, "numbers")
    start += fresh(work, 2 + work.has("dispatch_word"))
    poll = counts(
        work,
        loads=looks * own,
        load_bytes=own * ((looks - 1) * UB_ALIGN + work.number("header_words") * WORD_BYTES),
        scalar_local=own * (looks + number + UNIT_WORDS),
        scalar_global=own * expects,
        lines=own * expects,
        dropped=own * expects,
        turns=own,
    )
    store = counts(
        work,
        stores=own * (1 + noted),
        store_bytes=own * (1 + noted) * number * WORD_BYTES,
        scalar_local=own * (2 + noted) * number,
        turns=own,
        items=own * number,
    )
    return Counted({"start": start, "poll": poll, "store": store}, no_ranks(work), no_ranks(work))
