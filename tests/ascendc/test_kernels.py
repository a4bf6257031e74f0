"""The true kernels: every byte in its place, whatever the order in which things complete."""

from __future__ import annotations

import numpy as np
import pytest

from moe_triton.ascendc import REPORT_BAD_ROW, REPORT_TIMEOUT
from moe_triton.layout import STATUS_ENTRY_BYTES

from .driver import Case, Routing, World, check_reports, draw_routing
from .library import LaunchError, Library

SEEDS = 100
FEW_SEEDS = 10

CASES = {
    "two_ranks": Case(tokens=(3, 2), blocks=1, topk=1),
    "absent_ids": Case(tokens=(3, 4), blocks=2, topk=8, experts_per_rank=8, absent=0.4, weighted=False),
    "empty_rank": Case(tokens=(4, 0, 5), blocks=3, topk=3, absent=0.2, straggle=0.2),
    "skewed": Case(tokens=(2, 3, 1, 2), blocks=4, topk=2, skewed=True),
    "shared": Case(tokens=(3, 2, 4, 1), blocks=3, topk=3, shared=(1, 2)),
    "two_shared": Case(tokens=(2, 3, 2, 2), blocks=1, shared=(2, 2), row_per_result=True),
    "chunks": Case(tokens=(5, 4), blocks=2, topk=4, launches=3, row_per_result=True),
    "stragglers": Case(tokens=(3, 3), blocks=2, straggle=0.5, rounds=4),
    "dispatch_only": Case(tokens=(2, 3, 2), blocks=2, straggle=0.4, rounds=4, schedule="D"),
    "two_combines": Case(tokens=(3, 2), straggle=0.4, schedule="DCC"),
    "two_dispatches": Case(tokens=(2, 3), straggle=0.4, schedule="DDC"),
    "long_row": Case(tokens=(1, 2), blocks=1, hidden=512 * 7),
}

# More than one load of a table, one chunk of entries, one piece of a row.
LARGE_CASES = {
    "many_tokens": Case(tokens=(300, 200), blocks=1, topk=8, experts_per_rank=8, hidden=32, rounds=1),
    "many_tokens_split": Case(tokens=(300, 200), blocks=2, topk=8, experts_per_rank=8, hidden=32, rounds=1),
    "many_experts": Case(tokens=(2, 3), blocks=1, experts_per_rank=1024, hidden=32),
    "row_in_pieces": Case(tokens=(2, 1), blocks=2, hidden=48 * 1024),
}


