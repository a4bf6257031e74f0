"""Waits that end at their deadline and say what is missing, and times of arrival."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from moe_triton.core.ascendc import REPORT_TIMEOUT, REPORT_WORDS
from moe_triton.layout import BLOCK_DATA_BYTES, STATUS_ENTRY_BYTES

from .case import Case, check_reports, draw_routing, results_of, sent_to
from .driver import NOTHING_EXPECTED, World
from .inband import check_outputs, places_of, receive_inband
from .library import Library
from .memory import Guarded

SHORT_US = 20_000
LATE_S = 0.2
LATE_US = 20_000
EARLIER_US = 7


def dispatched(library: Library, case: Case) -> tuple[World, list[dict[str, np.ndarray]]]:
    world = World(library, case)
    ranks = range(len(case.tokens))
    for rank in ranks:
        check_reports(world.send_rows(rank, draw_routing(case, 0, 0, rank), zone=0))
    for rank in ranks:
        counts, report = world.wait_for_status(rank, zone=0)
        check_reports(report)
        world.check_counts(rank, 0, counts)
        check_reports(world.wait_for_rows(rank, 0, counts))
    return world, [world.check_slots(rank, 0, 0) for rank in ranks]


class Later:
    """Runs something a while from now, as another rank."""

    def __init__(self, library: Library, body: Callable[[], np.ndarray]) -> None:
        self._library, self._body = library, body
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        time.sleep(LATE_S)
        self._library.seed(1)
        check_reports(self._body())


# Dispatch.


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("timed", [False, True])
def test_dispatch_wait_names_the_missing(library: Library, blocks: int, timed: bool) -> None:
    case = Case(tokens=(3, 2, 4), blocks=blocks, timeout_us=SHORT_US, timed=timed)
    world = World(library, case)
    for rank in (0, 2):
        check_reports(world.send_rows(rank, draw_routing(case, 0, 0, rank), zone=1))
    waited = world.times(6)
    counts, report = world.wait_for_status(0, zone=1, waited=waited)
    for source in (0, 2):
        assert counts[:, source].tolist() == [len(sent_to(case, 0, 0, source, 0, e)) for e in range(2)]
    assert (counts[:, 1] == -1).all()
    assert report[:, 0].tolist() == [REPORT_TIMEOUT] * blocks
    assert report[:, 2].sum() == 2
    assert report[0, 1] == 1
    if waited:
        waited.check_guards()
        times = waited.array.reshape(2, 3)
        assert not times[:, [0, 2]].any()
        assert (times[:, 1] >= SHORT_US).all()
    # Nothing was cleared: what came still tells who did send.
    status = world.layout.dispatch_status
    for source, there in ((0, True), (1, False), (2, True)):
        for expert in range(2):
            at = status.offset(zone=1, expert=expert, source=source)
            assert world.windows[0].bytes[at : at + STATUS_ENTRY_BYTES].any() == there


@pytest.mark.parametrize("blocks", [1, 2])
def test_dispatch_wait_times_the_late(library: Library, blocks: int) -> None:
    case = Case(tokens=(3, 2, 4), blocks=blocks, timed=True)
    world = World(library, case)
    for rank in (0, 2):
        check_reports(world.send_rows(rank, draw_routing(case, 0, 0, rank), zone=0))
    waited = world.times(6)
    with Later(library, lambda: world.send_rows(1, draw_routing(case, 0, 0, 1), zone=0)):
        counts, report = world.wait_for_status(0, zone=0, waited=waited)
    check_reports(report)
    world.check_counts(0, 0, counts)
    world.check_times(waited)
    assert waited is not None
    times = waited.array.reshape(2, 3)
    assert not times[:, [0, 2]].any()
    assert (times[:, 1] >= LATE_US).all()


# Rows with flags in band.

INBAND = Case(tokens=(4, 3, 4), topk=3, blocks=2, inband=True, scaled=True, timed=True, hidden=300)


def _rows_from(world: World, sources: dict[int, int]) -> np.ndarray:
    """Entries of all ranks; rows of some tokens of each source. Returns the offsets at rank 0."""
    for source, tokens in sources.items():
        routing = draw_routing(world.case, 0, 0, source)
        check_reports(world.send_rows(source, routing, zone=0, num_tokens=tokens))
    counts, report = world.wait_for_status(0, zone=0)
    check_reports(report)
    world.check_counts(0, 0, counts)
    return world.expected_rows(0, 0)["offsets"]


def _earlier(world: World) -> Guarded:
    """Times as dispatch_wait leaves them."""
    waited = world.times(6)
    assert waited is not None
    waited.array[:] = EARLIER_US
    return waited


@pytest.mark.parametrize("placed", [False, True])
def test_inband_receive_names_the_missing(library: Library, placed: bool) -> None:
    case = Case(**{**INBAND.__dict__, "timeout_us": SHORT_US, "placed": placed})
    world = World(library, case)
    # Of rank 1's three tokens only the first has come.
    offsets = _rows_from(world, {0: 4, 1: 1, 2: 4})
    waited = _earlier(world)
    outputs, report = receive_inband(world, 0, 0, offsets, waited)
    late = [len([r for r in sent_to(case, 0, 0, 1, 0, e) if r.token > 0]) for e in range(2)]
    missing = [e * 3 + 1 for e in range(2) if late[e]]
    assert missing
    reported = report[report[:, 0] == REPORT_TIMEOUT]
    assert reported[:, 2].sum() == len(missing)
    assert reported[0, 1] == missing[0]
    for n in range(6):
        assert (waited.array[n] >= SHORT_US) if n in missing else (waited.array[n] == EARLIER_US)
    # What is complete was taken out; the last flag of a row that is not tells that it had come.
    origins = outputs["out_origins"].array
    expected = world.expected_rows(0, 0)["origins"]
    others = expected[:, 0] != 1
    assert np.array_equal(origins[others], expected[others])
    places = iter(places_of(world, 0, len(expected)).tolist())
    for n in range(6):
        for index, row in enumerate(sent_to(case, 0, 0, n % 3, 0, n // 3)):
            place = next(places)
            if place >= 0 and n not in missing:
                found = outputs["out_rows"].array[place]
                assert np.array_equal(found, row.row[: len(found)])
            at = world.slots.offset(zone=0, source=n % 3, expert=n // 3, index=index)
            flag = world.windows[0].bytes[at + BLOCK_DATA_BYTES : at + BLOCK_DATA_BYTES + 32]
            if n not in missing or row.token > 0:
                assert not flag.any()


def test_inband_receive_times_the_late(library: Library) -> None:
    world = World(library, INBAND)
    offsets = _rows_from(world, {0: 4, 1: 0, 2: 4})
    waited = _earlier(world)
    routing = draw_routing(INBAND, 0, 0, 1)
    with Later(library, lambda: world.send_rows(1, routing, zone=0, post_status=0)):
        outputs, report = receive_inband(world, 0, 0, offsets, waited)
    check_reports(report)
    check_outputs(world, 0, 0, outputs)
    waited.check_guards()
    times = waited.array.reshape(2, 3)
    assert (times[:, [0, 2]] == EARLIER_US).all()
    late = np.array([len(sent_to(INBAND, 0, 0, 1, 0, e)) for e in range(2)]) > 0
    assert late.any()
    assert (times[late, 1] >= LATE_US).all()
    assert (times[~late, 1] == EARLIER_US).all()


# Combine.


@pytest.mark.parametrize("timed", [False, True])
def test_combine_wait_names_the_missing(library: Library, timed: bool) -> None:
    case = Case(tokens=(4, 3), blocks=1, timeout_us=SHORT_US, timed=timed)
    world, received = dispatched(library, case)
    for rank in range(2):
        origins = received[rank]["origins"]
        missing = (origins == [0, 2, 1]).all(axis=1) | (origins == [0, 3, 0]).all(axis=1)
        kept = {
            "origins": np.ascontiguousarray(origins[~missing]),
            "offsets": np.array([(~missing).sum()] * len(received[rank]["offsets"]), dtype=np.int32),
        }
        check_reports(world.send_results(rank, results_of(case, kept["origins"], 0), kept, zone=1))
    waited = world.times(8)
    report = world.wait_for_results(0, draw_routing(case, 0, 0, 0), 1, waited)
    assert report[0, :3].tolist() == [REPORT_TIMEOUT, 2, 2]
    status = world.layout.combine_status
    there = [
        bool((world.windows[0].bytes[at : at + STATUS_ENTRY_BYTES].view(np.int32) == 1).all())
        for token in range(4)
        for k in range(2)
        for at in [status.offset(zone=1, token=token, k=k)]
    ]
    assert there == [True] * 4 + [True, False] + [False, True]
    if waited:
        waited.check_guards()
        assert (waited.array >= SHORT_US).tolist() == [False] * 4 + [False, True] + [True, False]
        assert not waited.array[[0, 1, 2, 3, 4, 7]].any()
    check_reports(world.wait_for_results(1, draw_routing(case, 0, 0, 1), zone=1))


def test_combine_wait_times_the_late(library: Library) -> None:
    case = Case(tokens=(5, 4), topk=3, blocks=1, timed=True, absent=0.2, special=0.2)
    world, received = dispatched(library, case)
    rows = [results_of(case, received[rank]["origins"], 0) for rank in range(2)]
    check_reports(world.send_results(0, rows[0], received[0], zone=0))
    routing = draw_routing(case, 0, 0, 0)
    waited = world.times(15)
    with Later(library, lambda: world.send_results(1, rows[1], received[1], zone=0)):
        check_reports(world.wait_for_results(0, routing, 0, waited))
    world.check_results(0, 0, 0, routing)
    world.check_times(waited, of_results=True)
    assert waited is not None
    is_late = (routing.ids >= 2) & (routing.ids < 4)
    times = waited.array.reshape(5, 3)
    is_routed = (routing.ids >= 0) & (routing.ids < world.config.num_experts)
    assert not times[~is_late & is_routed].any()
    assert (times[~is_routed] == NOTHING_EXPECTED).all()
    # The first token to wait waits for all that is late; what comes meanwhile is there at once.
    first = int(is_late.any(axis=1).argmax())
    assert (times[first][is_late[first]] >= LATE_US).all()


def test_masked_tokens_entries_are_not_touched(library: Library) -> None:
    case = Case(tokens=(4, 4), inactive=0.999, timed=True)
    world = World(library, case)
    routing = draw_routing(case, 0, 0, 0)
    assert (routing.active_index < 0).all()
    at = world.layout.combine_status.offset(zone=0)
    world.windows[0].bytes[at : at + 8 * STATUS_ENTRY_BYTES] = 0xEE
    waited = world.times(8)
    check_reports(world.wait_for_results(0, routing, 0, waited))
    assert (world.windows[0].bytes[at : at + 8 * STATUS_ENTRY_BYTES] == 0xEE).all()
    assert waited is not None
    assert (waited.array == NOTHING_EXPECTED).all()


# A host that does not wait for runs to end cannot stop those that are under way behind a failed one.

AN_HOUR_US = 3_600_000_000


def reported(blocks: int) -> np.ndarray:
    report = np.zeros((blocks, REPORT_WORDS), dtype=np.int32)
    report[:, 0] = REPORT_TIMEOUT
    return report


@pytest.mark.parametrize("zone", [0, 1])
def test_dispatch_wait_does_not_wait_again(library: Library, zone: int) -> None:
    case = Case(tokens=(3, 2, 4), blocks=2, timeout_us=AN_HOUR_US)
    world = World(library, case)
    check_reports(world.send_rows(2, draw_routing(case, 0, 0, 2), zone=zone))
    counts, report = world.wait_for_status(0, zone=zone, report=reported(2))
    # It still takes what is there, and says which zone it looked at.
    assert (counts[:, :2] == -1).all()
    assert (counts[:, 2] >= 0).all()
    assert report[:, 0].tolist() == [REPORT_TIMEOUT] * 2
    assert report[:, 3].tolist() == [zone] * 2


def test_inband_receive_does_not_wait_again(library: Library) -> None:
    case = Case(**{**INBAND.__dict__, "timeout_us": AN_HOUR_US})
    world = World(library, case)
    offsets = _rows_from(world, {0: 4, 1: 1, 2: 4})
    _, report = receive_inband(world, 0, 0, offsets, _earlier(world), report=reported(case.blocks))
    assert (report[:, 0] == REPORT_TIMEOUT).all()


def test_combine_wait_does_not_wait_again(library: Library) -> None:
    case = Case(tokens=(4, 4), blocks=2, timeout_us=AN_HOUR_US)
    world = World(library, case)
    report = world.wait_for_results(0, draw_routing(case, 0, 0, 0), 1, report=reported(2))
    assert report[:, 0].tolist() == [REPORT_TIMEOUT] * 2
    assert report[:, 3].tolist() == [1] * 2
