"""What the blocks of the waiting Ascend C kernels do, counted as
`autotune.model.bodies.sends` counts those that send.

All that a kernel waits for is there at its first look.
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
    extent,
    found_zone,
    fresh,
    kept,
    no_ranks,
)
from autotune.model.cost import Table, UnknownWorkError, Work
from moe_triton.layout import (
    BLOCK_DATA_BYTES,
    ORIGIN,
    STAMP_BYTES,
    STATUS_ENTRY_BYTES,
    UB_ALIGN,
    WORD_BYTES,
)

TABLE_ENTRIES = 1024
"""Indices or entries that a core keeps in its local memory at a time (dispatch_wait.h, combine_wait.h,
inband_receive.h).
"""

MAX_ROWS = 32
"""Rows that are polled together, and taken out (inband_receive.h)."""

MAX_STAMPS = 1024
"""Stamps that are polled together (dispatch_rows.h),"""

MAX_PIECES = 64
"""from so many entries at most,"""

MAX_CLEARED = 256
"""and flags that are cleared at once."""

FLAG_WORDS = 8 * 1024
"""Words of flags that are polled together, at most (inband_receive.h)."""

PIECE_BLOCKS = 96
"""Of a row with flags in band that are copied at once (inband_receive.h)."""


def dispatch_wait(work: Work) -> Counted:
    """A look at the status entries, their counts, and zeros in their places."""
    experts = work.number("num_local_experts")
    entries = experts * extent(work, "status", "source")
    share, sees_all, noted = bounds(work, entries), work.has("all_counts"), int(work.has("waited_us"))
    own = np.diff(share)
    awaited = np.full_like(own, entries) if sees_all else own
    looks = chunks(awaited, TABLE_ENTRIES)
    begins = np.where(sees_all, 0, share[:-1])
    stored = stores_by_number(begins, share[:-1], share[1:], experts)
    copied = stores_by_number(begins, begins, begins + awaited, experts) * sees_all
    cleared = looks * (not sees_all)
    start = found_zone(work) + end(work)
    start += fresh(work, 1 + (work.has("dispatch_word") or work.has("combine_kind")))
    start += kept(work, "kept_zone") + kept(work, "turned")
    poll = counts(
        work,
        loads=looks * (1 + sees_all),
        load_bytes=awaited * (STATUS_ENTRY_BYTES + sees_all * WORD_BYTES),
        vector=2 * looks,
        scalar_local=looks,
        turns=looks,
    )
    store = counts(
        work,
        stores=(1 + noted) * stored + copied + cleared,
        store_bytes=own * (1 + noted) * WORD_BYTES
        + (awaited * WORD_BYTES if sees_all else own * STATUS_ENTRY_BYTES),
        vector=cleared,
        scalar_local=(4 + 7 * noted) * own,
        turns=looks,
        items=own,
    )
    return Counted({"start": start, "poll": poll, "store": store}, no_ranks(work), no_ranks(work))


def dispatch_rows(work: Work) -> Counted:
    """A look at the flags in the stamps of rows, and zeros in their places."""
    # In the order of the window: by source, then by expert.
    each_entry, kept_rank = work.traffic.recv_counts.T.copy(), work.number("kept_rank")
    if kept_rank >= 0:
        each_entry[kept_rank] = 0
    experts = work.number("num_local_experts")
    share, noted = bounds(work, each_entry.size), int(work.has("waited_us"))
    own, looks = np.diff(share), chunks(np.diff(share), TABLE_ENTRIES)
    sources = np.arange(each_entry.size) // experts
    looked = each_block(work, block_of(work, each_entry.size), sources != kept_rank)
    tables = counts(
        work,
        loads=(1 + noted) * stores_by_number(share[:-1], share[:-1], share[1:], experts),
        load_bytes=(1 + noted) * own * WORD_BYTES,
        scalar_local=looked + 2 * noted * own,
        turns=looks,
    )
    found = [_pieces(each_entry.reshape(-1)[a:b]) for a, b in itertools.pairwise(share)]
    polls, pieces, padded, cleared = (np.array(column) for column in zip(*found, strict=True))
    rows = each_block(work, block_of(work, each_entry.size), each_entry.reshape(-1))
    poll = counts(
        work,
        loads=pieces,
        load_bytes=rows * STAMP_BYTES,
        vector=polls + padded,
        scalar_local=polls,
        turns=polls,
        items=pieces,
    )
    start = found_zone(work) + fresh(work, 1) + counts(work, vector=1) + end(work)
    store = counts(work, stores=cleared, store_bytes=rows * WORD_BYTES)
    stages = {"start": start, "tables": tables, "poll": poll, "store": store}
    return Counted(stages, no_ranks(work), no_ranks(work))


def rows_of_part(work: Work) -> np.ndarray:
    """(EP * localE,) how many rows of each entry, as they lie in the window, a part of a dispatch takes.

    Raises:
        UnknownWorkError: the model does not know it.
    """
    rows: np.ndarray = _of_entries(work, "rows_taken") - _of_entries(work, "rows_before")
    return rows


def _of_entries(work: Work, name: str) -> np.ndarray:
    table = work.arguments[name]
    if not isinstance(table, Table) or table.values is None:
        raise UnknownWorkError(f"{work.kernel.name}: the model does not know {name}")
    numbers: np.ndarray = table.values[: work.traffic.recv_counts.size].astype(np.int64)
    return numbers


def dispatch_take(work: Work) -> Counted:
    """Of each entry a look at the flags of the rows that no part has taken, and zeros in the places of those
    that this one takes.
    """
    each_entry, kept_rank = work.traffic.recv_counts.T.copy(), work.number("kept_rank")
    if kept_rank >= 0:
        each_entry[kept_rank] = 0
    rows, experts, is_first = (
        each_entry.reshape(-1),
        work.number("num_local_experts"),
        work.number("part") == 0,
    )
    before = np.zeros_like(rows) if is_first else _of_entries(work, "rows_before")
    taken, blocks = _of_entries(work, "rows_taken"), block_of(work, rows.size)
    share, noted = bounds(work, rows.size), int(work.has("waited_us"))
    own, looks = np.diff(share), chunks(np.diff(share), TABLE_ENTRIES)
    looked = each_block(work, blocks, np.repeat(np.arange(each_entry.shape[0]) != kept_rank, experts))
    tables = counts(
        work,
        loads=(1 + noted) * stores_by_number(share[:-1], share[:-1], share[1:], experts)
        + looks * (not is_first),
        load_bytes=(1 + noted + (not is_first)) * own * WORD_BYTES,
        stores=looks * (1 + is_first),
        store_bytes=own * (1 + is_first) * WORD_BYTES,
        # What is compared, and in the first part set and checked.
        scalar_local=(1 + is_first) * (looked + own) + 2 * noted * own,
        turns=looks,
    )
    found = np.array([_looks(*each) for each in zip(rows, before, taken, strict=True)]).reshape(-1, 5)
    polls, padded, stamps, scanned, cleared = (each_block(work, blocks, column) for column in found.T)
    poll = counts(
        work,
        loads=polls,
        load_bytes=stamps * STAMP_BYTES,
        vector=polls + padded,
        scalar_local=polls + scanned + 2 * each_block(work, blocks[before < rows]),
        turns=polls,
        items=polls,
    )
    start = found_zone(work) + fresh(work, 1) + counts(work, vector=1) + end(work)
    store = counts(work, stores=cleared, store_bytes=each_block(work, blocks, taken - before) * WORD_BYTES)
    stages = {"start": start, "tables": tables, "poll": poll, "store": store}
    return Counted(stages, no_ranks(work), no_ranks(work))


def _looks(rows: int, before: int, taken: int) -> tuple[int, int, int, int, int]:
    """Of an entry: looks at stamps, how many of them do not fill whole repeats, stamps, those that are looked
    at one by one, and copies that clear flags.
    """
    looks = padded = stamps = scanned = cleared = 0
    while before < rows:
        count = min(rows - before, MAX_STAMPS)
        there = min(count, taken - before)
        looks, padded, stamps = looks + 1, padded + (count % 8 > 0), stamps + count
        cleared += -(-there // MAX_CLEARED)
        before += there
        if there < count:
            scanned += there + 1
            break
    return looks, padded, stamps, scanned, cleared


def _pieces(each_entry: np.ndarray) -> tuple[int, int, int, int]:
    """Of a block's entries: groups of stamps that are polled together, their pieces, how many of the groups
    do not fill whole repeats, and copies that clear flags.
    """
    groups, cleared = [], 0
    for begin in range(0, each_entry.size, TABLE_ENTRIES):
        pieces = stamps = 0
        for left in each_entry[begin : begin + TABLE_ENTRIES].tolist():
            while left:
                if pieces == MAX_PIECES or stamps == MAX_STAMPS:
                    groups.append((pieces, stamps))
                    pieces = stamps = 0
                more = min(left, MAX_STAMPS - stamps)
                pieces, stamps, left = pieces + 1, stamps + more, left - more
                cleared += -(-more // MAX_CLEARED)
        if pieces:
            groups.append((pieces, stamps))
    return len(groups), sum(p for p, _ in groups), sum(s % 8 > 0 for _, s in groups), cleared


def stores_by_number(begins: np.ndarray, first: np.ndarray, last: np.ndarray, experts: int) -> np.ndarray:
    """(blocks,) copies of a word of each entry, as they lie in the window, to or from a table by expert
    (entry_order.h): one for each source of few entries, one for each expert of many.

    Args:
        begins: (blocks,) where the first chunk begins.
        first, last: (blocks,) the entries whose words are copied.
        experts: of the receiver.
    """
    steps = TABLE_ENTRIES * np.arange(1 + int((last - begins).max()) // TABLE_ENTRIES)
    begin = np.maximum(begins[:, None] + steps, first[:, None])
    end = np.minimum(begins[:, None] + steps + TABLE_ENTRIES, last[:, None])
    sources = chunks(end, experts) - begin // experts
    copies = np.where(end - begin > experts, experts, sources) * (end > begin)
    total: np.ndarray = copies.sum(axis=1)
    return total


def inband_receive(work: Work) -> Counted:
    """For each row a look at its blocks' flags, the row to its place, its scales and its stamp, zeros in the
    flags' places.
    """
    entries, each_entry = work.number("num_entries"), work.traffic.recv_counts.reshape(-1)
    if each_entry.size != entries:
        raise UnknownWorkError(f"inband_receive: the model knows of {each_entry.size} entries, not {entries}")
    blocks_of_row = -(-(work.number("stamp_offset") + STAMP_BYTES) // BLOCK_DATA_BYTES)
    flag_bytes, noted = blocks_of_row * UB_ALIGN, int(work.has("waited_us"))
    share = bounds(work, entries)
    own, looks = np.diff(share), chunks(np.diff(share), TABLE_ENTRIES)
    rows = each_block(work, block_of(work, entries), each_entry)
    polls = _polls(share, each_entry, max(1, min(MAX_ROWS, FLAG_WORDS * WORD_BYTES // flag_bytes)))
    before = looks - ((share[:-1] == 0) & (looks > 0))
    tables = counts(
        work,
        loads=(1 + noted) * looks,
        load_bytes=(own + before + noted * own) * WORD_BYTES,
        stores=noted * looks,
        store_bytes=noted * own * WORD_BYTES,
        scalar_local=2 * own - ((share[:-1] == 0) & (own > 0)),
        turns=looks,
        items=own,
    )
    poll = counts(
        work, loads=rows, load_bytes=rows * flag_bytes, vector=polls, scalar_local=polls, turns=polls
    )
    start = found_zone(work) + fresh(work, 1) + counts(work, vector=1) + kept(work, "turned") + end(work)
    start += _cleared_entries(work, own, flag_bytes)
    stages = {"start": start}
    stages |= {"tables": tables, "poll": poll, "rows": _rows_of_slots(work, rows, polls, flag_bytes)}
    return Counted(stages, no_ranks(work), no_ranks(work))


def _cleared_entries(work: Work, own: np.ndarray, zero_bytes: int) -> Counts:
    """Status entries in pieces as long as there are zeros."""
    stores = chunks(own, zero_bytes // STATUS_ENTRY_BYTES)
    return counts(work, stores=stores, store_bytes=own * STATUS_ENTRY_BYTES)


def _polls(share: np.ndarray, each_entry: np.ndarray, most: int) -> np.ndarray:
    """(blocks,) groups of at most so many rows; none of them goes over the end of a chunk of entries."""
    before = np.r_[0, each_entry.cumsum()]
    begins = [np.arange(a, b, TABLE_ENTRIES) for a, b in itertools.pairwise(share)]
    return np.array(
        [
            chunks(before[np.minimum(begin + TABLE_ENTRIES, last)] - before[begin], most).sum()
            for begin, last in zip(begins, share[1:], strict=True)
        ]
    )


def _rows_of_slots(work: Work, rows: np.ndarray, polls: np.ndarray, flag_bytes: int) -> Counts:
    """Rows to their places in pieces, small things in groups of those rows that were polled together."""
    row_bytes, scale_bytes = work.number("row_bytes"), work.number("scale_bytes") * work.has("out_scales")
    data_blocks = int(chunks(row_bytes, BLOCK_DATA_BYTES))
    pieces = int(chunks(data_blocks, PIECE_BLOCKS))
    first = work.number("scale_offset") // BLOCK_DATA_BYTES
    last = (work.number("scale_offset") + scale_bytes - 1) // BLOCK_DATA_BYTES
    of_scales = last - first + 1 if scale_bytes else 0
    weights = int(work.has("out_weights"))
    small_bytes = scale_bytes + ORIGIN.num_bytes + weights * WORD_BYTES
    return counts(
        work,
        loads=rows * (pieces + of_scales + 1 + weights),
        load_bytes=rows * (data_blocks * BLOCK_DATA_BYTES + small_bytes),
        stores=rows * (pieces + 1) + polls * (1 + work.has("out_scales") + weights),
        store_bytes=rows * (row_bytes + small_bytes + flag_bytes),
        turns=rows,
        items=rows,
    )
