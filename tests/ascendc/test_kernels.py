"""The true kernels: every byte in its place, whatever the order in which things complete."""

from __future__ import annotations

import numpy as np
import pytest

from .case import Case, check_reports, draw_routing, results_of, sent_to
from .driver import World
from .library import LaunchError, Library
from .memory import GARBAGE
from .orders import orders

FEW_SEEDS = 10

CASES = {
    "two_ranks": Case(tokens=(3, 2), blocks=1, topk=1),
    "absent_ids": Case(tokens=(3, 4), blocks=2, topk=8, experts_per_rank=8, absent=0.4, weighted=False),
    "special_ids": Case(tokens=(3, 4), topk=4, experts_per_rank=3, special=0.4, absent=0.1, timed=True),
    "masked_tokens": Case(tokens=(5, 4, 3), blocks=2, inactive=0.4, shared=(1, 1), timed=True),
    "empty_rank": Case(tokens=(4, 0, 5), blocks=3, topk=3, absent=0.2, straggle=0.2),
    "skewed": Case(tokens=(2, 3, 1, 2), blocks=4, topk=2, skewed=True),
    "taken_in_parts": Case(tokens=(9, 8, 0), takes=3, blocks=2, topk=3, timed=True, straggle=0.3, hidden=64),
    "taken_by_one": Case(tokens=(5, 7), takes=4, topk=2, absent=0.3, rounds=4, blocks=1, hidden=64),
    "shared": Case(tokens=(3, 2, 4, 1), blocks=3, topk=3, shared=(1, 2), inactive=0.2),
    "two_shared": Case(tokens=(2, 3, 2, 2), blocks=1, shared=(2, 2), row_per_result=True),
    "more_shared_than_routed": Case(tokens=(2, 1, 2), topk=1, shared=(2, 2), scaled=True),
    "chunks": Case(tokens=(5, 4), blocks=2, topk=4, launches=3, row_per_result=True),
    "stragglers": Case(tokens=(3, 3), blocks=2, straggle=0.5, rounds=4, timed=True),
    "dispatch_only": Case(tokens=(2, 3, 2), blocks=2, straggle=0.4, rounds=4, schedule="D"),
    "two_combines": Case(tokens=(3, 2), straggle=0.4, schedule="DCC"),
    "two_dispatches": Case(tokens=(2, 3), straggle=0.4, schedule="DDC"),
    "long_row": Case(tokens=(1, 2), blocks=1, hidden=512 * 7),
    "full_wait": Case(tokens=(3, 2, 1), full_wait=True, schedule="DCCC", straggle=0.4, timed=True),
    "parts": Case(tokens=(7, 5, 4), topk=3, part_tokens=2, timed=True, straggle=0.3),
    "parts_one_token": Case(tokens=(3, 2), blocks=1, part_tokens=1),
    "parts_masked": Case(tokens=(5, 4, 3), inactive=0.4, shared=(1, 1), timed=True, part_tokens=2),
    "parts_uneven": Case(tokens=(4, 0, 9), blocks=3, topk=3, absent=0.2, straggle=0.2, part_tokens=2),
    "parts_two_combines": Case(tokens=(13, 10), blocks=4, part_tokens=4, schedule="DCC"),
    "parts_few_tokens": Case(tokens=(3, 9), blocks=5, special=0.4, part_tokens=3),
    "inband": Case(tokens=(3, 2), blocks=1, topk=1, inband=True),
    "inband_split": Case(tokens=(4, 3), topk=3, inband=True, scaled=True, absent=0.2, timed=True, hidden=300),
    "inband_odd_rows": Case(tokens=(2, 3, 2), inband=True, hidden=241, scaled=True, weighted=False),
    "several_scales": Case(tokens=(3, 4), topk=3, scaled=True, num_scales=9, hidden=96),
    "inband_several_scales": Case(tokens=(9, 8), topk=3, inband=True, scaled=True, num_scales=57, hidden=900),
    "inband_shared": Case(
        tokens=(3, 2, 4, 1), blocks=3, inband=True, shared=(1, 2), inactive=0.2, special=0.2, hidden=250
    ),
    "inband_chunks": Case(
        tokens=(5, 4), topk=3, inband=True, launches=3, row_per_result=True, shared=(0, 0), hidden=400
    ),
    "inband_row_per_result": Case(tokens=(2, 2, 3), inband=True, shared=(1, 1), row_per_result=True),
    "inband_only": Case(
        tokens=(2, 3, 2), inband=True, straggle=0.4, rounds=4, schedule="D", hidden=480, timed=True
    ),
    "inband_full_wait": Case(
        tokens=(2, 0, 2), inband=True, full_wait=True, schedule="DC", hidden=240 * 3 - 32
    ),
    "inband_skewed": Case(tokens=(6, 5), topk=4, inband=True, skewed=True, hidden=240 * 2 - 16, scaled=True),
    "placed_results": Case(tokens=(3, 0, 4), topk=3, placed=True, absent=0.2, schedule="DCC"),
    "inband_placed": Case(
        tokens=(4, 3, 2),
        topk=3,
        inband=True,
        placed=True,
        scaled=True,
        num_scales=9,
        shared=(1, 1),
        hidden=96,
    ),
    "inband_long_row": Case(tokens=(1, 2), blocks=1, inband=True, hidden=512 * 7, scaled=True),
}

