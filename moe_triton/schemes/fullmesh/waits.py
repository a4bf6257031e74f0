"""Whom the waits for single results and for rows with flags of their own are for."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from moe_triton.core.ascendc import REPORT_TIMEOUT
from moe_triton.core.config import Config
from moe_triton.core.plan import Part
from moe_triton.core.region import Region
from moe_triton.layout import BLOCK_BYTES, BLOCK_DATA_BYTES, FLAG_BITS, STAMP, STAMP_BYTES, WORD_BYTES
from moe_triton.schemes.common.waits import (
    POSTS,
    Finder,
    TimedOut,
    entries_timed_out,
    int32_at,
    round_of,
    running_round,
)
from moe_triton.schemes.fullmesh.ascendc import (
    COMBINE_POST,
    COMBINE_READY,
    COMBINE_WAIT,
    DISPATCH_POST,
    DISPATCH_RECEIVE,
    DISPATCH_ROWS,
    DISPATCH_TAKE,
    INBAND_COLLECT,
    INBAND_RECEIVE,
)
from moe_triton.schemes.rank_context import RankContext


def _late(wait: TimedOut) -> Iterator[int]:
    """The numbers that blocks did not get past."""
    for code, first, count in wait.report[:, :3].tolist():
        if code == REPORT_TIMEOUT:
            yield from range(first, first + count)


def _num_tokens(wait: TimedOut) -> int:
    tokens = wait.memory["num_tokens"]
    assert isinstance(tokens, int)
    return tokens


def _owners_missing(wait: TimedOut, tokens: Iterable[int]) -> list[int]:
    """Owners of these tokens' results without this round's number in their entries."""
    context, status = wait.context, wait.arguments["status"]
    ids = wait.tensor("topk_idx").view(-1, context.config.num_topk)[: _num_tokens(wait)]
    window, number, missing = wait.tensor("window"), round_of(wait), set()
    for token in tokens:
        for k, owner in _owners(context.config, context.rank, ids[token].tolist()):
            offset = status.offset(zone=wait.zone, token=token, k=k)
            if int(window[offset : offset + 4].view(torch.int32)) != number:
                missing.add(owner)
    return sorted(missing)


def _results_timed_out(wait: TimedOut) -> list[int]:
    """Of the parts that come after the one that was waited for nothing has been taken yet."""
    tokens, part = _num_tokens(wait), (wait.arguments["first_token"], wait.arguments["num_tokens"])
    end = sum(value.of(tokens) for value in part) if isinstance(part[0], Part) else tokens
    return _owners_missing(wait, itertools.chain(_late(wait), range(end, tokens)))


def _results_pending(context: RankContext, arguments: dict[str, Any], tokens: range) -> Iterator[int]:
    status: Region = arguments["status"]
    topk, number = arguments["topk"], running_round(arguments)
    for token in tokens:
        if arguments["active_index"] and int32_at(arguments["active_index"], token) < 0:
            continue
        ids = [int32_at(arguments["topk_idx"], token * topk + k) for k in range(topk)]
        for k, owner in _owners(context.config, context.rank, ids):
            offset = status.offset(zone=arguments["zone"], token=token, k=k)
            if int32_at(arguments["window"] + offset) != number:
                yield owner


def _ready_timed_out(wait: TimedOut) -> list[int]:
    """A token that has been taken waits for nothing any more."""
    pending = wait.tensor("pending")[: _num_tokens(wait)]
    return _owners_missing(wait, (pending > 0).nonzero().flatten().tolist())


def _ready_pending(context: RankContext, arguments: dict[str, Any], tokens: range) -> Iterator[int]:
    for token in tokens:
        low, high = (int32_at(arguments["pending"], 2 * token + word) for word in range(2))
        if (low or high) and high >= 0:
            yield from _results_pending(context, arguments, range(token, token + 1))


def _owners(config: Config, rank: int, ids: list[int]) -> list[tuple[int, int]]:
    """(k, rank that computes it) of each result that a token waits for."""
    routed = [
        (k, config.rank_of_expert(expert)) for k, expert in enumerate(ids) if 0 <= expert < config.num_experts
    ]
    shared = [
        (config.num_topk + s, config.rank_of_shared_expert(s, rank)) for s in range(config.num_shared_experts)
    ]
    return routed + shared


def _rows_timed_out(wait: TimedOut) -> list[int]:
    """An entry (expert, rank) without rows waits for nobody."""
    counts = wait.memory["recv_counts"]
    assert isinstance(counts, torch.Tensor)
    return sorted({entry % wait.context.config.num_ranks for entry in _late(wait) if int(counts[entry]) > 0})


def _rows_pending(context: RankContext, arguments: dict[str, Any], rows: range) -> Iterator[int]:
    """In the order in which they are received."""
    slots: Region = arguments["slots"]
    num_ranks = arguments["num_ranks"]
    ends = [int32_at(arguments["recv_offsets"], entry) for entry in range(arguments["num_entries"])]
    for row in rows:
        entry = bisect.bisect_right(ends, row)
        first = ends[entry - 1] if entry else 0
        expert, source = divmod(entry, num_ranks)
        slot = slots.offset(zone=arguments["zone"], source=source, expert=expert, index=row - first)
        if not _has_all_blocks(arguments, slot):
            yield source


def _has_all_blocks(arguments: dict[str, Any], slot: int) -> bool:
    """Whether the flags of a row in band are all there."""
    flags = arguments["window"] + slot + BLOCK_DATA_BYTES
    blocks = range(-(-(arguments["stamp_offset"] + STAMP_BYTES) // BLOCK_DATA_BYTES))
    return all(int32_at(flags + block * BLOCK_BYTES) == FLAG_BITS for block in blocks)


def _has_flag(arguments: dict[str, Any], slot: int) -> bool:
    """Whether the flag in a row's stamp is there."""
    flag = arguments["stamp_offset"] + STAMP.word("flag") * WORD_BYTES
    return int32_at(arguments["window"] + slot + flag) == FLAG_BITS


