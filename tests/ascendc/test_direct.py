"""The direct scheme's kernels: every byte in its place, whatever the order in which things complete."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from moe_triton.core.ascendc import REPORT_BAD_ROW, REPORT_TIMEOUT

from .case import WrongResultError, check_reports, draw_routing
from .direct import DirectCase, DirectWorld
from .direct_missing import MissingCountsCase, check_missing_counts
from .direct_tables import Places, counts_of, offsets_of, places_of
from .library import Library, address
from .mutants import MUTANT_TIMEOUT_US
from .orders import orders

SHORT_US = 20_000

CASES = {
    "two_ranks": DirectCase(tokens=(3, 2), blocks=1, topk=1),
    "one_row_each": DirectCase(tokens=(1, 1), blocks=3, topk=1, experts_per_rank=1, rounds=4),
    "absent_ids": DirectCase(tokens=(3, 4), topk=8, experts_per_rank=8, absent=0.4, weighted=False),
    "special_ids": DirectCase(tokens=(3, 4), topk=4, experts_per_rank=3, special=0.4, absent=0.1),
    "masked_tokens": DirectCase(tokens=(5, 4, 3), blocks=2, inactive=0.4, shared=(1, 1)),
    "empty_rank": DirectCase(tokens=(4, 0, 5), blocks=3, topk=3, absent=0.2, straggle=0.2),
    "nothing_at_all": DirectCase(tokens=(0, 0, 0), schedule="DCC"),
    "skewed": DirectCase(tokens=(2, 3, 1, 2), blocks=4, topk=2, skewed=True),
    "scaled": DirectCase(tokens=(4, 3), topk=3, scaled=True, hidden=96, absent=0.2),
    "shared": DirectCase(tokens=(3, 2, 4, 1), blocks=3, topk=3, shared=(1, 2), inactive=0.2),
    "several_scales": DirectCase(tokens=(4, 3), topk=3, scaled=True, num_scales=9, hidden=96, absent=0.2),
    "two_shared": DirectCase(tokens=(2, 3, 2, 2), blocks=1, shared=(2, 2), row_per_result=True, scaled=True),
    "more_shared_than_routed": DirectCase(tokens=(2, 1, 2), topk=1, shared=(2, 2), scaled=True),
    "row_per_result": DirectCase(tokens=(5, 4), topk=4, row_per_result=True, scaled=True, weighted=False),
    "stragglers": DirectCase(tokens=(3, 3), straggle=0.5, rounds=4),
    "dispatch_only": DirectCase(tokens=(2, 3, 2), straggle=0.4, rounds=5, schedule="D"),
    "two_combines": DirectCase(tokens=(3, 2), straggle=0.4, rounds=3, schedule="DCC"),
    "many_combines": DirectCase(tokens=(2, 2, 2), straggle=0.4, schedule="DCCCC", in_place=1.0),
    "two_dispatches": DirectCase(tokens=(2, 3), straggle=0.4, rounds=3, schedule="DDC"),
    "copied_results": DirectCase(tokens=(2, 3, 2), straggle=0.4, in_place=0.0, rounds=3),
    "long_row": DirectCase(tokens=(1, 2), blocks=1, hidden=512 * 7),
}

# More than one load of a table, one piece of counts, one piece of a row.
LARGE_CASES = {
    "many_tokens": DirectCase(tokens=(300, 200), blocks=1, topk=8, experts_per_rank=8, hidden=32, rounds=1),
    "many_scales": DirectCase(
        tokens=(300, 200), topk=3, experts_per_rank=8, hidden=32, rounds=1, scaled=True, row_per_result=True
    ),
    "many_shared": DirectCase(tokens=(300, 200, 9), topk=2, shared=(2, 2), hidden=32, rounds=1, inactive=0.1),
    "many_experts": DirectCase(tokens=(2, 3, 1), experts_per_rank=1100, shared=(1, 1), hidden=32),
    "row_in_pieces": DirectCase(tokens=(2, 1), blocks=2, hidden=48 * 1024),
}


def _by_name(cases: dict[str, DirectCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", list(cases.values()), ids=list(cases))


@orders(15, 60)
@_by_name(CASES)
def test_strict(strict: Library, case: DirectCase, seeds: range) -> None:
    for seed in seeds:
        DirectWorld(strict, case, seed).run()


@_by_name(CASES)
def test_fast(fast: Library, case: DirectCase) -> None:
    for seed in range(10):
        DirectWorld(fast, case, seed).run()


@_by_name(LARGE_CASES)
def test_large(library: Library, case: DirectCase) -> None:
    for seed in range(3):
        DirectWorld(library, case, seed).run()


# What the waits and the zones are for: without each of them, a run must fail.
MISTAKES = {
    "rows_before_counts": DirectCase(straggle=0.5, rounds=8, schedule="D", mistake="rows before counts"),
    "reads_before_rows": DirectCase(straggle=0.5, rounds=4, schedule="D", mistake="reads before rows"),
    "pulls_before_results": DirectCase(straggle=0.5, rounds=4, mistake="pulls before results"),
    "one_zone_of_rows": DirectCase(straggle=0.5, rounds=4, schedule="D", zones=1),
    "one_zone_of_results": DirectCase(straggle=0.5, schedule="D" + 12 * "C", in_place=1.0, zones=1),
}


@_by_name(MISTAKES)
def test_each_wait_and_each_zone_is_needed(fast: Library, case: DirectCase) -> None:
    for seed in range(100):
        try:
            DirectWorld(fast, replace(case, timeout_us=MUTANT_TIMEOUT_US), seed).run()
        except WrongResultError:
            return
    pytest.fail("nothing went wrong")


# Each of the three waits, and what makes a rank's flag come: rank 1 does not.
ANNOUNCEMENTS: dict[str, Callable[[DirectWorld, int], np.ndarray]] = {
    "counts_status": lambda w, rank: w.send_counts(rank, draw_routing(w.case, 0, 0, rank), 1),
    "rows_status": lambda w, rank: w.post(rank, w.layout.rows_status, 1),
    "results_status": lambda w, rank: w.post(rank, w.layout.results_status, 1),
}


@pytest.mark.parametrize("name", list(ANNOUNCEMENTS))
def test_each_wait_names_the_missing(library: Library, name: str) -> None:
    world = DirectWorld(library, DirectCase(tokens=(2, 3, 2), timeout_us=SHORT_US))
    for rank in (0, 2):
        check_reports(ANNOUNCEMENTS[name](world, rank))
    counts, report = world.wait(0, world.layout.region(name), 1)
    assert counts == [0, -1, 0]
    assert report[0, :3].tolist() == [REPORT_TIMEOUT, 1, 1]
    world.memory[0].check_guards()


# Of each table: values, and how many of them are reported. Ids that no rank holds just stay at home.
HOSTILE = [-1, -2, 2**31 - 1, -(2**31), 1000]
TABLES = {
    "sent_ids": (HOSTILE, 0),
    "expand_idx": (HOSTILE, 5),
    "shared_ranks": ([-2, 1, 2**31 - 1, -(2**31), 7], 5),
    "shared_slots": (HOSTILE, 5),
}


def with_counts(library: Library, case: DirectCase) -> DirectWorld:
    """All ranks have sent their counts."""
    world = DirectWorld(library, case)
    for rank in range(len(case.tokens)):
        check_reports(world.send_counts(rank, draw_routing(case, 0, 0, rank), 0))
    return world


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("table", list(TABLES))
def test_what_has_no_place_is_not_sent(library: Library, table: str, blocks: int) -> None:
    case = DirectCase(tokens=(6, 6, 6), topk=3, blocks=blocks, shared=(1, 1))
    world = with_counts(library, case)
    routing, places = copy.deepcopy(draw_routing(case, 0, 0, 1)), world.places(1, 0)
    values, bad = TABLES[table]
    getattr(routing, table).flat[: len(values)] = values
    before = [window.copy() for window in world.windows]
    report = world.send_rows(1, routing, zone=0)
    reported = report[report[:, 0] == REPORT_BAD_ROW]
    assert reported[:, 2].sum() == bad
    is_shared = table.startswith("shared")
    if bad:  # results are numbered (token, k), routed ones first
        assert reported[0, 1] == (case.topk if is_shared else 0)
    changed = range(len(values))
    is_sent = [n not in changed for n in range(routing.ids.size)]
    ids = draw_routing(case, 0, 0, 1).ids
    _check_only_changed(world, before, ids, places, is_sent, is_shared)


def _check_only_changed(
    world: DirectWorld,
    before: list[np.ndarray],
    ids: np.ndarray,
    places: Places,
    is_sent: list[bool],
    is_shared: bool,
) -> None:
    """Rows and stamps at the places of what was sent from rank 1, and nothing else in any window."""
    c = world.config
    targets = []
    for n, expert in enumerate(ids.flat):
        if is_shared or is_sent[n]:
            targets.append((c.rank_of_expert(int(expert)), int(places.routed.flat[n])))
    targets += [(0, int(place)) for n, place in enumerate(places.shared.flat) if not is_shared or is_sent[n]]
    for rank, window in enumerate(world.windows):
        world.memory[rank].check_guards()
        changed = window != before[rank]
        for owner, place in targets:
            for region in (world.rows, world.layout.stamps):
                if owner == rank:
                    at = region.offset(zone=0, index=place)
                    assert changed[at : at + region.item_bytes].any()
                    changed[at : at + region.item_bytes] = False
        assert not changed.any()


def test_an_expert_beyond_the_ranks_is_reported(library: Library) -> None:
    case = DirectCase(tokens=(3, 3))
    world = with_counts(library, case)
    routing = copy.deepcopy(draw_routing(case, 0, 0, 0))
    routing.sent_ids[0, 0] = 4
    report = world.send_rows(0, routing, zone=0, num_experts=5)
    assert report[0, :3].tolist() == [REPORT_BAD_ROW, 0, 1]


def test_more_results_than_rows_are_reported(library: Library) -> None:
    world = with_counts(library, DirectCase(tokens=(3, 3), topk=3, blocks=1))
    report = world.send_rows(0, draw_routing(world.case, 0, 0, 0), zone=0, rows_per_token=2)
    assert report[0, :3].tolist() == [REPORT_BAD_ROW, 2, 3]


def counts_in(world: DirectWorld, rank: int) -> np.ndarray:
    """(W, R + M) of zone 0 of a rank's window."""
    region = world.layout.counts
    first, stride = region.offset(), region.stride("source")
    table = world.windows[rank][first : first + len(world.windows) * stride].view(np.int32)
    return table.reshape(len(world.windows), -1)[:, : world.layout.num_entries]


