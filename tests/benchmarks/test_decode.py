"""The benchmark of decode sizes: what time is charged to, and that it runs. Never about how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.charges import STATES, Pair, charges_us
from benchmarks.compare.traffic import combine_traffic
from benchmarks.decode import WAYS
from tests.patience import seconds

ROOT = Path(__file__).resolve().parents[2]
FLAG = ("dispatch", "wait")
MS = 1_000_000


def pair(begin: int, end: int, work: tuple[int, int], wait: tuple[int, int], raised: int) -> Pair:
    """In ms: rows are moved, a flag is raised, the other's is waited for."""
    return Pair(
        begin * MS,
        end * MS,
        [(work[0] * MS, work[1] * MS, "rows")],
        [(wait[0] * MS, wait[1] * MS, FLAG)],
        {FLAG: raised * MS},
    )


def charged(*ranks: Pair, cores: int) -> dict[str, float]:
    """In ms, those that are not zero."""
    found = charges_us(ranks, cores)
    passed = max(r.end_ns for r in ranks) - min(r.begin_ns for r in ranks)
    assert sum(found.values()) == pytest.approx(passed / 1e3)
    return {state: us / 1e3 for state, us in found.items() if us}


def test_a_wait_is_for_the_last_flag_and_then_for_waking() -> None:
    early, late = pair(0, 10, (1, 3), (3, 9), 3), pair(2, 10, (2, 7), (7, 9), 7)
    assert early.pieces([late])[2:4] == [(3 * MS, 7 * MS, "waiting"), (7 * MS, 9 * MS, "waking")]
    assert late.pieces([early])[1] == (7 * MS, 9 * MS, "waking")  # the flag was up
    # early: 1 call, 2 rows, 4 waiting, 2 waking, 1 call; late: 2 not yet in, 5 rows, 2 waking, 1 call
    assert charged(early, late, cores=2) == {"call": 1.5, "rows": 3.5, "waking": 2, "waiting": 3}


def test_ranks_without_a_core_of_their_own_are_charged_for_what_nobody_else_uses() -> None:
    first, second = pair(0, 4, (0, 2), (2, 4), 2), pair(0, 4, (2, 4), (4, 4), 4)
    # On one core: second's call, before its rows, is at work as first's rows are, and they share it.
    assert charged(first, second, cores=1) == {"rows": 3, "call": 1}
    third = pair(0, 4, (0, 0), (0, 4), 0)
    idle = charged(first, second, third, cores=2)
    assert idle == {"rows": 2, "call": 1, "waiting": 1}
    assert idle.keys() <= set(STATES)


def test_results_that_are_copied_are_counted_as_bytes() -> None:
    sizes = {"tokens": 16, "sent": 128, "received": 120, "kept": 60, "hidden": 64}
    apart, copied = (combine_traffic(WAYS[name].scheme, **sizes) for name in ("direct", "direct copied"))
    assert copied.read - apart.read == copied.written - apart.written == 120 * 2 * 64


def test_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    options = ["--iterations", "3", "--ranks", "2", "--json", str(path)]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.decode", *options], cwd=ROOT, check=True, timeout=seconds(300)
    )
    records = json.loads(path.read_text())
    found = {(r["case"]["quantize"], r["case"]["route"], r["metric"]): r["value"] for r in records}
    for case in ((quantize, route) for quantize in ("", "int8") for route in WAYS):
        low, middle, high = (found[(*case, f"fraction_of_memcpy{end}")] for end in ("_low", "", "_high"))
        assert 0 < low <= middle <= high
        assert found[(*case, "rows_us")] > 0
        assert found[(*case, "call_us")] > 0
        assert all(found[(*case, f"{state}_us")] >= 0 for state in STATES)
        assert found[(*case, "fastest_us")] <= found[(*case, "us")]
