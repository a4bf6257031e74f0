"""What the blocks of combine's Ascend C kernels do, counted as `autotune.model.bodies.sends` and
`autotune.model.bodies.waits` count all others.
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
    first_block,
    found_zone,
    fresh,
    is_queued,
    is_remote,
    kept,
    lines_of_table,
    lookups,
    no_ranks,
    number_at,
)
from autotune.model.bodies.sends import ENTRIES_PER_POST, PIECE_BYTES
from autotune.model.bodies.waits import TABLE_ENTRIES
from autotune.model.cost import Table, UnknownWorkError, Work
from moe_triton.layout import ORIGIN, STATUS_ENTRY_BYTES, WORD_BYTES

READY_ENTRIES = 512
"""Flags that a core has in its local memory at a time (ready_tokens.h)."""


def sent_in_part(work: Work) -> np.ndarray:
    """(A,) whether a combine_send sends the result of each received row: those of a part's tokens.

    Raises:
        UnknownWorkError: the model does not know the tokens.
    """
    rows, parts = work.traffic.num_rows, work.number("num_parts")
    if parts <= 1:
        return np.ones(rows, bool)
    origins = work.arguments["origins"]
    if not isinstance(origins, Table) or origins.values is None:
        raise UnknownWorkError("combine_send: the model does not know whose results these rows are")
    tokens = origins.values[: ORIGIN.num_words * rows].reshape(-1, ORIGIN.num_words)[:, ORIGIN.word("token")]
    first, part = work.number("part") * work.number("part_tokens"), work.number("part")
    is_last = part + 1 == parts
    chosen: np.ndarray = (tokens >= first) & (is_last | (tokens < first + work.number("part_tokens")))
    return chosen


def _parts_progress(work: Work, reads: int, words: int) -> Counts:
    """What a block of a combine in parts knows from its last launch, and keeps for the next one."""
    if not work.has("progress"):
        return counts(work)
    return fresh(work, reads) + counts(work, scalar_local=words, stores=1, store_bytes=words * WORD_BYTES)


def combine_send(work: Work) -> Counted:
    """Each result to its token's slot, a barrier of the copying pipe, its flag."""
    row_bytes, is_flagged = work.number("row_bytes"), work.number("flag_rows") != 0
    experts, ranks = work.traffic.recv_counts.shape
    sources = np.repeat(np.tile(np.arange(ranks), experts), work.traffic.recv_counts.reshape(-1))
    if sources.size != number_at(work, "recv_offsets"):
        raise UnknownWorkError("combine_send: the model knows of another number of rows than recv_offsets")
    chosen, all_blocks = sent_in_part(work), block_of(work, sources.size)
    looked_at, sources, blocks = each_block(work, all_blocks), sources[chosen], all_blocks[chosen]
    own = each_block(work, blocks)
    copied, remote = sources != work.number("kept_rank"), is_remote(work)[sources]
    away = each_block(work, blocks[remote])
    moved, moved_away = each_block(work, blocks[copied]), each_block(work, blocks[copied & remote])
    pieces = int(chunks(row_bytes, PIECE_BYTES))
    flag_bytes = is_flagged * STATUS_ENTRY_BYTES
    flags = is_flagged * each_block(work, blocks[~is_queued(work)[sources]])
    rows = counts(
        work,
        loads=moved * pieces,
        load_bytes=moved * row_bytes,
        stores=moved * pieces + flags,
        store_bytes=moved * row_bytes + flags * STATUS_ENTRY_BYTES,
        sent_bytes=moved_away * row_bytes + away * flag_bytes,
        scalar_local=looked_at + 2 * own,
        scalar_global=lookups(work, blocks, sources),
        lines=filled_by(work, filled(work, blocks, sources)),
        barriers=flags,
        turns=own,
        items=own,
    )
    loads = chunks(looked_at, ENTRIES_PER_POST)
    tables = counts(work, loads=loads, load_bytes=looked_at * ORIGIN.num_bytes, turns=loads)
    start = found_zone(work) + fresh(work, work.number("num_entries") > 0)
    start += _parts_progress(work, int(work.number("part") > 0), 1)
    if work.number("part") == 0:
        start += kept(work, "combine_kind")
    start += fresh(work, int(is_flagged)) + end(work)
    start += counts(work, dropped=lines_of_table(work.number("num_ranks")), vector=int(is_flagged))
    written = np.bincount(sources[copied], minlength=ranks)
    return Counted({"start": start, "tables": tables, "rows": rows}, written, no_ranks(work))