# More than one load of a table, one chunk of entries, one piece of a row.
LARGE_CASES = {
    "many_tokens": Case(
        tokens=(300, 200), blocks=1, topk=8, experts_per_rank=8, hidden=32, rounds=1, timed=True
    ),
    "many_tokens_split": Case(tokens=(300, 200), blocks=2, topk=8, experts_per_rank=8, hidden=32, rounds=1),
    "many_shared": Case(tokens=(300, 200, 9), topk=2, shared=(2, 2), hidden=32, rounds=1, inactive=0.1),
    "many_experts": Case(tokens=(2, 3), blocks=1, experts_per_rank=1024, hidden=32, timed=True),
    "row_in_pieces": Case(tokens=(2, 1), blocks=2, hidden=48 * 1024),
    "many_tokens_in_parts": Case(
        tokens=(300, 200), topk=8, experts_per_rank=8, hidden=32, rounds=1, part_tokens=140, timed=True
    ),
    "row_in_pieces_in_parts": Case(tokens=(2, 3), blocks=2, hidden=48 * 1024, part_tokens=1),
    "inband_many_tokens": Case(
        tokens=(300, 200), topk=8, experts_per_rank=8, hidden=32, rounds=1, inband=True, timed=True
    ),
    "inband_many_experts": Case(
        tokens=(2, 3), blocks=1, experts_per_rank=1024, hidden=32, inband=True, timed=True
    ),
    "inband_row_in_pieces": Case(tokens=(2, 1), blocks=2, hidden=48 * 1024, inband=True, scaled=True),
}


def _by_name(cases: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", list(cases.values()), ids=list(cases))


@orders(12, 100)
@_by_name(CASES)
def test_strict(strict: Library, case: Case, seeds: range) -> None:
    for seed in seeds:
        World(strict, case, seed).run()


@_by_name(CASES)
def test_fast(fast: Library, case: Case) -> None:
    for seed in range(FEW_SEEDS):
        World(fast, case, seed).run()


@_by_name(LARGE_CASES)
def test_large(library: Library, case: Case) -> None:
    for seed in range(3):
        World(library, case, seed).run()


@pytest.mark.parametrize("blocks", [0, 49])
def test_as_many_blocks_as_cores(library: Library, blocks: int) -> None:
    world = World(library, Case(blocks=blocks))
    with pytest.raises(LaunchError, match="1 to 48 blocks"):
        world.send_rows(0, draw_routing(world.case, 0, 0, 0), zone=0)


def test_rows_of_the_kept_rank_are_not_sent(library: Library) -> None:
    """Status and flags are as ever; slots of the rank itself keep what they held."""
    case = Case(tokens=(5, 4), scaled=True)
    world = World(library, case)
    for rank in range(2):
        check_reports(world.send_rows(rank, draw_routing(case, 0, 0, rank), zone=0, kept_rank=rank))
    for rank in range(2):
        counts, report = world.wait_for_status(rank, zone=0)
        check_reports(report)
        world.check_counts(rank, 0, counts)
        window = world.windows[rank].bytes
        for source, expert in np.ndindex(2, case.experts_per_rank):
            for i, sent in enumerate(sent_to(case, 0, 0, source, rank, expert)):
                at = world.slots.on(rank).offset(zone=0, source=source, expert=expert, index=i)
                slot = window[at : at + case.sent_bytes]
                assert (slot == sent.row).all() == (source != rank)
                assert (slot == GARBAGE).all() == (source == rank)


def test_results_for_the_kept_rank_are_flags_only(library: Library) -> None:
    case = Case(tokens=(5, 4))
    world = World(library, case)
    slots, status = world.layout.combine_slots, world.layout.combine_status
    for rank in range(2):
        received = world.expected_rows(rank, 0)
        rows = results_of(case, received["origins"], 0) | 1
        check_reports(world.send_results(rank, rows, received, zone=0, kept_rank=rank))
    for rank in range(2):
        window, ids = world.windows[rank].bytes, draw_routing(case, 0, 0, rank).ids
        for token, k in np.ndindex(ids.shape):
            owner = case.config.rank_of_expert(int(ids[token, k]))
            at, flag = (region.offset(zone=0, token=token, k=k) for region in (slots, status))
            assert (window[at : at + case.result_bytes] == GARBAGE).all() == (owner == rank)
            assert (window[flag : flag + 32].view(np.int32) == 1).all()  # the first round
