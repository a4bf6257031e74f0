"""What the benchmark of overlapped parts makes of spans, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from benchmarks.harness import median_with_interval
from benchmarks.overlap import PACK, hidden, overlap_us
from tests.patience import seconds

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("others", "covered"),
    [([], 0), ([(0, 10)], 0), ([(15, 30), (12, 17)], 8), ([(11, 12), (11, 12), (19, 40)], 2)],
)
def test_overlaps_count_once(others: list[tuple[float, float]], covered: float) -> None:
    assert overlap_us((10, 20), others) == covered


def test_the_median_lies_in_its_interval() -> None:
    assert median_with_interval([3.0] * 7) == (3.0, 3.0, 3.0)
    middle, low, high = median_with_interval([float(i) for i in range(101)])
    assert (middle, low, high) == (50.0, 41.0, 60.0)


def test_hidden_work_is_what_ran_beside_communication(tmp_path: Path) -> None:
    def span(name: str, begin: float, end: float, call: int) -> dict[str, object]:
        of = {"of": f"dispatch #{call}"}
        return {"ph": "X", "pid": 0, "tid": 0, "name": name, "ts": begin, "dur": end - begin, "args": of}

    events = [span("pack", 0, 10, 1), span("send", 10, 20, 1), span("pack", 16, 26, 1), span("pack", 0, 1, 0)]
    events.append(span("pack", 2, 9, 1))  # another block of the first one
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert hidden(path, "dispatch", PACK, 1) == (20, 4, 10)


def test_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    options = ["--iterations", "2", "--tokens", "8", "--parts", "2", "--json", str(path)]
    command = [sys.executable, "-m", "benchmarks.overlap", *options]
    subprocess.run(command, cwd=ROOT, check=True, timeout=seconds(300))
    found = {
        (r["case"]["rows"], r["case"]["operator"], r["case"]["route"], r["metric"]): r["value"]
        for r in json.loads(path.read_text())
    }
    for case in product(("int8", "plain"), ("dispatch", "combine")):
        assert found[(*case, "series", "time_vs_series")] == 1
        assert 0 <= found[(*case, "overlapped", "hidden_of_work")] <= 1
        # The same launches one after the other: nothing runs beside anything.
        assert found[(*case, "series", "hidden_of_work")] == 0
