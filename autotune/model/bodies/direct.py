"""What the blocks of ``direct_send`` do, counted as `autotune.model.bodies.sends` counts those of the other
kernels that send: sums of all ranks' counts, rows to the places that follow, tables for later steps.
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
    lines_of_table,
    no_ranks,
)
from autotune.model.bodies.sends import Results, sent_rows
from autotune.model.cost import Work
from moe_triton.layout import WORD_BYTES

SCRATCH_WORDS = 4096
"""Counts of sources that are summed at a time (direct_starts.h)."""

MAX_RESULTS = 512
"""Results whose offsets are written at a time (direct_tables.h)."""

MAX_COUNTS = 2048
"""Counts, in whole 32-byte units, that are turned round at a time (direct_tables.h)."""

UNIT_WORDS = 8
OFFSET_BYTES = 8
LOOK_UP = 2
"""Scalar accesses for a place: where the entry's rows begin, once its receiver's are summed up."""


def direct_send(work: Work) -> Counted:
    """Rows to their places in the receivers' outputs, stamps and several scales apart."""
    results = Results(work)
    start = counts(work, dropped=2 * lines_of_table(work.number("num_ranks")), vector=1) + end(work)
    lines, asked = results.lines(), _receivers(work, results.blocks, results.ranks)
    # Each row's place and, with the first of a receiver, all of its sums.
    words = LOOK_UP * results.slots + _summed_up(work, asked)
    rows = sent_rows(work, results, lines, 1 + work.has("scales")) + counts(work, scalar_local=words)
    stages = {
        "start": start,
        "starts": _starts(work),
        "tables": results.tables(),
        "rows": rows,
        "offsets": _offsets(work, results, lines, asked),
        "counts": _received(work),
    }
    return Counted(stages, results.rows, no_ranks(work))


def _starts(work: Work) -> Counts:
    """Every block clamps the counts of all sources, and adds halves of them to each other until one is left:
    those before its rank, and the others.
    """
    stride, ranks, rank = _row_words(work), work.number("num_ranks"), work.number("rank")
    per_chunk = max(1, SCRATCH_WORDS // stride)
    firsts = np.arange(0, ranks, per_chunk)
    numbers = np.minimum(per_chunk, ranks - firsts)
    earlier = np.clip(rank - firsts, 0, numbers)
    parts = np.concatenate([earlier, numbers - earlier])
    adds = sum(int(part - 1).bit_length() + 1 for part in parts if part)
    clamps = 2 * firsts.size
    return counts(
        work,
        loads=firsts.size,
        load_bytes=ranks * stride * WORD_BYTES,
        vector=1 + clamps + adds + 1,
        barriers=clamps + adds,
        turns=firsts.size,
    )


def _row_words(work: Work) -> int:
    words = work.arguments["counts"]
    assert isinstance(words, tuple)
    _, _, _, stride, *_ = words  # base, then stride and extent of zone, source, entry
    return stride // WORD_BYTES


def _receivers(work: Work, blocks: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Which blocks ask for places at which ranks."""
    keys: np.ndarray = np.unique(blocks[ranks >= 0] + work.blocks * ranks[ranks >= 0])
    return keys


def _summed_up(work: Work, keys: np.ndarray) -> np.ndarray:
    each = 2 * work.number("num_local_experts") + 1
    summed: np.ndarray = each * each_block(work, keys % work.blocks)
    return summed


def _offsets(work: Work, results: Results, lines: np.ndarray, asked: np.ndarray) -> Counts:
    """Of the results of each block's share of tokens: read is an id, and where it is one an index; written is
    an offset.
    """
    topk, num_tokens = work.number("topk"), work.number("num_tokens")
    own = np.diff(bounds(work, num_tokens))
    blocks = np.repeat(block_of(work, num_tokens), topk)
    sent = each_block(work, blocks[results.is_sent])
    more = np.setdiff1d(_receivers(work, blocks, results.ranks), asked)
    looks = chunks(own, MAX_RESULTS // topk)
    read = filled(work, blocks[results.is_sent], results.ranks[results.is_sent], lines)
    return counts(
        work,
        loads=2 * looks,
        load_bytes=2 * topk * WORD_BYTES * own,
        scalar_local=2 * topk * own + (1 + LOOK_UP) * sent + _summed_up(work, more),
        scalar_global=sent,
        lines=filled_by(work, read),
        stores=looks,
        store_bytes=OFFSET_BYTES * topk * own,
        turns=looks,
        items=sent,
    )


def _received(work: Work) -> Counts:
    """This rank's counts by source become counts by expert."""
    ranks, experts = work.number("num_ranks"), work.number("num_local_experts")
    own = np.diff(bounds(work, experts))
    sources = min(ranks, MAX_COUNTS // UNIT_WORDS)
    at_once = 1 if sources < ranks else MAX_COUNTS // (sources * UNIT_WORDS) * UNIT_WORDS
    pieces = chunks(own, at_once) * chunks(ranks, sources)
    return counts(
        work,
        loads=pieces,
        load_bytes=WORD_BYTES * ranks * own,
        scalar_local=2 * ranks * own,
        stores=pieces,
        store_bytes=WORD_BYTES * ranks * own,
        turns=pieces,
    )
