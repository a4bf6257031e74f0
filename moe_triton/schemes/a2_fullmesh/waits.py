"""Whom a wait for blocks is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moe_triton.core.ascendc import REPORT_BAD_ROW
from moe_triton.core.records import REPORT
from moe_triton.core.region import Region
from moe_triton.layout import WORD_BYTES
from moe_triton.schemes.a2_fullmesh.ascendc import BLOCKS_RETURN, BLOCKS_SEND, BLOCKS_WAIT
from moe_triton.schemes.a2_fullmesh.layout import UNIT_WORDS, end_flag
from moe_triton.schemes.common.waits import (
    POSTS,
    Finder,
    TimedOut,
    entries_timed_out,
    int32_at,
    round_of,
    running_round,
)
from moe_triton.schemes.rank_context import RankContext

_CODE, _FIRST = REPORT.word("code"), REPORT.word("first")


def _blocks_pending(context: RankContext, arguments: dict[str, Any], ranks: range) -> Iterator[int]:
    """Yields the ranks whose blocks have not come; a header with counts out of bounds has ended its wait."""
    blocks: Region = arguments["peer_blocks"]
    number = running_round(arguments)
    flag = arguments["flag_word"]
    for rank in ranks:
        block = arguments["window"] + blocks.offset(zone=arguments["zone"], rank=rank)
        end = arguments["end_offset"]
        if not end and int32_at(block, flag) != number:
            yield rank
            continue
        rows = sum(int32_at(block, i) for i in range(arguments["num_local_experts"]))
        if end or 0 <= rows <= arguments["max_rows"]:
            at = block + (end or arguments["rows_offset"] + rows * arguments["row_step"])
            if tuple(int32_at(at + WORD_BYTES * i) for i in range(UNIT_WORDS)) != end_flag(number):
                yield rank


def _words(wait: TimedOut) -> Iterator[tuple[int, int]]:
    """Yields (rank, call word) of each header that is there."""
    arguments, window = wait.arguments, wait.tensor("window")
    number = round_of(wait)
    for rank in range(wait.context.config.num_ranks):
        first = arguments["peer_blocks"].offset(zone=wait.zone, rank=rank)
        header = window[first : first + WORD_BYTES * arguments["header_words"]].view(torch.int32)
        if int(header[arguments["flag_word"]]) == number:
            yield rank, int(header[arguments["call_word"]])


def _refused(wait: TimedOut) -> str:
    """A block whose counts are not those of its rows: whose, what they are, and what they must be."""
    arguments, window = wait.arguments, wait.tensor("window")
    rank = int(wait.report[wait.report[:, _CODE] == REPORT_BAD_ROW][0, _FIRST])
    number, most = arguments["num_local_experts"], arguments["max_count"]
    first = arguments["peer_blocks"].offset(zone=wait.zone, rank=rank)
    counts = window[first : first + WORD_BYTES * number].view(torch.int32).tolist()
    rule = f"each must be 0 to {most}, all together at most {arguments['max_rows']}"
    if arguments["expected_rows"]:
        rule = "it must be the number of rows that this rank's ids ask for"
    return f"a block of rank {rank} whose header counts {counts} rows: {rule}; nothing was read there"


FINDERS = {
    BLOCKS_WAIT.name: Finder(entries_timed_out, _blocks_pending, _words, refused=_refused),
    BLOCKS_SEND.name: POSTS,
    BLOCKS_RETURN.name: POSTS,
}
