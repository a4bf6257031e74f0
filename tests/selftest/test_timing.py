"""Lines through points, and what is made of all ranks' times."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.tools.selftest.cases import finish
from moe_triton.tools.selftest.check import Finding
from moe_triton.tools.selftest.checks.stragglers import judge_waits
from moe_triton.tools.selftest.checks.timing import over_all_ranks
from moe_triton.tools.selftest.timing import WARM_UP, fit_line, percentiles, samples_us

SIZES = (4096, 65536, 1 << 20, 1 << 24)


@given(latency=st.floats(0.1, 100), rate=st.floats(0.1, 2000))
def test_a_line_is_found_again(latency: float, rate: float) -> None:
    line = fit_line({size: latency + size / rate / 1e3 for size in SIZES})
    assert line is not None
    assert line.gb_per_s == pytest.approx(rate, rel=1e-4)
    assert line.latency_us == pytest.approx(latency, rel=1e-3)
    assert line.worst_error < 1e-5


def test_a_latency_is_never_below_zero() -> None:
    line = fit_line({size: size**1.1 for size in SIZES})
    assert line is not None
    assert line.latency_us == 0
    assert line.worst_error > 0.05


def test_times_that_do_not_grow_are_no_line() -> None:
    assert fit_line({size: 100 - i for i, size in enumerate(SIZES)}) is None


def test_percentiles_are_of_the_values() -> None:
    figures = percentiles("x", [float(n) for n in range(101)])
    assert figures == {"x_p10_us": 10, "x_p50_us": 50, "x_p90_us": 90, "x_p99_us": 99}


def finding(begins: list[float], ends: list[float]) -> Finding:
    samples = {}
    for name in ("dispatch", "combine", "both", "memcpy"):
        samples |= {f"{name} begin": begins, f"{name} end": ends}
    return Finding(figures={"bytes_sent": 8000.0}, samples=samples)


def test_a_call_is_from_the_first_rank_in_to_the_last_rank_out() -> None:
    merged = over_all_ranks([finding([0, 100], [6, 108]), finding([2, 101], [10, 105])])
    assert merged.figures["dispatch_call_p50_us"] == 9  # of 10 and 8
    assert merged.figures["memcpy_p50_us"] == 7  # of 6, 8, 8 and 4: each rank by itself
    assert merged.figures["memcpy_gb_per_s"] == pytest.approx(8 / 7)
    assert merged.figures["dispatch_call_over_memcpy"] == pytest.approx(9 / 7)


def waits(begin: list[float], end: list[float]) -> Finding:
    return Finding(samples={"begin_ms": begin, "end_ms": end})


def test_who_has_its_rows_before_they_were_sent_is_found() -> None:
    """Rank 1 is late in the second round, which begins for it at 60."""
    good = judge_waits([waits([0, 10], [55, 61]), waits([50, 60], [56, 62])])
    assert good.wrong == ()
    # rank 0 is late in round 0 and began at 0: rank 1 waited 6; round 1: rank 0 waited 51
    assert (good.figures["wait_min_ms"], good.figures["wait_max_ms"]) == (6, 51)
    bad = judge_waits([waits([0, 10], [55, 59]), waits([50, 60], [56, 62])])
    assert bad.wrong == ("rank 0 had its rows 1.0 ms before rank 1 sent any",)


def test_what_was_wrong_before_counts_more_than_times() -> None:
    broken = Finding(wrong=("lost",))
    assert judge_waits([broken, broken]).wrong == ("rank 0: lost", "rank 1: lost")
    assert over_all_ranks([broken, broken]).wrong == ("rank 0: lost", "rank 1: lost")


def test_a_buffer_whose_runs_return_early_is_asked_what_they_met() -> None:
    done: list[str] = []

    def look_back() -> None:
        done.append("buffer")
        raise TimeoutError("rank 3 did not come")

    backend = SimpleNamespace(synchronize=lambda: done.append("device"))
    with pytest.raises(TimeoutError, match="rank 3"):
        finish(SimpleNamespace(synchronize=look_back), backend)  # type: ignore[arg-type]
    assert done == ["device", "buffer"]


def test_the_first_calls_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], list(range(WARM_UP + 4))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call() -> None:  # each takes a microsecond longer than the one before
        now[0] += calls.pop(0) / 1e6

    device: Any = SimpleNamespace(synchronize=lambda: None)
    assert samples_us(call, device, 4) == pytest.approx([WARM_UP + number for number in range(4)])
