"""Benchmarks run and write what they promise. Not how fast: that is for the benchmarks to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RUNS = {
    "kernels": (["--hidden", "512"], {"vs_torch", "vs_memcpy"}, {"kernel"}),
    "operators": (
        ["--iterations", "2", "--ranks", "4", "--tokens", "2"],
        {"cost_vs_plain", "bytes_vs_plain"},
        {"feature", "ranks", "tokens", "against"},
    ),
    "memory": (
        ["--ranks", "2", "--tokens", "4"],
        {"window_vs_formula", "private_vs_outputs"},
        {"feature", "ranks", "tokens"},
    ),
    "trace_overhead": (
        ["--iterations", "2", "--ranks", "2", "--tokens", "2"],
        {"traced_vs_not", "core_traced_vs_not"},
        {"ranks", "tokens", "comm_alg"},
    ),
    "python_time": (["--tokens", "1"], {"python_us"}, {"call", "tokens"}),
}
# They compile kernels of sizes that no other test has: `make test-long`.
SLOW = ("kernels", "memory", "operators")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in SLOW else []) for name in RUNS]
)
def test_records(name: str, tmp_path: Path) -> None:
    options, metrics, case_keys = RUNS[name]
    out = tmp_path / "records.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", *options, "--json", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=240)
    records = json.loads(out.read_text())
    assert {record["metric"] for record in records} >= metrics
    for record in records:
        assert record.keys() == {"benchmark", "case", "metric", "value", "unit"}
        assert record["benchmark"] == name
        assert record["case"].keys() >= case_keys
        assert record["value"] > 0
