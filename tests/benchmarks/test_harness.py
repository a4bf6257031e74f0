"""What benchmarks share: which memory is warm and which is cold, and whether a core was one's own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import harness
from moe_triton.core import cpu_caches
from moe_triton.processes import RankGroup


def cache(cpus: Path, number: int, level: int, kind: str, size: str) -> None:
    index = cpus / f"cpu{min(os.sched_getaffinity(0))}" / "cache" / f"index{number}"
    index.mkdir(parents=True)
    for name, text in (("level", level), ("type", kind), ("size", size)):
        (index / name).write_text(f"{text}\n")


def test_caches_are_as_large_as_linux_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_caches, "CPUS", tmp_path)
    assert harness.cache_bytes() == harness.ASSUMED_CACHE_BYTES
    cache(tmp_path, 0, 1, "Data", "48K")
    cache(tmp_path, 1, 1, "Instruction", "64M")
    assert harness.cache_bytes() == 48 << 10
    cache(tmp_path, 3, 3, "Unified", "32M")
    assert harness.cache_bytes() == 32 << 20


@pytest.mark.parametrize(("num_ranks", "num_bytes"), [(1, 40 << 20), (4, 10 << 20), (64, 4 << 20)])
def test_ranks_empty_the_caches_together(
    num_ranks: int, num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the last one and a quarter more, and each the second level of its own core."""
    monkeypatch.setattr(cpu_caches, "CPUS", tmp_path)
    cache(tmp_path, 2, 2, "Unified", "2048K")
    cache(tmp_path, 3, 3, "Unified", "32M")
    evict = harness.Eviction(num_ranks)
    assert evict._memory.nbytes == num_bytes
    assert evict._memory.all()  # zeros that nobody has written would all be one page
    evict()


def test_what_a_call_finds_in_the_caches_is_decided_right_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    routes: dict[str, Callable[[], object]] = {name: lambda name=name: done.append(name) for name in "ab"}
    monkeypatch.setattr(harness, "_preemptions", lambda: 0)
    times = harness.interleave(routes, 2, harness.warm, warm_up=1)
    assert "".join(done) == "ab" + 2 * "aabb"
    assert {name: (len(of.seconds), of.is_shared) for name, of in times.items()} == {
        "a": (2, False),
        "b": (2, False),
    }
    done.clear()
    harness.interleave(routes, 2, lambda _: done.append("-"), warm_up=1)
    assert "".join(done) == "ab" + 2 * "-a-b"


def test_a_call_that_loses_its_core_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times at most, and marked where most rounds end so."""
    done: list[str] = []
    lost = iter([0, 1, 1, 1])  # before and after each try: the first one loses its core, the second does not
    monkeypatch.setattr(harness, "_preemptions", lambda: next(lost))
    routes: dict[str, Callable[[], object]] = {"a": lambda: done.append("a")}
    times = harness.interleave(routes, 1, lambda _: done.append("-"), warm_up=0)
    assert ("".join(done), len(times["a"].seconds), times["a"].is_shared) == ("-a-a", 1, False)
    done.clear()
    always = iter(range(100))
    monkeypatch.setattr(harness, "_preemptions", lambda: next(always))
    times = harness.interleave(routes, 2, lambda _: done.append("-"), warm_up=0)
    assert ("".join(done), len(times["a"].seconds), times["a"].is_shared) == (6 * "-a", 2, True)


def wait_beside_others(rank: int, num_ranks: int) -> tuple[float, float]:
    """Seconds at work on one core for all ranks, and those of them in which another had the core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    begin, waited = time.perf_counter(), harness.waited_s()
    while time.perf_counter() < begin + 0.2:
        pass
    return time.perf_counter() - begin, harness.waited_s() - waited


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this Linux does not count it")
def test_ranks_that_share_a_core_wait_for_it() -> None:
    with RankGroup(2) as group:
        for took, waited in group.run(wait_beside_others):
            assert harness.SHARED_FROM * took < waited < took


def test_a_figure_of_shared_cores_is_in_parentheses() -> None:
    assert (harness.marked("0.71", is_shared=True), harness.marked("0.71", is_shared=False)) == (
        "(0.71)",
        "0.71",
    )


def test_an_interval_stands_beside_its_median() -> None:
    figures = harness.with_interval("ratio", [float(i) for i in range(101)])
    assert figures == {"ratio": 50, "ratio_low": 41, "ratio_high": 60}
    assert harness.interval_text(figures, "ratio", 1) == "41.0 - 60.0"
