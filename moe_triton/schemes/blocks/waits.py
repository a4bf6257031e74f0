"""Whom a wait for blocks is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moe_triton.core.ascendc import REPORT_TIMEOUT
from moe_triton.core.ascendc_blocks import BLOCKS_POST, BLOCKS_WAIT
from moe_triton.core.records import REPORT
from moe_triton.core.region import Region
from moe_triton.layout import WORD_BYTES
from moe_triton.schemes.blocks.layout import UNIT_WORDS, end_flag, next_number
from moe_triton.schemes.common.waits import Finder, GaveUp, entries_gave_up, int32_at
from moe_triton.schemes.site import Site

_CODE, _FIRST = REPORT.word("code"), REPORT.word("first")


def _blocks_go_on(site: Site, arguments: dict[str, Any], ranks: range) -> Iterator[int]:
    """Of a header whose counts are out of bounds it says nothing: its wait is over."""
    blocks: Region = arguments["peer_blocks"]
    number = next_number(int32_at(arguments["numbers"], arguments["zone"]))
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


def _words(wait: GaveUp) -> Iterator[tuple[int, int]]:
    """Of the headers that are there."""
    arguments, window = wait.arguments, wait.tensor("window")
    number = next_number(int(wait.tensor("numbers")[wait.zone]))
    for rank in range(wait.site.config.num_ranks):
        first = arguments["peer_blocks"].offset(zone=wait.zone, rank=rank)
        header = window[first : first + WORD_BYTES * arguments["header_words"]].view(torch.int32)
        if int(header[arguments["flag_word"]]) == number:
            yield rank, int(header[arguments["call_word"]])


def _posts_gave_up(wait: GaveUp) -> list[int]:
    """The ranks whose queues were full when a block's deadline passed: the first of each block."""
    given_up = wait.report[wait.report[:, _CODE] == REPORT_TIMEOUT]
    return sorted(int(words[_FIRST]) for words in given_up)


def _posts_go_on(site: Site, arguments: dict[str, Any], ranks: range) -> Iterator[int]:
    """A block that waits for room in a queue waits for its rank."""
    return iter(ranks)


FINDERS = {
    BLOCKS_WAIT.name: Finder(entries_gave_up, _blocks_go_on, _words),
    BLOCKS_POST.name: Finder(_posts_gave_up, _posts_go_on),
}