WILD = (-1, -(2**31), 2**31 - 1, 5, 100)


@pytest.mark.parametrize("seed", range(12))
def test_counts_of_peers_lead_to_no_other_places(library: Library, seed: int) -> None:
    """Whatever they say: what is more than a rank can have counts as so much, what is below 0 as nothing."""
    rng = np.random.default_rng(seed)
    case = DirectCase(tokens=(4, 3, 4), topk=1, experts_per_rank=8, blocks=1 + seed % 3, shared=(1, 1))
    world, rank = with_counts(library, case), 1 + seed % 2
    table, last = counts_in(world, rank), world.layout.capacity - 1
    is_wild = rng.random(table.shape) < 0.6
    table[is_wild] = rng.choice(WILD, is_wild.sum())
    counts, routing = table.copy(), draw_routing(case, 0, 0, rank)
    places = places_of(world.config, counts.clip(0, max(case.tokens)), routing, rank)
    report = world.send_rows(rank, routing, zone=0)
    beyond = int((places.routed > last).sum() + (places.shared > last).sum())
    assert report[report[:, 0] == REPORT_BAD_ROW][:, 2].sum() == beyond
    for memory in world.memory:
        memory.check_guards()
    seen = Places(places.routed.clip(-1, last), places.shared.clip(-1, last))
    addresses = np.array([address(window) for window in world.windows])
    windows = addresses - addresses[rank]
    offsets = offsets_of(world.config, routing, seen, windows, case.result_bytes)
    world.tables[rank].check(counts_of(world.config, counts, rank), offsets)


def test_places_past_the_last_row_are_reported(library: Library) -> None:
    """As they follow from counts that nobody can keep: there are more experts than a token has."""
    world = with_counts(library, DirectCase(tokens=(4, 4), topk=1, experts_per_rank=8))
    counts_in(world, 1)[:] = 4
    routing = draw_routing(world.case, 0, 0, 1)
    places = places_of(world.config, counts_in(world, 1), routing, 1)
    report = world.send_rows(1, routing, zone=0)
    bad = (places.routed >= world.layout.capacity).sum()
    assert 0 < bad == report[report[:, 0] == REPORT_BAD_ROW][:, 2].sum()
    for memory in world.memory:
        memory.check_guards()


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_nothing_is_sent_before_all_counts_are_there(library: Library, blocks: int) -> None:
    case = MissingCountsCase(tokens=(4, 4, 4), timeout_us=SHORT_US, blocks=blocks)
    for seed in range(3):
        check_missing_counts(library, case, seed)
