"""What the blocks of the waiting Ascend C kernels do, counted as
`moe_triton.model.bodies.sends` counts those that send.

All that a kernel waits for is there at its first look.
"""

from __future__ import annotations

import itertools

import numpy as np

from moe_triton.layout import (
    BLOCK_DATA_BYTES,
    ORIGIN,
    STAMP_BYTES,
    STATUS_ENTRY_BYTES,
    UB_ALIGN,
    WORD_BYTES,
)
from moe_triton.model.bodies.counts import (
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
    no_ranks,
)
from moe_triton.model.cost import Table, UnknownWorkError, Work

TABLE_ENTRIES = 1024
"""Indices or entries that a core keeps in its local memory at a time (dispatch_wait.h, combine_wait.h,
inband_receive.h).
"""

MAX_ROWS = 32
"""Rows that are polled together, and taken out (inband_receive.h)."""

FLAG_WORDS = 8 * 1024
"""Words of flags that are polled together, at most (inband_receive.h)."""

PIECE_BLOCKS = 96
"""Of a row with flags in band that are copied at once (inband_receive.h)."""


def dispatch_wait(work: Work) -> Counted:
    """A look at the status entries, their counts, and zeros in their places."""
    own = np.diff(bounds(work, work.number("num_local_experts") * extent(work, "status", "source")))
    looks, noted = chunks(own, TABLE_ENTRIES), int(work.has("waited_us"))
    start = found_zone(work) + fresh(work, 1 + work.has("dispatch_word")) + end(work)
    poll = counts(
        work,
        loads=looks,
        load_bytes=own * STATUS_ENTRY_BYTES,
        vector=2 * looks,
        scalar_local=looks,
        turns=looks,
    )
    store = counts(
        work,
        stores=(2 + noted) * looks,
        store_bytes=own * (STATUS_ENTRY_BYTES + (1 + noted) * WORD_BYTES),
        vector=looks,
        scalar_local=(4 + 5 * noted) * own,
        turns=looks,
        items=own,
    )
    return Counted({"start": start, "poll": poll, "store": store}, no_ranks(work), no_ranks(work))


def combine_wait(work: Work) -> Counted:
    """For each token a look at its results' flags, and zeros in their places."""
    topk, tokens, first = work.number("topk"), work.number("num_tokens"), work.number("first_token")
    results, noted = topk + work.number("num_shared_experts"), int(work.has("waited_us"))
    ids = work.traffic.topk_idx[first : first + tokens]
    active = np.ones(tokens, bool)
    mask = work.arguments["active"]
    # Where nobody knows the mask no token is masked, as in `traffic_of`.
    if isinstance(mask, Table) and mask.values is not None:
        active = mask.values[first : first + tokens] >= 0
    expected = ((ids >= 0) & (ids < work.traffic.config.num_experts)).sum(axis=1) + results - topk
    expected = np.where(active, expected, 0)
    blocks, share = block_of(work, tokens), bounds(work, tokens)
    own, waiting = each_block(work, blocks), each_block(work, blocks[expected > 0])
    loads = chunks(np.diff(share), TABLE_ENTRIES // results)
    masks = int(work.has("active"))
    looked = results * masks + np.where(active, topk, 0)
    times = noted * (results + np.where(expected > 0, results + 3 * expected, 0))
    tables = counts(
        work, loads=loads * (1 + masks), load_bytes=own * (topk + masks) * WORD_BYTES, turns=loads
    )
    poll = counts(
        work,
        loads=waiting,
        load_bytes=waiting * results * STATUS_ENTRY_BYTES,
        vector=waiting,
        scalar_local=each_block(work, blocks, looked + times) + waiting,
        turns=waiting,
        items=own,
    )
    store = counts(
        work,
        stores=waiting + noted * loads,
        store_bytes=waiting * results * STATUS_ENTRY_BYTES + noted * own * results * WORD_BYTES,
        turns=waiting,
    )
    start = found_zone(work) + fresh(work, 1) + counts(work, vector=1) + end(work)
    stages = {"start": start, "tables": tables, "poll": poll, "store": store}
    return Counted(stages, no_ranks(work), no_ranks(work))


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
    stages = {"start": found_zone(work) + fresh(work, 1) + counts(work, vector=1) + end(work)}
    stages |= {"tables": tables, "poll": poll, "rows": _rows_of_slots(work, rows, polls, flag_bytes)}
    return Counted(stages, no_ranks(work), no_ranks(work))


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
