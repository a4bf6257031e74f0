"""What the blocks of ``dispatch_offsets`` do, counted as `autotune.model.bodies.sends` counts those that
send: the sums of the counts before a block's own entries, its own entries, and the slots of their rows.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from autotune.model.bodies.counts import (
    Counted,
    Counts,
    bounds,
    chunks,
    counts,
    each_block,
    end,
    extent,
    found_zone,
    no_ranks,
)
from autotune.model.cost import UnknownWorkError, Work
from moe_triton.layout import TRAILER_WORDS, UB_ALIGN, WORD_BYTES

CHUNK_ENTRIES = 2048
"""Entries that a core has in its local memory at a time (offsets.h)."""

MAX_EXACT_SUM = 1 << 24
"""Up to which vector instructions sum counts (count_sums.h)."""

PIECE_ROWS = 16 * 1024
"""Rows whose slots are written at a time (row_slots.h)."""

LONG_RUN = 32
"""Rows of an entry from which on vector instructions write their slots (row_slots.h)."""

ADDED_ROWS = 512
"""Rows of such an instruction (row_slots.h)."""

UNIT_ROWS = UB_ALIGN // WORD_BYTES

TOKENS_BYTES = 8


def dispatch_offsets(work: Work) -> Counted:
    """Sums before each block's entries, sums in them, and the slot of each of their rows."""
    entries = work.number("num_local_experts") * work.number("num_ranks")
    if work.traffic.recv_counts.size != entries:
        known = work.traffic.recv_counts.size
        raise UnknownWorkError(f"dispatch_offsets: the model knows of {known} entries, not {entries}")
    share = bounds(work, entries)
    start = found_zone(work) + end(work)
    stages = {"start": start, "sums": _sums(work, share)}
    if _by_source(work):
        stages["sums"] += _starts(work, share)
    stages["entries"] = _entries(work, share)
    if work.has("row_slots"):
        own = (_slots(work, block, *chunk) for block, chunk in _own_chunks(share))
        written = reduce(Counts.__add__, own, counts(work))
        makes_steps = np.where(written.vector > 0, 2, 0)
        stages["slots"] = written + counts(work, vector=makes_steps, barriers=makes_steps)
    return Counted(stages, no_ranks(work), no_ranks(work))


def _by_source(work: Work) -> bool:
    return bool(work.has("row_slots") and work.number("by_source"))


def _starts(work: Work, share: np.ndarray) -> Counts:
    """What each source has before a block's entries: of whole experts by vector instructions where their
    counts begin whole units (source_starts.h).
    """
    ranks = work.number("num_ranks")
    has_any = (np.diff(share) > 0).astype(np.int64)
    before = share[:-1] * has_any
    is_vector = ranks % UNIT_ROWS == 0 and _max_count(work) <= MAX_EXACT_SUM // CHUNK_ENTRIES
    adds, one_by_one = np.zeros_like(before), before.copy()
    if is_vector:
        for block, end_ in enumerate(before.tolist()):
            for first in range(0, end_, CHUNK_ENTRIES):
                last = min(first + CHUNK_ENTRIES, end_)
                skipped = min(-first % ranks, last - first)
                adds[block] += (last - first - skipped) // ranks
        one_by_one -= adds * ranks
    return counts(work, vector=adds + has_any, barriers=adds, scalar_local=3 * one_by_one)


def _max_count(work: Work) -> int:
    most = work.number("max_count")
    return min(most, extent(work, "slots", "index")) if work.has("row_slots") else most


