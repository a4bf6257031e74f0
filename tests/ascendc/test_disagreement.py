"""Entries with another call word: reported before what is missing, and left for the host to read."""

from __future__ import annotations

import numpy as np
import pytest

from moe_triton.core.ascendc import REPORT_MISMATCH, REPORT_TIMEOUT, REPORT_WORDS
from moe_triton.layout import CALL_WORD

from .call_words import word_of
from .case import check_reports, draw_routing
from .disagreement import DisagreeingCase, check_disagreement
from .driver import World
from .exchange import Exchange, ExchangeCase
from .library import Library

SHORT_US = 20_000
HOSTILE = [0, 2, -1, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("inband", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_all_entries_of_the_other_rank_are_reported(library: Library, blocks: int, inband: bool) -> None:
    check_disagreement(library, DisagreeingCase(tokens=(3, 2, 4), blocks=blocks, inband=inband))


@pytest.mark.parametrize("other", [1, 2])
def test_a_mismatch_comes_before_what_is_missing(library: Library, other: int) -> None:
    case = DisagreeingCase(
        tokens=(3, 2, 4), blocks=1, other=other, absent_rank=3 - other, timeout_us=SHORT_US
    )
    check_disagreement(library, case)


def test_a_mismatch_in_a_later_chunk_comes_before_what_is_missing(library: Library) -> None:
    """1024 entries are looked at together."""
    case = DisagreeingCase(tokens=(1, 1), blocks=1, experts_per_rank=600, hidden=32, timeout_us=SHORT_US)
    world = World(library, case)
    for rank in range(2):
        check_reports(world.send_rows(rank, draw_routing(case, 0, 0, rank), zone=0))
    status = world.layout.dispatch_status
    entries = world.windows[0].bytes
    first = status.offset(zone=0, expert=3, source=1)
    entries[first : first + 4] = 0
    last = status.offset(zone=0, expert=599, source=1) + 4 * CALL_WORD
    entries[last : last + 4].view(np.int32)[0] = 77
    report = world.wait_for_status(0, zone=0)[1]
    assert report[0, :3].tolist() == [REPORT_MISMATCH, 2 * 599 + 1, 1]
    assert report[0, 4:6].tolist() == [word_of("D", 0), 77]


@pytest.mark.parametrize("word", HOSTILE)
def test_whatever_stands_in_an_entry(library: Library, word: int) -> None:
    world = World(library, DisagreeingCase(tokens=(2, 2), blocks=2))
    for rank in range(2):
        check_reports(world.send_rows(rank, draw_routing(world.case, 0, 0, rank), zone=1))
    at = world.layout.dispatch_status.offset(zone=1, source=1)
    entry = world.windows[0].bytes[at : at + 32].view(np.int32)
    entry[CALL_WORD], entry[CALL_WORD + 1 :] = word, word
    report = world.wait_for_status(0, zone=1)[1]
    reported = report[report[:, 0] == REPORT_MISMATCH].tolist()
    assert [words[:6] for words in reported] == [[REPORT_MISMATCH, 1, 1, 1, word_of("D", 0), word]]
    for window in world.windows:
        window.check_guards()


def test_a_reported_mismatch_stays(library: Library) -> None:
    """Where nobody looks between runs, the waits after it end at once, and must not write over the reason."""
    world = World(library, DisagreeingCase(tokens=(2, 2), blocks=1))
    report = np.zeros((1, REPORT_WORDS), dtype=np.int32)
    report[0, :3] = REPORT_MISMATCH, 1, 2
    again = world.wait_for_status(0, zone=0, report=report)[1]
    assert again[0, :3].tolist() == [REPORT_MISMATCH, 1, 2]
    report[0, :3] = REPORT_TIMEOUT, 1, 2
    again = world.wait_for_status(0, zone=0, report=report)[1]
    assert again[0, :3].tolist() == [REPORT_TIMEOUT, 0, 4]


def test_between_two_ranks(library: Library) -> None:
    exchange = Exchange(library, ExchangeCase())
    for rank in range(2):
        load = exchange.load(rank, 0)
        check_reports(exchange.send(rank, load, 0))
        check_reports(exchange.post(rank, load, 0, number=rank))
    for rank in range(2):
        counts, report = exchange.wait(rank, 0, number=rank)
        assert counts == list(exchange.case.rows)
        assert report[0, :3].tolist() == [REPORT_MISMATCH, 1 - rank, 1]