def _flagged_rows_pending(
    is_there: Callable[[dict[str, Any], int], bool],
    context: RankContext,
    arguments: dict[str, Any],
    places: range,
) -> Iterator[int]:
    """By source, then by expert. Counts that are out of bounds are clamped as the kernel does."""
    slots: Region = arguments["slots"]
    for place in places:
        source, expert = divmod(place, arguments["num_local_experts"])
        entry = expert * arguments["num_ranks"] + source
        count = 0 if source == arguments["kept_rank"] else int32_at(arguments["recv_counts"], entry)
        taken = int32_at(arguments["rows_taken"], place) if "rows_taken" in arguments else 0
        for index in range(taken, min(count, slots.extent("index"))):
            slot = slots.offset(zone=arguments["zone"], source=source, expert=expert, index=index)
            if not is_there(arguments, slot):
                yield source


_stamped_rows_pending = partial(_flagged_rows_pending, _has_flag)

FINDERS = {
    DISPATCH_ROWS.name: Finder(entries_timed_out, _stamped_rows_pending),
    # The flags of rows that have been taken are gone: it says of one entry only that it waits for it.
    DISPATCH_RECEIVE.name: Finder(entries_timed_out, _stamped_rows_pending),
    DISPATCH_TAKE.name: Finder(entries_timed_out, _stamped_rows_pending),
    INBAND_COLLECT.name: Finder(entries_timed_out, partial(_flagged_rows_pending, _has_all_blocks)),
    DISPATCH_POST.name: POSTS,
    COMBINE_POST.name: POSTS,
    COMBINE_WAIT.name: Finder(_results_timed_out, _results_pending),
    COMBINE_READY.name: Finder(_ready_timed_out, _ready_pending),
    INBAND_RECEIVE.name: Finder(_rows_timed_out, _rows_pending),
}
