"""When places in a window that wander get other memory, and when peers follow."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton import BufferStateError, CommunicationTimeoutError, WindowError
from moe_triton.backends.cpu import spare
from moe_triton.backends.cpu.spare import MAX_PARTS, MAX_RANKS, Spare
from moe_triton.backends.waits import Waits
from moe_triton.core.config import Config
from moe_triton.core.errors import RankMaskedError
from moe_triton.layout import PAGE_BYTES, Layout, Wandering
from moe_triton.operators.variants import CombineVariant
from moe_triton.runtime import participants
from moe_triton.runtime.participants import Participants
from moe_triton.runtime.renewals import MAX_RENEWALS, Renewals, spare_bytes
from moe_triton.schemes import layout_of
from moe_triton.schemes.direct.layout import DirectLayout
from tests.test_layout import configs

RESULTS, FLAGS = Wandering(("combine",), 0, 1 << 16, 1 << 14), Wandering(("combine",), 1 << 20, 1 << 16, 4096)
OWN, LOST = 0, 2


@dataclass
class Window:
    """One that keeps what is asked of it."""

    renewed: list[tuple[int, int, int, bool]] = field(default_factory=list)
    followed: list[tuple[int, int]] = field(default_factory=list)
    masks: dict[int, set[int]] = field(default_factory=dict)
    elsewhere: tuple[int, ...] = ()
    let_go_of: list[int] = field(default_factory=list)
    page_bytes: int = PAGE_BYTES

    why_not_let_go = ""

    def is_mapped(self, rank: int) -> bool:
        return rank not in self.elsewhere

    def let_go(self, rank: int) -> None:
        assert rank in self.elsewhere
        self.let_go_of.append(rank)

    def renew(self, number: int, at: int, num_bytes: int, keeps: bool) -> None:
        self.renewed.append((number, at, num_bytes, keeps))

    def follow(self, rank: int, number: int, at: int, num_bytes: int) -> None:
        assert rank not in self.elsewhere
        self.followed.append((rank, number))

    def say_masked(self, ranks: Collection[int]) -> None:
        self.masks[OWN] = set(ranks)

    def masked_by(self, rank: int) -> frozenset[int]:
        assert rank not in self.elsewhere
        return frozenset(self.masks.get(rank, ()))


def renewals(
    *wandering: Wandering, is_quiet: Callable[[int], bool] = lambda _: False
) -> tuple[Renewals, Window]:
    window = Window()
    return Renewals(window, wandering or (RESULTS, FLAGS), 2, OWN, 4, is_quiet), window


def test_each_zone_has_other_memory_once_its_next_run_has_ended() -> None:
    made, window = renewals()
    made.learn(frozenset({LOST}))
    made.behind("dispatch", 0)
    assert window.renewed == []
    made.behind("combine", 1)
    second = [(1, 1 << 16, 1 << 14, False), (3, (1 << 20) + (1 << 16), 4096, False)]
    assert sorted(window.renewed) == second
    made.behind("combine", 0)
    assert sorted(window.renewed[2:]) == [(0, 0, 1 << 14, False), (2, 1 << 20, 4096, False)]
    made.behind("combine", 1)
    assert len(window.renewed) == 4


@pytest.mark.parametrize("is_quiet", [False, True])
def test_who_is_masked_on_another_host_is_let_go_of_and_needs_no_other_memory(is_quiet: bool) -> None:
    made, window = renewals(is_quiet=lambda _: is_quiet)  # what it has sent may come when it has ended
    window.elsewhere = (LOST, 3)
    made.learn(frozenset({LOST}))
    for operator, zone in (("dispatch", 0), ("combine", 1), ("dispatch", 1), ("combine", 0)):
        made.let_go(operator, zone)
        assert made.unheard(operator, zone, {LOST}) == [], "nobody has to follow"
        made.behind(operator, zone)
        assert window.let_go_of == ([] if (operator, zone) == ("dispatch", 0) else [LOST])
    assert window.renewed == []


def test_ranks_of_other_hosts_follow_nobody_and_are_not_waited_for() -> None:
    made, window = renewals()
    window.elsewhere = (3,)
    made.learn(frozenset({LOST}))
    assert made.unheard("combine", 0, {LOST}) == [1]
    window.masks[1] = {LOST}
    assert made.unheard("combine", 0, {LOST}) == []
    made.let_go("combine", 0)
    made.behind("combine", 0)
    assert (len(window.renewed), window.let_go_of) == (2, [])
    made.before({1, 3})
    assert {rank for rank, _ in window.followed} == {1}


def test_one_on_each_host_is_lost() -> None:
    made, window = renewals()
    window.elsewhere = (3,)
    made.learn(frozenset({LOST, 3}))
    made.let_go("combine", 0)
    made.behind("combine", 0)
    assert (len(window.renewed), window.let_go_of) == (2, [3])


def test_another_loss_asks_for_all_of_it_again() -> None:
    made, window = renewals()
    made.learn(frozenset({LOST}))
    made.behind("combine", 0)
    made.learn(frozenset({LOST, 1}))
    made.behind("combine", 0)
    made.behind("combine", 1)
    assert len(window.renewed) == 6


@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_is_done_for_ranks_that_write_no_more(when: str) -> None:
    quiet = {LOST} if when == "before" else set()
    made, window = renewals(is_quiet=quiet.__contains__)
    made.learn(frozenset({LOST}))
    if when == "after":
        made.behind("combine", 1)
        assert len(window.renewed) == 2
        quiet.add(LOST)
    made.behind("combine", 0)
    assert len(window.renewed) == (2 if when == "after" else 0)


def test_nothing_is_done_for_ranks_that_are_un_masked() -> None:
    made, window = renewals()
    made.learn(frozenset({LOST}))
    made.learn(frozenset())
    made.behind("combine", 0)
    assert window.renewed == []


def test_an_output_keeps_its_bytes() -> None:
    made, window = renewals(Wandering(("dispatch",), 0, 8192, 4096, is_output=True))
    made.learn(frozenset({LOST}))
    made.behind("dispatch", 1)
    assert window.renewed == [(1, 8192, 4096, True)]


def test_peers_are_followed_in_every_place() -> None:
    made, window = renewals()
    made.before([1, 3])
    assert window.followed == [(rank, number) for rank in (1, 3) for number in range(4)]


def test_places_that_share_pages_take_a_rank_that_has_ended() -> None:
    quiet: set[int] = set()
    made, window = renewals(is_quiet=quiet.__contains__)
    window.page_bytes = 1 << 16
    made.learn(frozenset({LOST}))
    with pytest.raises(
        BufferStateError, match=r"rank\(s\) \[2\] are masked, and may still live.*pages of 65536 bytes"
    ):
        made.behind("combine", 0)
    quiet.add(LOST)
    made.behind("combine", 1)
    assert window.renewed == []


def test_who_is_masked_by_a_peer_raises() -> None:
    made, window = renewals()
    window.masks = {1: {LOST}, 3: {LOST, OWN}}
    made.before([1])
    with pytest.raises(RankMaskedError, match=r"rank 0 is masked by rank\(s\) \[3\], which go on without it"):
        made.before([1, 3])


def test_all_who_go_on_have_to_hear_first() -> None:
    quiet: set[int] = set()
    made, window = renewals(is_quiet=quiet.__contains__)
    assert made.unheard("combine", 0, []) == []
    made.learn(frozenset({LOST}))
    assert made.unheard("dispatch", 0, [LOST]) == []
    assert made.unheard("combine", 0, [LOST]) == [1, 3]
    window.masks = {1: {LOST}, 3: {1}}
    assert made.unheard("combine", 0, [LOST]) == [3]
    assert made.unheard("combine", 0, [LOST, 3]) == []
    quiet.add(3)
    assert made.unheard("combine", 0, [LOST]) == []
    window.masks = {}
    quiet.clear()
    made.behind("combine", 0)
    assert made.unheard("combine", 0, [LOST]) == []
    assert made.unheard("combine", 1, [LOST]) == [1, 3]


@dataclass
class Waited:
    """Participants of four ranks, of whom one is masked, and what they look at."""

    participants: Participants
    window: Window
    waits: Waits


@pytest.fixture
def waited() -> Waited:
    masks = mock.Mock(masked={LOST}, known=mock.Mock(masked={LOST}))
    made, window = renewals()
    made.learn(frozenset({LOST}))
    variant = CombineVariant(torch.bfloat16)
    executables = mock.Mock(key_of=lambda _: (variant, 0, "whole", 1))
    participants = Participants(mock.Mock(), mock.Mock(), masks, {}, executables, mock.Mock(), mock.Mock())
    participants.renewals, waits = made, Waits()
    participants._of_waits = mock.Mock(), waits, 0.05
    return Waited(participants, window, waits)


def test_a_zone_waits_for_all_to_have_heard(waited: Waited, monkeypatch: pytest.MonkeyPatch) -> None:
    def hear(_: float) -> None:
        assert waited.window.renewed == []
        waited.window.masks = {1: {LOST}, 3: {LOST}}

    monkeypatch.setattr(participants.time, "sleep", hear)
    waited.participants.behind(mock.Mock())
    assert len(waited.window.renewed) == 2


def test_ranks_that_do_not_hear_are_masked(waited: Waited) -> None:
    asked: list[list[int]] = []

    def missing(ranks: list[int], operator: str, zone: int) -> None:
        assert (operator, zone) == ("combine", 0)
        asked.append(ranks)
        waited.window.masks = {1: {LOST}, 3: {LOST}}

    waited.participants._on_lost = mock.Mock(missing_ranks=missing)
    waited.participants.behind(mock.Mock())
    assert asked == [[1, 3]]
    assert len(waited.window.renewed) == 2


def test_masks_by_hand_have_to_be_the_same_everywhere(waited: Waited) -> None:
    with pytest.raises(
        CommunicationTimeoutError,
        match=r"waiting for rank\(s\) \[1, 3\]: rank\(s\) \[2\] are masked here, and not",
    ):
        waited.participants.behind(mock.Mock())
    assert waited.window.renewed == []


def test_who_finds_itself_masked_does_not_wait_on(waited: Waited) -> None:
    waited.waits.stop(lambda: RankMaskedError("rank 0 is masked"))
    with pytest.raises(RankMaskedError, match="rank 0 is masked"):
        waited.participants.behind(mock.Mock())
    assert waited.window.renewed == []


def wandering_of(layout: Layout) -> tuple[list[range], list[range]]:
    """Bytes that wander in a window, and those of all other regions that peers write."""
    zones = range(layout.num_zones)
    places = [range(p.offset(z), p.offset(z) + p.num_bytes) for p in layout.wandering for z in zones]
    names = {"rows", "stamps"} if isinstance(layout, DirectLayout) else {"combine_slots", "combine_status"}
    others = []
    for region in layout.regions:
        if region.name in names or region.base >= layout.in_bytes or region.kind == "row_tables":
            continue
        for zone in zones:
            begin = region.offset(zone=zone)
            last = {d.name: d.extent - 1 for d in region.dims if d.name not in ("zone", region.rotated_dim)}
            others.append(range(begin, region.offset(zone=zone, **last) + region.item_bytes))
    return places, others


@given(configs, st.sampled_from(["fullmesh_v1", "fullmesh_v2", "direct"]), st.booleans())
def test_places_fill_pages_and_share_none(config: Config, scheme: str, is_of_buffer: bool) -> None:
    layout = layout_of(replace(config, scheme=scheme, is_of_buffer=is_of_buffer))
    assert layout.wandering
    assert all(each.is_whole_pages(PAGE_BYTES) for each in layout.wandering)
    places, others = wandering_of(layout)
    for place in places:
        assert not any(place.start < other.stop and other.start < place.stop for other in others)
    once = sum(map(len, places))
    assert spare_bytes(layout) == once * min(config.num_ranks - 1, MAX_RENEWALS)


WINDOW_BYTES = 16 * PAGE_BYTES
BEGIN = WINDOW_BYTES + mmap.PAGESIZE


@pytest.fixture
def window(tmp_path: Path) -> tuple[Spare, int, int]:
    """One with room for two pages more, its file and its address; mapped until the test ends."""
    room = Spare(WINDOW_BYTES, 2 * PAGE_BYTES)
    file = os.open(tmp_path / "window", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, room.file_bytes)
    mapping = mmap.mmap(file, room.file_bytes)
    kept.append(mapping)
    return room, file, ctypes.addressof(ctypes.c_char.from_buffer(mapping))


kept: list[mmap.mmap] = []


def at(base: int, offset: int) -> ctypes.c_uint8:
    return ctypes.c_uint8.from_address(base + offset)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_part_has_other_memory_at_its_address(window: tuple[Spare, int, int], keeps: bool) -> None:
    room, file, base = window
    part = 3 * PAGE_BYTES
    at(base, part).value = at(base, part - 1).value = 7
    room.renew(file, base, 5, part, PAGE_BYTES, keeps)
    assert at(base, part).value == (7 if keeps else 0)
    assert at(base, part - 1).value == 7
    at(base, part).value = 9
    assert os.pread(file, 1, part) == b"\x07"
    assert os.pread(file, 1, BEGIN) == b"\x09"


def test_a_peer_follows_and_does_so_once(
    window: tuple[Spare, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    room, file, base = window
    peer = Spare(WINDOW_BYTES, 2 * PAGE_BYTES)
    with mmap.mmap(file, room.file_bytes) as mapping:
        view = ctypes.c_char.from_buffer(mapping)
        there = ctypes.addressof(view)
        peer.follow(1, there, 5, 0, PAGE_BYTES)  # nothing has changed
        room.renew(file, base, 5, 0, PAGE_BYTES, False)
        at(base, 1).value = 3
        assert at(there, 1).value == 0
        peer.follow(1, there, 5, 0, PAGE_BYTES)
        assert at(there, 1).value == 3
        monkeypatch.setattr(spare, "_map_again", lambda *_: pytest.fail("it was mapped already"))
        peer.follow(1, there, 5, 0, PAGE_BYTES)
        del view


@pytest.mark.parametrize("word", [1, -1, BEGIN + 1, BEGIN + 2 * PAGE_BYTES, BEGIN - PAGE_BYTES, 1 << 62])
def test_what_a_peer_says_is_followed_nowhere_else(window: tuple[Spare, int, int], word: int) -> None:
    room, _, base = window
    ctypes.c_int64.from_address(base + WINDOW_BYTES + 2048).value = word
    with pytest.raises(
        WindowError, match=f"rank 1 says that a part of its window is {word} bytes into a file"
    ):
        room.follow(1, base, 0, 0, PAGE_BYTES)


def test_room_has_an_end(window: tuple[Spare, int, int]) -> None:
    room, file, base = window
    room.renew(file, base, 0, 0, 2 * PAGE_BYTES, False)
    with pytest.raises(WindowError, match="as often as there is room for"):
        room.renew(file, base, 0, 0, PAGE_BYTES, False)


def test_without_memory_the_window_stays_as_it_is(
    window: tuple[Spare, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    room, file, base = window
    at(base, 0).value = 7

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spare.os, "posix_fallocate", full)
    with pytest.raises(WindowError, match="no other 4096 bytes for a part of it: No space left"):
        room.renew(file, base, 0, 0, PAGE_BYTES, False)
    assert at(base, 0).value == 7
    assert ctypes.c_int64.from_address(base + WINDOW_BYTES + 2048).value == 0


def test_a_window_has_words_for_every_part() -> None:
    assert MAX_PARTS >= 2 * 2


def test_a_window_says_whom_its_rank_masks(window: tuple[Spare, int, int]) -> None:
    room, file, base = window
    assert room.masked_by(base) == set()
    room.renew(file, base, MAX_PARTS - 1, 0, PAGE_BYTES, False)
    room.say_masked(base, {0, 9, MAX_RANKS - 1})
    assert room.masked_by(base) == {0, 9, MAX_RANKS - 1}
    room.say_masked(base, {3})
    assert room.masked_by(base) == {3}
    assert ctypes.c_int64.from_address(base + WINDOW_BYTES + 2048 + 8 * (MAX_PARTS - 1)).value == BEGIN
