"""How rows are copied: by a table of processors, by a timing, and by the sizes of caches."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_triton.backends.cpu import row_copies
from moe_triton.backends.cpu.executable import settings_of
from moe_triton.backends.cpu.row_copies import MEASURED, CacheSizes, RowCopies, cache_sizes, fastest
from moe_triton.core.tuning import ALL_BYTES, Tuning

CACHES = CacheSizes(1 << 20, 32 << 20)
NAMES = ["library", "ahead"]


@pytest.fixture
def unknown_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(row_copies, "cpu_family", lambda: "riscv-1-2")
    monkeypatch.setattr(row_copies, "_MOST_ROWS", 2)
    monkeypatch.setattr(row_copies, "_MOST_NS", 1)
    row_copies._chosen.cache_clear()
    yield
    row_copies._chosen.cache_clear()


def test_every_way_has_a_name() -> None:
    assert row_copies._names() == NAMES
    assert {name for name, _ in MEASURED.values()} <= set(NAMES)


@pytest.mark.parametrize(
    ("speed_ups", "name", "streams"),
    [
        ({"library": 1.0, "ahead": 1.2, "stream": 1.1}, "ahead", False),
        ({"library": 1.0, "ahead": 1.2, "stream": 1.3}, "ahead", True),
        ({"library": 1.0, "ahead": 0.7, "stream": 1.2}, "library", True),
        ({"library": 1.0, "ahead": 1.02, "stream": 1.03}, "library", False),  # as good, for all that is known
        ({"library": 1.0, "ahead": 0.9, "stream": 0.0}, "library", False),  # there are no such stores
    ],
)
def test_what_is_faster_beyond_doubt_is_taken(speed_ups: dict[str, float], name: str, streams: bool) -> None:
    found = fastest(NAMES, speed_ups, CACHES)
    assert (found.name, found.streams, found.is_timed) == (name, streams, True)
    assert NAMES[found.number] == name


@pytest.mark.parametrize(
    ("streams", "caches", "ranks", "expected"),
    [
        (True, CACHES, 2, 1 << 20),
        (True, CACHES, 8, 1 << 20),
        (False, CACHES, 2, 16 << 20),
        (False, CACHES, 8, 4 << 20),
        (False, CacheSizes(1 << 20, None), 2, ALL_BYTES),
        (True, CacheSizes(None, 32 << 20), 4, 8 << 20),
        (True, CacheSizes(None, None), 4, ALL_BYTES),
    ],
)
def test_how_many_bytes_go_through_the_caches(
    streams: bool, caches: CacheSizes, ranks: int, expected: int
) -> None:
    assert RowCopies(0, "library", streams, caches, is_timed=True).cached_bytes(ranks) == expected


@pytest.mark.parametrize("family", MEASURED)
def test_a_known_processor_is_not_timed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_copies, "cpu_family", lambda: family)
    monkeypatch.setattr(row_copies, "timed", lambda *_: pytest.fail("timed"))
    row_copies._chosen.cache_clear()
    try:
        found = row_copies.chosen()
    finally:
        row_copies._chosen.cache_clear()
    assert (found.name, found.streams) == MEASURED[family]
    assert not found.is_timed


@pytest.mark.parametrize("family", ["amd-261-2", "intel-6-20", "intel-6-2070", "unknown"])
def test_a_family_whose_name_begins_alike_is_another(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_copies, "cpu_family", lambda: family)
    monkeypatch.setattr(row_copies, "timed", lambda *_: {"library": 1.0, "ahead": 2.0, "stream": 0.0})
    monkeypatch.setattr(row_copies.cache, "cache_folder", lambda: Path("/dev/null/cache"))
    row_copies._chosen.cache_clear()
    try:
        assert row_copies.chosen().is_timed
    finally:
        row_copies._chosen.cache_clear()


def test_another_processor_is_timed_once(
    unknown_processor: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MOE_TRITON_CACHE", str(tmp_path))
    with caplog.at_level(logging.INFO):
        first = row_copies.chosen()
        row_copies._chosen.cache_clear()  # as in another process
        second = row_copies.chosen()
    assert first == second
    assert first.is_timed
    said = [record.message for record in caplog.records if "times as fast as memcpy" in record.message]
    assert len(said) == 1
    (kept,) = tmp_path.glob("*.json")
    speed_ups = json.loads(kept.read_bytes()[:-32])
    assert set(speed_ups) == {*NAMES, "stream"}
    assert speed_ups["library"] == 1.0
    assert all(math.isfinite(each) and each >= 0 for each in speed_ups.values())


def test_what_is_chosen_is_what_launches_get(monkeypatch: pytest.MonkeyPatch) -> None:
    made = RowCopies(1, "ahead", True, CACHES, is_timed=True)
    monkeypatch.setattr(row_copies, "chosen", lambda: made)
    assert settings_of(Tuning(), 2)[:1] == (1 << 20,)
    assert settings_of(Tuning(), 2).copy_row == 1
    assert settings_of(Tuning(cached_bytes=7), 2).cached_bytes == 7


def described(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def test_cache_sizes_are_those_of_a_core_of_ours(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    caches = tmp_path / f"cpu{core}" / "cache"
    described(caches / "index0", level="1", size="48K", type="Data")
    described(caches / "index1", level="1", size="32K", type="Instruction")
    assert cache_sizes(tmp_path) == CacheSizes(None, None)
    described(caches / "index2", level="2", size="2048K", type="Unified")
    assert cache_sizes(tmp_path) == CacheSizes(2 << 20, 2 << 20)
    described(caches / "index3", level="3", size="260M", type="Unified")
    described(caches / "index4", level="4", type="Unified")  # without a size
    assert cache_sizes(tmp_path) == CacheSizes(2 << 20, 260 << 20)
    assert cache_sizes(tmp_path / "nowhere") == CacheSizes(None, None)


def test_without_room_for_a_timing_rows_are_copied_by_the_library(
    unknown_processor: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """More rows than an address space holds. Nothing is kept: the next process may have more room."""
    monkeypatch.setenv("MOE_TRITON_CACHE", str(tmp_path))
    monkeypatch.setattr(row_copies, "_MOST_ROWS", 1 << 40)
    monkeypatch.setattr(row_copies, "_CACHES", 1 << 50)
    found = row_copies.chosen()
    assert (found.name, found.streams) == ("library", False)
    assert not list(tmp_path.glob("*.json"))
