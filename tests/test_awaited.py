"""The ranks that a wait is for, read from the flags that it polls."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import numpy as np
import pytest

from moe_triton.backends import CAPABILITIES
from moe_triton.backends.waits import Waiting
from moe_triton.core import abi, ascendc
from moe_triton.core.config import Config
from moe_triton.core.kernel import AscendCKernel
from moe_triton.core.logs import FIELDS
from moe_triton.core.plan import Placeholder, Plan, Value, launch
from moe_triton.core.region import Region, region_of
from moe_triton.core.tuning import Tuning
from moe_triton.layout import BLOCK_BYTES, BLOCK_DATA_BYTES, FLAG_BITS, STAMP_BYTES, STATUS_ENTRY_BYTES
from moe_triton.runtime.diagnosis import MAX_PATIENCE_S, awaited_ranks, note_of, patience_s, tell_of
from moe_triton.schemes import make_scheme
from moe_triton.schemes.fullmesh.ascendc import COMBINE_WAIT, INBAND_COLLECT, INBAND_RECEIVE
from moe_triton.schemes.rank_context import RankContext

RANKS, EXPERTS, TOPK, ZONE = 4, 2, 2, 1
CONFIG = Config(RANKS, 4, 64, TOPK, EXPERTS * RANKS, relaxed=True)
SITE = make_scheme(RankContext(CONFIG, 2, 2, 1_000_000, CAPABILITIES["cpu"], None, Tuning())).context


def waiting(
    kernel: AscendCKernel,
    awaited: dict[int, tuple[int, int]],
    **values: Value | np.ndarray,
) -> Waiting:
    """A launch with these arguments, and 0 for all others."""
    given = {
        name: int(value.ctypes.data) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }
    rest = {arg.name: 0 for arg in kernel.args if arg.name not in given}
    made = launch("wait", kernel, "communication", 2, **given, **rest)
    return Waiting(Plan("dispatch", ZONE, (made,)), made, abi.words(made)[0], awaited, 5.0, lambda: True)


def raise_flag(window: np.ndarray, region: Region, **index: int) -> None:
    offset = region.offset(**index)
    window[offset : offset + 4].view(np.int32)[0] = FLAG_BITS


def entries() -> tuple[np.ndarray, Region]:
    e = STATUS_ENTRY_BYTES
    sizes = (2, EXPERTS * RANKS * e), (EXPERTS, e), (RANKS, EXPERTS * e)
    region = region_of("dispatch_status", 64, e, *sizes)
    return np.zeros(region.end, np.uint8), region


@pytest.mark.parametrize("missing", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_entries_that_are_missing(missing: tuple[int, ...]) -> None:
    window, status = entries()
    for expert, source in itertools.product(range(EXPERTS), range(RANKS)):
        if source not in missing:
            raise_flag(window, status, zone=ZONE, expert=expert, source=source)
    arguments = {"window": window, "zone": ZONE, "status": status.words()}
    blocks = {0: (0, 4), 1: (4, 4)}
    found = awaited_ranks(SITE, waiting(ascendc.DISPATCH_WAIT, blocks, **arguments))
    assert found == list(missing)
    # A block that has ended its wait has cleared what it waited for.
    window[status.offset(zone=ZONE) : status.offset(zone=ZONE, source=2)] = 0
    found = awaited_ranks(SITE, waiting(ascendc.DISPATCH_WAIT, {1: (4, 4)}, **arguments))
    assert found == [rank for rank in missing if rank >= 2]
    cell = np.array([1 - ZONE], np.int32)
    other = waiting(ascendc.DISPATCH_WAIT, blocks, **arguments, zone_at=cell)
    assert awaited_ranks(SITE, other) == [0, 1, 2, 3]


def test_blocks_that_are_in_other_phases() -> None:
    """The phase that the host is in may wait for nobody."""
    window, status = entries()
    for expert, source in itertools.product(range(EXPERTS), (0, 1)):
        raise_flag(window, status, zone=ZONE, expert=expert, source=source)
    arguments = {"window": window, "zone": ZONE, "status": status.words()}
    first, second = (waiting(ascendc.DISPATCH_WAIT, {0: (at, 4)}, **arguments) for at in (0, 4))
    assert awaited_ranks(SITE, first) == []
    beside = ((second.launch, second.words, {1: (4, 4)}),)
    assert awaited_ranks(SITE, first._replace(beside=beside)) == [2, 3]
    other = replace(ascendc.DISPATCH_WAIT, name="dispatch_offsets")
    later = first._replace(launch=replace(first.launch, kernel=other), awaited={})
    assert awaited_ranks(SITE, later) is None
    assert awaited_ranks(SITE, later._replace(beside=beside)) == [2, 3]


def test_results_that_are_missing() -> None:
    e, results = STATUS_ENTRY_BYTES, TOPK
    status = region_of("combine_status", 0, e, (2, 4 * results * e), (4, results * e), (results, e))
    window = np.zeros(status.end, np.uint8)
    # Experts 2 r and 2 r + 1 are on rank r; 99 and -1 are nobody's.
    ids = np.array([[0, 2], [4, 6], [-1, 99], [6, 1]], np.int32)
    active_index = np.array([0, 1, 2, -1], np.int32)
    for k, number in enumerate((8, 6)):  # of this round, and of one before in this zone
        at = status.offset(zone=ZONE, token=1, k=k)
        window[at : at + 4].view(np.int32)[0] = number
    arguments = {
        "window": window,
        "numbers": np.array([7, 7], np.int32),
        "topk_idx": ids,
        "topk": TOPK,
        "num_experts": CONFIG.num_experts,
        "zone": ZONE,
        "status": status.words(),
    }
    wait = COMBINE_WAIT
    assert awaited_ranks(SITE, waiting(wait, {0: (1, 3)}, **arguments)) == [0, 3]
    assert awaited_ranks(SITE, waiting(wait, {0: (0, 4)}, **arguments)) == [0, 1, 3]
    assert awaited_ranks(SITE, waiting(wait, {0: (1, 3)}, active_index=active_index, **arguments)) == [3]


def test_rows_that_are_missing() -> None:
    slot_blocks, stamp_offset = 2, BLOCK_DATA_BYTES
    slot = slot_blocks * BLOCK_BYTES
    assert stamp_offset + STAMP_BYTES <= slot_blocks * BLOCK_DATA_BYTES
    sizes = (2, RANKS * EXPERTS * 4 * slot), (RANKS, EXPERTS * 4 * slot), (EXPERTS, 4 * slot), (4, slot)
    slots = region_of("dispatch_slots", 0, slot, *sizes, rotation=1).on(2)
    window = np.zeros(slots.end, np.uint8)
    offsets = np.cumsum([1, 0, 2, 1, 0, 3, 0, 1], dtype=np.int32)  # rows of each (expert, source)

    def arrive(source: int, expert: int, index: int, blocks: int = slot_blocks) -> None:
        first = slots.offset(zone=ZONE, source=source, expert=expert, index=index)
        for block in range(blocks):
            flag = first + block * BLOCK_BYTES + BLOCK_DATA_BYTES
            window[flag : flag + 4].view(np.int32)[0] = FLAG_BITS

    arguments = {
        "window": window,
        "recv_offsets": offsets,
        "num_entries": len(offsets),
        "num_ranks": RANKS,
        "stamp_offset": stamp_offset,
        "zone": ZONE,
        "status": entries()[1].words(),
        "slots": slots.words(),
    }

    def found(first: int, count: int) -> list[int] | None:
        return awaited_ranks(SITE, waiting(INBAND_RECEIVE, {0: (first, count)}, **arguments))

    assert found(0, 8) == [0, 1, 2, 3]
    arrive(0, 0, 0)
    arrive(2, 0, 0)
    assert found(0, 4) == [2, 3]
    arrive(2, 0, 1)
    arrive(3, 0, 0, blocks=1)
    assert found(0, 4) == [3]
    arrive(1, 1, 2)
    assert found(6, 1) == []
    assert found(4, 4) == [1, 3]


def test_rows_that_are_missing_where_some_blocks_only_receive() -> None:
    """By place, which is source by source."""
    slot, stamp_offset, index = 2 * BLOCK_BYTES, BLOCK_DATA_BYTES, EXPERTS * 4 * 2 * BLOCK_BYTES
    sizes = (2, RANKS * index), (RANKS, index), (EXPERTS, 4 * slot), (4, slot)
    slots = region_of("dispatch_slots", 0, slot, *sizes, rotation=1).on(2)
    window = np.zeros(slots.end, np.uint8)
    counts = np.array([[1, 0, 2, 1], [0, 3, 0, 1]], np.int32)
    arguments = {
        "window": window,
        "recv_counts": counts,
        "num_local_experts": EXPERTS,
        "num_ranks": RANKS,
        "kept_rank": -1,
        "stamp_offset": stamp_offset,
        "zone": ZONE,
        "status": entries()[1].words(),
        "slots": slots.words(),
    }

    def found(first: int, count: int) -> list[int] | None:
        return awaited_ranks(SITE, waiting(INBAND_COLLECT, {0: (first, count)}, **arguments))

    assert found(0, 8) == [0, 1, 2, 3]
    for source, expert, row, blocks in ((0, 0, 0, 2), (2, 0, 0, 2), (3, 0, 0, 1)):
        at = slots.offset(zone=ZONE, source=source, expert=expert, index=row) + BLOCK_DATA_BYTES
        for block in range(blocks):
            window[at + block * BLOCK_BYTES :][:4].view(np.int32)[0] = FLAG_BITS
    assert found(0, 3) == []
    assert found(0, 4) == [1]
    assert found(4, 4) == [2, 3]


def test_a_tensor_parallel_exchange_is_between_two() -> None:
    context = make_scheme(RankContext(CONFIG, 2, 2, 1_000_000, CAPABILITIES["cpu"], 0, Tuning())).context
    _, status = entries()
    arguments = {"window": Placeholder("exchange_window"), "zone": ZONE, "status": status.words()}
    made = waiting(ascendc.DISPATCH_WAIT, {0: (0, 4)}, **arguments)
    assert awaited_ranks(context, made) == [1]
    notes = FakeNotes()
    note_of(context, made, {"dispatch": 12}, notes)  # type: ignore[arg-type]
    # Its number is one of the other group, and nobody is to follow it.
    assert notes.left == [("dispatch number 12, for its tensor-parallel peer", [])]


class FakeNotes:
    """Keeps what is left."""

    def __init__(self) -> None:
        self.left: list[tuple[str, list[int]]] = []

    def leave(self, call: str, ranks: list[int], _: object) -> None:
        self.left.append((call, ranks))


def test_what_is_said(caplog: pytest.LogCaptureFixture) -> None:
    notes = FakeNotes()
    window, status = entries()
    arguments = {"window": window, "zone": ZONE, "status": status.words()}
    with caplog.at_level(logging.WARNING, logger="moe_triton"):
        made = waiting(ascendc.DISPATCH_WAIT, {0: (1, 2)}, **arguments)
        tell_of(SITE, made, {"dispatch": 12})
        note_of(SITE, made, {"dispatch": 12}, notes)  # type: ignore[arg-type]
        others = waiting(ascendc.POST_STATUS, {}, status=status.words())
        tell_of(SITE, others, {"dispatch": 12})
        note_of(SITE, others, {"dispatch": 12}, notes)  # type: ignore[arg-type]
    (record,) = caplog.records
    assert notes.left == [("dispatch number 12", [0, 1])]
    said = "rank 2 of 4: dispatch number 12 (zone 1) has waited 5.0 s for rank(s) [0, 1]"
    assert record.getMessage() == said
    fields = {name: getattr(record, name) for name in FIELDS}
    assert fields == {"rank": 2, "num_ranks": 4, "group": "", "operator": "dispatch", "round": 12}


def test_nobody_is_said_to_wait_for_who_is_masked(caplog: pytest.LogCaptureFixture) -> None:
    window, status = entries()
    arguments = {"window": window, "zone": ZONE, "status": status.words()}
    made = waiting(ascendc.DISPATCH_WAIT, {0: (1, 2)}, **arguments)
    with caplog.at_level(logging.WARNING, logger="moe_triton"):
        tell_of(SITE, made, {"dispatch": 12}, masked={0})
        tell_of(SITE, made, {"dispatch": 12}, masked={0, 1})
    (said,) = caplog.messages
    assert said.endswith("has waited 5.0 s for rank(s) [1]")


def test_patience_ends_before_the_wait() -> None:
    assert patience_s(60.0) == MAX_PATIENCE_S
    assert patience_s(4.0) == 2.0
