"""What the blocks of ``dispatch_receive`` and ``inband_collect`` do, counted as
`autotune.model.bodies.waits` counts those that only wait: all rows, and all blocks' flags, are there at the
first look.
"""

from __future__ import annotations

import itertools

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
    first_block,
    found_zone,
    kept,
    no_ranks,
)
from autotune.model.bodies.offsets import MAX_EXACT_SUM
from autotune.model.bodies.waits import (
    MAX_CLEARED,
    MAX_PIECES,
    MAX_STAMPS,
    TABLE_ENTRIES,
    stores_by_number,
)
from autotune.model.cost import Work
from moe_triton.layout import (
    BLOCK_DATA_BYTES,
    ORIGIN,
    STAMP_BYTES,
    STATUS_ENTRY_BYTES,
    UB_ALIGN,
    WORD_BYTES,
    align,
)

NOTED_ROWS = 2048
"""Of those with flags in band, so many that a block notes to have taken (inband_rows.h),"""

WORD_ROWS = 32
"""and so many of them in a word."""


def dispatch_receive(work: Work) -> Counted:
    """Where each entry's rows go, a look at the flags of all rows, and each row to its place."""
    return _received(work, blocks_of_row=0)


def inband_collect(work: Work) -> Counted:
    """The same of rows in blocks that carry their flags."""
    return _received(work, blocks_of_row=-(-(work.number("stamp_offset") + STAMP_BYTES) // BLOCK_DATA_BYTES))


def _received(work: Work, blocks_of_row: int) -> Counted:
    """Without blocks, a row's flag is in its stamp."""
    received, kept_rank = work.traffic.recv_counts, work.number("kept_rank")
    in_window = received.T.copy()
    if kept_rank >= 0:
        in_window[kept_rank] = 0
    each_entry = in_window.reshape(-1)
    blocks = block_of(work, each_entry.size)
    share, rows = bounds(work, each_entry.size), each_block(work, blocks, each_entry)
    stages = {
        "start": found_zone(work) + counts(work, vector=1) + end(work),
        "entries": _finished_entries(work, each_entry.size),
        "tables": _tables(work, blocks, received),
        "poll": _look(work, blocks, each_entry, blocks_of_row),
        "rows": _rows(work, rows, blocks_of_row),
    }
    if blocks_of_row:
        looked = each_block(work, blocks, np.arange(blocks.size) // received.shape[0] != kept_rank)
        stages["tables"] += counts(work, scalar_local=np.diff(share) + looked)
        stages["start"] += counts(work, vector=np.where(np.diff(share) > 0, 1, 0))
        words = [_words_looked_at(each_entry[a:b].tolist()) for a, b in itertools.pairwise(share)]
        stages["poll"] += counts(work, scalar_local=np.array(words))
        stages["rows"] += counts(work, scalar_local=rows + 2 * np.minimum(rows, NOTED_ROWS))
    return Counted(stages, no_ranks(work), no_ranks(work))


def _finished_entries(work: Work, entries: int) -> Counts:
    """Every block says that it has begun; the first one has seen it of all, and clears."""
    one = first_block(work)
    flags, cleared = work.blocks * STATUS_ENTRY_BYTES, int(chunks(entries, MAX_CLEARED))
    written = flags + entries * STATUS_ENTRY_BYTES
    tidy = counts(
        work,
        loads=one,
        load_bytes=flags * one,
        vector=2 * one,
        scalar_local=one,
        stores=(1 + cleared) * one,
        store_bytes=written * one,
    )
    said = counts(work, vector=1, stores=1, store_bytes=STATUS_ENTRY_BYTES)
    return said + tidy + kept(work, "turned")


def _tables(work: Work, blocks: np.ndarray, received: np.ndarray) -> Counts:
    """Own counts and times, all counts, and a sum of those before each own entry."""
    experts, ranks = received.shape
    share, noted = bounds(work, blocks.size), int(work.has("waited_us"))
    own, places = np.diff(share), np.arange(blocks.size)
    has_own = np.where(own > 0, 1, 0)
    sources = places // experts
    before = places % experts * ranks + sources
    looked = each_block(work, blocks, sources != work.number("kept_rank"))
    sums = each_block(work, blocks, before > 0)
    if work.number("max_count") > MAX_EXACT_SUM // TABLE_ENTRIES:
        summed = counts(work, scalar_local=each_block(work, blocks, before))
    else:
        summed = counts(work, vector=3 * has_own + sums, barriers=2 * has_own + sums, scalar_local=sums)
    loads = (1 + noted) * stores_by_number(share[:-1], share[:-1], share[1:], experts) + has_own
    return summed + counts(
        work,
        loads=loads,
        load_bytes=((1 + noted) * own + has_own * blocks.size) * WORD_BYTES,
        # Of each entry the first row and how many there are.
        scalar_local=looked + 2 * own + 2 * noted * own,
        turns=has_own,
        # Whether this block has given up before.
        scalar_global=has_own,
        lines=has_own,
        dropped=has_own,
        items=own,
    )


def _look(work: Work, blocks: np.ndarray, each_entry: np.ndarray, blocks_of_row: int) -> Counts:
    """At the stamps of all rows, and in UB at each of them; or at all flags in band, and at their sum."""
    share = bounds(work, each_entry.size)
    most = max(1, MAX_STAMPS // max(1, blocks_of_row))
    found = [_groups(each_entry[a:b].tolist(), most) for a, b in itertools.pairwise(share)]
    polls, pieces, padded = np.array(found).reshape(-1, 3).T
    own, rows = np.diff(share), each_block(work, blocks, each_entry)
    with_rows = each_block(work, blocks, each_entry > 0)
    return counts(
        work,
        loads=rows if blocks_of_row else pieces,
        load_bytes=rows * (blocks_of_row * UB_ALIGN if blocks_of_row else STAMP_BYTES),
        vector=polls + (0 if blocks_of_row else padded),
        # What is left of each entry is read before and behind, and of each piece read and written.
        scalar_local=2 * own + 2 * with_rows + polls + 2 * pieces + (0 if blocks_of_row else rows),
        turns=polls,
        items=pieces,
    )


def _groups(each_entry: list[int], most: int) -> tuple[int, int, int]:
    """Of a block's entries: groups of so many rows at most that are looked at together, their pieces, and how
    many of the groups do not fill whole repeats.
    """
    groups: list[tuple[int, int]] = []
    pieces = stamps = 0
    for left in each_entry:
        while left:
            if pieces == MAX_PIECES or stamps == most:
                groups.append((pieces, stamps))
                pieces = stamps = 0
            more = min(left, most - stamps)
            pieces, stamps, left = pieces + 1, stamps + more, left - more
    if pieces:
        groups.append((pieces, stamps))
    return len(groups), sum(p for p, _ in groups), sum(s % 8 > 0 for _, s in groups)


def _words_looked_at(each_entry: list[int]) -> int:
    """Of a block's entries: where each one's rows begin, twice, and which of them it has taken: none."""
    words = before = 0
    for rows in each_entry:
        if rows:
            words += 2
            last = min(before + rows, NOTED_ROWS)
            words += 1 + -(-last // WORD_ROWS) - before // WORD_ROWS if before < last else 0
        before += rows
    return words


def _rows(work: Work, rows: np.ndarray, blocks_of_row: int) -> Counts:
    """A row comes with its scales, and leaves in a copy for each table; its flags are cleared. What stands in
    its stamp comes once more, to a unit of its own.
    """
    weights, scales = int(work.has("out_weights")), int(work.has("out_scales"))
    stamped = int(scales and work.number("scale_offset") > work.number("stamp_offset"))
    loaded = work.number("scale_offset") + work.number("scale_bytes") if scales else work.number("row_bytes")
    loaded = blocks_of_row * BLOCK_DATA_BYTES if blocks_of_row else align(loaded, UB_ALIGN)
    flag_bytes = blocks_of_row * UB_ALIGN if blocks_of_row else WORD_BYTES
    small = ORIGIN.num_bytes + weights * WORD_BYTES + scales * work.number("scale_bytes")
    return counts(
        work,
        loads=(1 + weights + stamped) * rows,
        load_bytes=(loaded + (weights + stamped) * WORD_BYTES) * rows,
        stores=(3 + weights + scales) * rows,
        store_bytes=(work.number("row_bytes") + small + flag_bytes) * rows,
        scalar_local=rows,
        turns=rows,
        items=rows,
    )
