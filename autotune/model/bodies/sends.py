"""What the blocks of the sending Ascend C kernels do, counted as the loops of
``kernels_ascendc/include/<kernel>.h`` run: copies, bytes, scalar accesses, barriers.
``tests/autotune/model/test_formula_counts.py`` compares every number with a run of the kernel itself.

Taken for granted: nothing is refused or reported.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

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
    first_block,
    found_zone,
    fresh,
    is_queued,
    is_remote,
    kept,
    lines_of_table,
    lookups,
    lookups_of,
    no_ranks,
    num_parts,
    number_at,
    parts_of,
)
from autotune.model.cost import UnknownWorkError, Work
from moe_triton.layout import (
    BLOCK_BYTES,
    BLOCK_DATA_BYTES,
    STAMP_BYTES,
    STATUS_ENTRY_BYTES,
    UB_ALIGN,
    WORD_BYTES,
    align,
)

MAX_VISIT = 32
"""Slots that a row, once loaded, is written to (send_plan.h)."""

TABLE_ENTRIES = 1024
"""Indices that a core keeps in its local memory at a time (send_plan.h)."""

ENTRIES_PER_POST = 512
"""Status entries, or origins of results, that a core has at a time (status_entries.h, combine_send.h)."""

ENTRIES_PER_COPY = 64
"""Status entries that go to their receiver at once (status_entries.h)."""

PIECE_BYTES = 64 * 1024
"""Of a row that is copied at once (row_copy.h)."""

PIECE_BLOCKS = 96
"""Of a row with flags in band that are copied at once (inband_send.h)."""

COUNTS_PER_PIECE = 2048
"""Counts that are copied at once (counts_send.h)."""

WORDS_PER_PIECE = 1024
"""Words of a header that are copied at once (exchange_send.h)."""

SCALES_BYTES = 16 * 1024
"""Room for scales of rows (exchange_send.h)."""


@dataclass(frozen=True)
class Results:
    """What the blocks of a dispatch look at: results of a launch's tokens, in shares (send_plan.h)."""

    work: Work

    @cached_property
    def ranks(self) -> np.ndarray:
        """(N,) to which rank each result goes, -1 for nowhere.

        Raises:
            UnknownWorkError: there are shared experts, or tokens that the model does not know.
        """
        work, config = self.work, self.work.traffic.config
        if "num_shared_ranks" in work.arguments and work.number("num_shared_ranks"):
            raise UnknownWorkError(f"{work.kernel.name}: the model knows nothing of shared experts' results")
        first, tokens = work.number("first_token"), work.number("num_tokens")
        ids = work.traffic.topk_idx[first : first + tokens]
        if ids.shape != (tokens, work.number("topk")):
            raise UnknownWorkError(f"{work.kernel.name}: the call has {work.traffic.topk_idx.shape} ids only")
        ranks = np.where((ids >= 0) & (ids < config.num_experts), ids // config.num_local_experts, -1)
        kept = work.number("kept_rank") if "kept_rank" in work.arguments else -1
        return np.where(ranks == kept, -1, ranks).reshape(-1)

    @property
    def is_sent(self) -> np.ndarray:
        """(N,) whether a result goes anywhere."""
        return self.ranks >= 0

    @property
    def blocks(self) -> np.ndarray:
        """(N,) the block that looks at each of them."""
        return block_of(self.work, self.ranks.size)

    @cached_property
    def parts(self) -> np.ndarray:
        """(N,) in which part each result is sent, of those that have their turn one after the other."""
        return np.asarray(parts_of(self.work)[self.ranks])

    @cached_property
    def slots(self) -> np.ndarray:
        """(blocks,) slots that each block fills."""
        return each_block(self.work, self.blocks[self.is_sent])

    @cached_property
    def remote_slots(self) -> np.ndarray:
        """(blocks,) of these, those of other devices."""
        remote = is_remote(self.work)[self.ranks] & self.is_sent
        return each_block(self.work, self.blocks[remote])

    @property
    def lookups(self) -> np.ndarray:
        """(blocks,) reads of the table of windows for them."""
        return lookups(self.work, self.blocks[self.is_sent], self.ranks[self.is_sent])

    @cached_property
    def visits(self) -> np.ndarray:
        """(blocks,) how many source rows each block loads: one for all of a token's results that it has in a
        part.
        """
        topk, each = self.work.number("topk"), np.arange(self.ranks.size)
        most = MAX_VISIT if self.work.number("rows_per_token") == 1 else 1
        share = bounds(self.work, self.ranks.size)[self.blocks]
        begins = (each - np.maximum(each // topk * topk, share)) % most == 0
        number, turns = np.cumsum(begins) - 1, num_parts(self.work)
        loaded = np.unique((number * turns + self.parts)[self.is_sent]) // turns
        return each_block(self.work, self.blocks[begins][loaded])

    @property
    def rows(self) -> np.ndarray:
        """(EP,) rows to each rank."""
        return np.bincount(self.ranks[self.is_sent], minlength=self.work.traffic.config.num_ranks)

    def lines(self, before: np.ndarray | None = None) -> np.ndarray:
        """Keys of the lines of the table of windows that are read for them, without those read before."""
        return filled(self.work, self.blocks[self.is_sent], self.ranks[self.is_sent], before)

    def tables(self) -> Counts:
        """Loads of tables of indices: all tokens that fit, from a block's next one to its last."""
        work, topk, rows = self.work, self.work.number("topk"), self.work.number("rows_per_token")
        share = bounds(work, self.ranks.size)
        first, per_chunk = share[:-1] // topk, TABLE_ENTRIES // max(rows, topk)
        tokens = np.where(np.diff(share), chunks(share[1:], topk) - first, 0)
        loads = chunks(tokens, per_chunk)
        tables, words = 2 + work.has("topk_weights"), topk * (2 + work.has("topk_weights"))
        if "scales" in work.arguments and work.has("scales"):
            tables, words = tables + 1, words + rows
        turns = num_parts(work)
        loads, tokens = loads * turns, tokens * turns
        return counts(work, loads=loads * tables, load_bytes=tokens * words * WORD_BYTES, turns=loads)


def _words(work: Work, results: Results) -> np.ndarray:
    """(blocks,) scalar accesses for addresses and stamps: of each result its id, in every part; of those that
    are sent an index, rank, token and k, and a weight, which is read where there is one.
    """
    looks = num_parts(work) * each_block(work, results.blocks)
    words: np.ndarray = looks + (5 + work.has("topk_weights")) * results.slots
    return words


def sent_rows(work: Work, results: Results, lines: np.ndarray, extra_words: int = 0) -> Counts:
    """Rows that go out of one buffer to all their slots, each with a stamp."""
    scale_bytes = work.number("scale_bytes") if "scale_bytes" in work.arguments else 0
    copies = int(chunks(work.number("row_bytes"), PIECE_BYTES) + chunks(scale_bytes, PIECE_BYTES))
    source_bytes = work.number("row_bytes") + scale_bytes
    return counts(
        work,
        loads=results.visits * copies,
        load_bytes=results.visits * source_bytes,
        stores=results.slots * (copies + 1),
        store_bytes=results.slots * (source_bytes + STAMP_BYTES),
        sent_bytes=results.remote_slots * (source_bytes + STAMP_BYTES),
        scalar_local=_words(work, results) + extra_words * results.slots,
        scalar_global=results.lookups,
        lines=filled_by(work, lines),
        turns=results.visits,
        items=results.slots,
    )


def _status_entries(work: Work, before: np.ndarray) -> tuple[Counts, np.ndarray, np.ndarray]:
    """A status entry for every shared rank and expert, those of a rank in one copy (status_entries.h).

    Args:
        work: a launch that posts them.
        before: lines of the table of windows that have been read.

    Returns:
        what it takes, copies to each rank, and the lines that it reads.
    """
    shared, num_ranks = work.number("num_shared_ranks"), work.traffic.config.num_ranks
    local = work.number("num_experts") // (num_ranks - shared)
    of_rank = np.where(np.arange(num_ranks) < shared, 1, local)
    first = np.r_[0, of_rank.cumsum()]
    blocks, share = block_of(work, num_ranks), first[bounds(work, num_ranks)]
    own, of_shared = np.diff(share), np.diff(np.minimum(share, shared))
    copied = np.unique(np.r_[first, _chunks_of_posts(share, shared)])
    ranks = np.searchsorted(first, copied[:-1], "right") - 1
    copies, queued = chunks(np.diff(copied), ENTRIES_PER_COPY), is_queued(work)
    looks = copies * lookups_of(work, ranks)
    copies = np.where(queued[ranks], 0, copies)  # those of queued ranks are posted behind their rows
    each = each_block(work, blocks[ranks], copies)
    lines = filled(work, blocks, np.arange(num_ranks), before)
    away = each_block(work, blocks, of_rank * is_remote(work))
    written = each_block(work, blocks, of_rank * ~queued)
    entry = counts(
        work,
        loads=chunks(of_shared, ENTRIES_PER_POST) + chunks(own - of_shared, ENTRIES_PER_POST),
        load_bytes=own * WORD_BYTES,
        stores=each,
        store_bytes=written * STATUS_ENTRY_BYTES,
        sent_bytes=away * STATUS_ENTRY_BYTES,
        scalar_local=4 * own,
        scalar_global=each_block(work, blocks[ranks], looks),
        lines=filled_by(work, lines),
        vector=1,
        items=each,
    )
    word = fresh(work, work.has("combine_kind")) + kept(work, "dispatch_word")
    return entry + word, np.bincount(ranks, copies, num_ranks).astype(np.int64), lines


def _chunks_of_posts(share: np.ndarray, shared: int) -> np.ndarray:
    """Where chunks of entries begin: those of shared ranks and of experts are apart."""
    ends = np.unique(np.r_[share, shared])
    return np.concatenate([np.arange(a, b, ENTRIES_PER_POST) for a, b in itertools.pairwise(ends)])


def _send_start(work: Work, vector: int) -> Counts:
    """Two objects each drop the table of windows: that which sends rows, and that which posts entries."""
    dropped = 2 * lines_of_table(work.traffic.config.num_ranks)
    begun = int("begun" in work.arguments and work.has("begun"))
    said = counts(work, vector=begun, stores=begun, store_bytes=begun * STATUS_ENTRY_BYTES)
    return found_zone(work) + counts(work, dropped=dropped, vector=vector) + said + end(work)


def dispatch_send(work: Work) -> Counted:
    """A status entry for every expert, then rows; behind each, once it is there, a stamp with its flag."""
    results, flags, before = Results(work), no_ranks(work), None
    stages = {"start": _send_start(work, vector=1)}
    if work.number("post_status"):
        stages["flags"], flags, before = _status_entries(work, np.empty(0, np.int64))
    stages["tables"] = results.tables()
    rows = sent_rows(work, results, results.lines(before), extra_words=1)
    stages["rows"] = rows + counts(work, barriers=results.visits)
    return Counted(stages, results.rows, flags)


def inband_slot_bytes(work: Work) -> int:
    """Bytes that are written for each result: whole blocks, the last one with the stamp."""
    return -(-(work.number("stamp_offset") + STAMP_BYTES) // BLOCK_DATA_BYTES) * BLOCK_BYTES


def inband_send(work: Work) -> Counted:
    """Status entries first, then rows in blocks that carry their flags."""
    results, row_bytes = Results(work), work.number("row_bytes")
    stages, flags, before = {"start": _send_start(work, vector=3)}, no_ranks(work), None
    if work.number("post_status"):
        stages["flags"], flags, before = _status_entries(work, np.empty(0, np.int64))
    last = inband_slot_bytes(work) // BLOCK_BYTES - 1
    shared_bytes = min(last * BLOCK_DATA_BYTES, row_bytes)
    pieces = int(chunks(last, PIECE_BLOCKS))
    # Of each piece one load of its whole blocks, another one of what is behind them.
    ends = [min(shared_bytes, (i + 1) * PIECE_BLOCKS * BLOCK_DATA_BYTES) for i in range(pieces)]
    sizes = np.diff([0, *ends])
    loads = int((sizes >= BLOCK_DATA_BYTES).sum() + (sizes % BLOCK_DATA_BYTES > 0).sum())
    last_bytes = row_bytes - shared_bytes
    stages["tables"] = results.tables()
    lines = results.lines(before)
    stages["rows"] = counts(
        work,
        loads=results.visits * loads + results.slots * (last_bytes > 0),
        load_bytes=results.visits * shared_bytes + results.slots * last_bytes,
        stores=results.slots * (pieces + 1),
        store_bytes=results.slots * inband_slot_bytes(work),
        sent_bytes=results.remote_slots * inband_slot_bytes(work),
        scalar_local=_words(work, results),
        scalar_global=results.slots,
        lines=filled_by(work, lines),
        turns=results.visits,
        items=results.slots,
    )
    return Counted(stages, results.rows, flags)


def _to_ranks(work: Work, copies: int, num_bytes: int) -> Counts:
    """So many copies, of so many bytes together, to each rank; a block has its share of ranks."""
    ranks = np.arange(work.number("num_ranks"))
    blocks = block_of(work, ranks.size)
    own, away = each_block(work, blocks), each_block(work, blocks[is_remote(work)[ranks]])
    return counts(
        work,
        stores=own * copies,
        store_bytes=own * num_bytes,
        sent_bytes=away * num_bytes,
        scalar_global=own * copies,
        lines=filled_by(work, filled(work, blocks, ranks)),
        items=own,
    )


def counts_send(work: Work) -> Counted:
    """All counts to every rank, a barrier of the pipe, a flag each."""
    tables = [work.number("num_shared_ranks"), work.number("num_experts")]
    pieces, words = int(sum(chunks(each, COUNTS_PER_PIECE) for each in tables)), sum(tables)
    dropped = lines_of_table(work.number("num_ranks"))
    start = counts(work, dropped=dropped, vector=1, scalar_local=3) + end(work)
    start += fresh(work, work.has("combine_kind"))
    to_ranks = _to_ranks(work, pieces + 1, words * WORD_BYTES + STATUS_ENTRY_BYTES)
    entries = to_ranks + counts(work, loads=pieces, load_bytes=words * WORD_BYTES, barriers=1)
    ones = np.ones(work.number("num_ranks"), np.int64)
    return Counted({"start": start, "entries": entries}, no_ranks(work), 2 * ones)


def exchange_slot_bytes(work: Work) -> int:
    """Bytes that are written for each row: scales in whole units."""
    scales = align(max(1, work.number("scale_bytes")), UB_ALIGN) if work.has("scales") else 0
    return work.number("row_bytes") + scales


def exchange_send(work: Work) -> Counted:
    """Consecutive rows to one rank's slots, with their scales and a header."""
    row_bytes, peer = work.number("row_bytes"), work.number("peer")
    pieces = int(chunks(row_bytes, PIECE_BYTES))
    own = np.diff(bounds(work, number_at(work, "num_rows")))
    leaves = bool(is_remote(work)[peer])
    start = found_zone(work) + fresh(work, 2 + work.has("first_row")) + end(work)
    words = work.number("header_words") if work.has("header") else 0
    copies = first_block(work, int(chunks(words, WORDS_PER_PIECE)))
    header_bytes = first_block(work, words * WORD_BYTES)
    header = counts(
        work,
        loads=copies,
        load_bytes=header_bytes,
        stores=copies,
        store_bytes=header_bytes,
        sent_bytes=header_bytes * leaves,
    )
    scales = work.number("scale_bytes") if work.has("scales") else 0
    slot_bytes = exchange_slot_bytes(work)
    room = max(1, SCALES_BYTES // align(max(1, work.number("scale_bytes")), UB_ALIGN))
    loads = chunks(own, room) * work.has("scales")
    rows = counts(
        work,
        loads=own * pieces + loads,
        load_bytes=own * (row_bytes + scales),
        stores=own * (pieces + work.has("scales")),
        store_bytes=own * slot_bytes,
        sent_bytes=own * slot_bytes * leaves,
        turns=own,
        items=own,
    )
    written = no_ranks(work)
    written[peer] = own.sum()
    return Counted({"start": start, "header": header, "rows": rows}, written, no_ranks(work))