def combine_wait(work: Work) -> Counted:
    """For each token a look at its results' flags."""
    topk, tokens, first = work.number("topk"), work.number("num_tokens"), work.number("first_token")
    results, noted = topk + work.number("num_shared_experts"), int(work.has("waited_us"))
    active, expected = _expected(work, first, tokens)
    blocks, share = block_of(work, tokens), bounds(work, tokens)
    own, waiting = each_block(work, blocks), each_block(work, blocks[expected > 0])
    loads = chunks(np.diff(share), TABLE_ENTRIES // results)
    masks = int(work.has("active"))
    looked = masks + np.where(active, topk, 0) + np.where(expected > 0, results, 0)
    times = noted * (results + np.where(expected > 0, results + 2 * expected, 0))
    tables = counts(
        work, loads=loads * (1 + masks), load_bytes=own * (topk + masks) * WORD_BYTES, turns=loads
    )
    poll = counts(
        work,
        loads=waiting,
        load_bytes=waiting * results * STATUS_ENTRY_BYTES,
        scalar_local=each_block(work, blocks, looked + times),
        turns=waiting,
        items=own,
    )
    times_bytes = noted * own * results * WORD_BYTES
    store = counts(work, stores=noted * loads, store_bytes=times_bytes, turns=noted * loads)
    start = found_zone(work) + fresh(work, 2) + end(work)
    start += kept(work, "kept_zone") + kept(work, "numbers")
    stages = {"start": start, "tables": tables, "poll": poll, "store": store}
    return Counted(stages, no_ranks(work), no_ranks(work))


def _expected(work: Work, first: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(T,) bool whether tokens take part, and (T,) how many results come back for each."""
    ids = work.traffic.topk_idx[first : first + tokens]
    active = np.ones(tokens, bool)
    mask = work.arguments["active"]
    # Where nobody knows the mask no token is masked, as in `traffic_of`.
    if isinstance(mask, Table) and mask.values is not None:
        active = mask.values[first : first + tokens] >= 0
    expected = ((ids >= 0) & (ids < work.traffic.config.num_experts)).sum(axis=1)
    return active, np.where(active, expected + work.number("num_shared_experts"), 0)


def tokens_of_part(work: Work) -> tuple[int, int]:
    """First token and number of tokens that a combine_ready takes where all come in their order."""
    total, part, parts = (work.number(name) for name in ("num_tokens", "part", "num_parts"))
    first = total * part // parts
    return first, total * (part + 1) // parts - first


def combine_ready(work: Work) -> Counted:
    """A look at the flags of a part's tokens, and for each its number."""
    (first, tokens), topk = tokens_of_part(work), work.number("topk")
    results, noted = topk + work.number("num_shared_experts"), work.number("is_timed")
    active, expected = _expected(work, first, tokens)
    blocks, masks = block_of(work, tokens), int(work.has("active"))
    own = each_block(work, blocks)
    loads = chunks(own, READY_ENTRIES // results)
    looked = masks + np.where(active, topk, 0) + np.where(expected > 0, results, 0)
    times = noted * (results + np.where(expected > 0, results + 2 * expected, 0))
    tables = counts(
        work, loads=loads * (1 + masks), load_bytes=own * (topk + masks) * WORD_BYTES, turns=loads
    )
    poll = counts(
        work,
        loads=loads,
        load_bytes=own * results * STATUS_ENTRY_BYTES,
        # Of each token what it waits for is noted and read, and that it has been taken, and its number.
        scalar_local=each_block(work, blocks, looked + times) + 4 * own,
        turns=loads,
        items=own,
    )
    store = counts(
        work,
        stores=(2 + noted) * loads,
        store_bytes=own * (2 + noted * results) * WORD_BYTES,
        turns=loads,
    )
    part, is_last = work.number("part"), work.number("part") + 1 == work.number("num_parts")
    reads = 3 * (part > 0) + (not is_last and work.number("num_entries") > 0)
    start = found_zone(work) + fresh(work, 2) + _parts_progress(work, reads, 3)
    start += kept(work, "kept_zone") + kept(work, "numbers")
    one = first_block(work)
    start += counts(work, scalar_local=2 * one, stores=one, store_bytes=2 * WORD_BYTES * one)
    start += end(work)
    stages = {"start": start, "tables": tables, "poll": poll, "store": store}
    return Counted(stages, no_ranks(work), no_ranks(work))