def _own_chunks(share: np.ndarray) -> list[tuple[int, tuple[int, int]]]:
    """Each block with its own entries of each of its chunks."""
    found = []
    for block, (first, last) in enumerate(zip(share[:-1].tolist(), share[1:].tolist(), strict=True)):
        begins = [first, *range(first // CHUNK_ENTRIES * CHUNK_ENTRIES + CHUNK_ENTRIES, last, CHUNK_ENTRIES)]
        found += [(block, (a, b)) for a, b in zip(begins, [*begins[1:], last], strict=True) if a < b]
    return found


def _sums(work: Work, share: np.ndarray) -> Counts:
    """All counts up to a block's last own one are loaded, those before its own ones summed; once more up to
    the first entry of an expert.
    """
    first, last = share[:-1], np.where(np.diff(share) > 0, share[1:], 0)
    before = np.where(last > 0, first, 0)
    expert = before // work.number("num_ranks") * work.number("num_ranks")
    summed, looks = chunks(before, CHUNK_ENTRIES), chunks(last, CHUNK_ENTRIES)
    again = np.where((before > expert) & (expert % CHUNK_ENTRIES > 0), 1, 0)
    loads = {"loads": looks, "load_bytes": WORD_BYTES * last, "turns": looks}
    if _max_count(work) > MAX_EXACT_SUM // CHUNK_ENTRIES:
        return counts(work, **loads, scalar_local=before + again * (expert % CHUNK_ENTRIES))
    vector = {"vector": 4 * summed + again, "barriers": 3 * summed + again}
    return counts(work, **loads, **vector, scalar_local=summed + again)


def _entries(work: Work, share: np.ndarray) -> Counts:
    """Where each own entry ends, how many rows each expert has whose last entry is among them; the total."""
    ranks, has_stats = work.number("num_ranks"), int(work.has("recv_stats"))
    blocks, own = zip(*_own_chunks(share), strict=True)
    last = np.arange(work.blocks) == work.blocks - 1
    entries = np.array([b - a for a, b in own])
    experts = np.array([b // ranks - a // ranks for a, b in own])
    done = (experts > 0).astype(np.int64)

    def sums(numbers: np.ndarray) -> np.ndarray:
        return each_block(work, np.array(blocks), numbers)

    expert_bytes = TOKENS_BYTES + has_stats * WORD_BYTES
    return counts(
        work,
        loads=has_stats * sums(done),
        load_bytes=has_stats * WORD_BYTES * sums(experts),
        scalar_local=2 * sums(entries) + (1 + 2 * has_stats) * sums(experts) + TRAILER_WORDS * last,
        stores=sums(1 + (1 + has_stats) * done) + last,
        store_bytes=sums(WORD_BYTES * entries + expert_bytes * experts) + TRAILER_WORDS * WORD_BYTES * last,
        turns=sums(np.ones_like(entries)),
        items=sums(entries),
    )


def _slots(work: Work, block: int, first: int, last: int) -> Counts:
    """Of the rows of some entries of a block."""
    each = np.clip(work.traffic.recv_counts.reshape(-1), 0, _max_count(work))
    ends = np.minimum(each.cumsum(), work.number("capacity"))
    begin = int(ends[first - 1]) if first else 0
    rows, own = int(ends[last - 1]) - begin, ends[first:last]
    if not rows:
        return counts(work)
    pieces = int(chunks(rows, PIECE_ROWS))
    # Entries behind the last row are not visited; one that goes over the end of a piece is visited again.
    again = np.setdiff1d(begin + PIECE_ROWS * np.arange(1, pieces), own).size
    visits = int(np.searchsorted(own, own[-1])) + 1 + again
    cuts = np.unique([begin, *own, *begin + PIECE_ROWS * np.arange(pieces)])
    sources = np.searchsorted(ends, cuts[:-1], side="right") % work.number("num_ranks")
    one_by_one, adds = _runs(cuts, begin, sources == work.number("kept_rank"))
    is_block = np.where(np.arange(work.blocks) == block, 1, 0)
    # Of the entry's source what it has before, and then with this entry.
    of_sources = _by_source(work) * (visits + 2 * (visits - again))
    return counts(
        work,
        scalar_local=(visits + one_by_one + of_sources) * is_block,
        vector=adds * is_block,
        stores=pieces * is_block,
        store_bytes=WORD_BYTES * rows * is_block,
        turns=pieces * is_block,
        items=visits * is_block,
    )


def _runs(cuts: np.ndarray, begin: int, is_kept: np.ndarray) -> tuple[int, int]:
    """Rows in neighbouring slots, or in none, are between two cuts each: how many of all are written one by
    one, and by how many instructions the others.
    """
    lengths, first = np.diff(cuts), (cuts[:-1] - begin) % PIECE_ROWS
    unit, end = chunks(first, UNIT_ROWS) * UNIT_ROWS, (first + lengths) // UNIT_ROWS * UNIT_ROWS
    added = np.where((lengths >= LONG_RUN) & ~is_kept, end - unit, 0)
    return int((lengths - added).sum()), int(chunks(added, ADDED_ROWS).sum())