def _by_name(cases: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", list(cases.values()), ids=list(cases))


@_by_name(CASES)
def test_strict(strict: Library, case: Case) -> None:
    for seed in range(SEEDS):
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


# Waits that end at their deadline.

SHORT_US = 20_000


@pytest.mark.parametrize("blocks", [1, 2])
def test_dispatch_wait_names_the_missing(library: Library, blocks: int) -> None:
    case = Case(tokens=(3, 2, 4), blocks=blocks, timeout_us=SHORT_US)
    world = World(library, case)
    for rank in (0, 2):
        check_reports(world.send_rows(rank, draw_routing(case, 0, 0, rank), zone=1))
    counts, report = world.wait_for_status(0, zone=1)
    for source in (0, 2):
        expected = [len(world._sent_to(0, expert, source, 0)) for expert in range(2)]
        assert counts[:, source].tolist() == expected
    assert (counts[:, 1] == -1).all()
    assert report[:, 0].tolist() == [REPORT_TIMEOUT] * blocks
    assert report[:, 2].sum() == 2
    assert report[0, 1] == 1
    # Nothing was cleared: what came still tells who did send.
    status = world.layout.dispatch_status
    for source, there in ((0, True), (1, False), (2, True)):
        for expert in range(2):
            at = status.offset(zone=1, expert=expert, source=source)
            assert world.windows[0].bytes[at : at + STATUS_ENTRY_BYTES].any() == there


def _two_ranks_dispatched(library: Library, case: Case) -> tuple[World, list[dict[str, np.ndarray]]]:
    world = World(library, case)
    for rank in range(2):
        check_reports(world.send_rows(rank, draw_routing(case, 0, 0, rank), zone=0))
    received = []
    for rank in range(2):
        counts, report = world.wait_for_status(rank, zone=0)
        check_reports(report)
        received.append(world.check_received(rank, 0, 0, counts))
    return world, received


def test_combine_wait_names_the_missing(library: Library) -> None:
    case = Case(tokens=(4, 3), blocks=1, timeout_us=SHORT_US)
    world, received = _two_ranks_dispatched(library, case)
    for rank in range(2):
        triples = received[rank]["triples"]
        missing = (triples == [0, 2, 1]).all(axis=1)
        kept = {
            "triples": np.ascontiguousarray(triples[~missing]),
            "offsets": np.array([(~missing).sum()] * len(received[rank]["offsets"]), dtype=np.int32),
        }
        rows = world._results(kept["triples"], 0)
        check_reports(world.send_results(rank, rows, kept, zone=1))
    report = world.wait_for_results(0, draw_routing(case, 0, 0, 0), zone=1)
    assert report[0, :3].tolist() == [REPORT_TIMEOUT, 2, 2]
    status = world.layout.combine_status
    left = [
        bool(world.windows[0].bytes[at : at + STATUS_ENTRY_BYTES].any())
        for token in range(4)
        for k in range(2)
        for at in [status.offset(zone=1, token=token, k=k)]
    ]
    assert left == [False] * 4 + [True, False] + [True] * 2
    check_reports(world.wait_for_results(1, draw_routing(case, 0, 0, 1), zone=1))


# Indices come from memory that peers write: none of them may become an address unchecked.

HOSTILE = [-1, -2, 2**31 - 1, -(2**31), 1000]


@pytest.mark.parametrize("blocks", [1, 3])
def test_hostile_triples_are_not_sent(library: Library, blocks: int) -> None:
    world, received = _two_ranks_dispatched(library, Case(tokens=(6, 6), topk=3, blocks=blocks))
    triples = received[1]["triples"]
    rows = world._results(triples, 0)
    bad = 0
    for column in range(3):
        for value in HOSTILE[: len(triples) // 3]:
            triples[bad, column] = value
            bad += 1
    good = triples[bad:].copy()
    before = [window.bytes.copy() for window in world.windows]
    report = world.send_results(1, rows, received[1], zone=1)
    reported = report[report[:, 0] == REPORT_BAD_ROW]
    assert reported[:, 2].sum() == bad
    assert reported[0, 1] == 0
    _assert_only_results_changed(world, before, good)


def _assert_only_results_changed(world: World, before: list[np.ndarray], triples: np.ndarray) -> None:
    for rank, window in enumerate(world.windows):
        window.check_guards()
        now, was = window.bytes.copy(), before[rank]
        for source, token, k in triples:
            if source == rank:
                at = world.layout.combine_slots.offset(zone=1, token=token, k=k)
                now[at : at + world.case.hidden * 2] = was[at : at + world.case.hidden * 2]
                at = world.layout.combine_status.offset(zone=1, token=token, k=k)
                assert now[at : at + STATUS_ENTRY_BYTES].view(np.float32).tolist() == [1.0] * 8
                now[at : at + STATUS_ENTRY_BYTES] = was[at : at + STATUS_ENTRY_BYTES]
        assert np.array_equal(now, was)


@pytest.mark.parametrize("total", [2**31 - 1, 1000, -5])
def test_hostile_totals_read_no_further_than_the_rows(library: Library, total: int) -> None:
    world, received = _two_ranks_dispatched(library, Case(tokens=(4, 4), blocks=2))
    rows = world._results(received[1]["triples"], 0)
    received[1]["offsets"][-1] = total
    before = [window.bytes.copy() for window in world.windows]
    report = world.send_results(1, rows, received[1], zone=1)
    sent = len(rows) if total > 0 else 0
    assert report[0, :3].tolist() == [REPORT_BAD_ROW, sent, total - sent if total > 0 else 1]
    _assert_only_results_changed(world, before, received[1]["triples"][:sent])


@pytest.mark.parametrize("table", ["ids", "expand_idx"])
def test_hostile_routing_is_not_sent(library: Library, table: str) -> None:
    case = Case(tokens=(6, 6), topk=3, blocks=2)
    world = World(library, case)
    true = draw_routing(case, 0, 0, 0)
    routing = Routing(ids=true.ids.copy(), weights=true.weights, rows=true.rows)
    routing.finish(case.config.num_experts)
    values = np.array([v for v in HOSTILE if table == "expand_idx" or v != -1], dtype=np.int32)
    getattr(routing, table).flat[: len(values)] = values
    before = world.windows[1].bytes.copy()
    report = world.send_rows(0, routing, zone=0, post_status=0)
    assert report[report[:, 0] == REPORT_BAD_ROW][:, 2].sum() == len(values)
    assert report[0, 1] == 0
    for window in world.windows:
        window.check_guards()
    changed = np.flatnonzero(world.windows[1].bytes != before)
    slots = world.layout.dispatch_slots
    low, high = slots.offset(zone=0, source=0), slots.offset(zone=0, source=1)
    assert ((changed >= low) & (changed < high)).all()
