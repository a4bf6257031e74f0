"""Benchmarks run and write what they promise. Not how fast: that is for the benchmarks to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import seconds

ROOT = Path(__file__).resolve().parents[2]

RUNS = {
    "kernels": (
        ["--hidden", "512", "--iterations", "3", "--cold-iterations", "1"],
        {"vs_torch", "vs_memcpy", "vs_memcpy_low", "vs_memcpy_high"},
        {"kernel", "cold", "shared"},
    ),
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
        {"traced_vs_not", "core_traced_vs_not", "recorded_vs_not", "recorded_vs_not_high"},
        {"ranks", "tokens", "comm_alg"},
    ),
    "python_time": (["--tokens", "1"], {"python_us", "recorded_vs_not_high"}, {"call", "tokens"}),
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
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=seconds(240))
    records = json.loads(out.read_text())
    assert {record["metric"] for record in records} >= metrics
    for record in records:
        assert record.keys() == {"benchmark", "case", "metric", "value", "unit"}
        assert record["benchmark"] == name
        assert record["case"].keys() >= case_keys
        assert record["value"] > 0


WRONG = (
    ("kernels", "--iterations", "0"),
    ("decode", "--ranks", "-1"),
    ("memory", "--ranks", "1000000000"),
    ("operators", "--ranks", "3"),
    ("overlap", "--wire", "nan"),
    ("servers", "pace", "--tokens", "0"),
    ("compare", "--seconds", "0"),
    ("compare", "scaling", "--tokens-of-ranks", "0"),
    ("model_on_cpu", "--rounds", "0"),
)
# All in one process, for each would import torch: how each ends, and what it has said by then.
ONE_BY_ONE = """
import contextlib, io, json, runpy, sys
ends = []
for module, *options in json.loads(sys.argv[1]):
    sys.argv = [module, *options]
    said, code = io.StringIO(), None
    with contextlib.redirect_stderr(said):
        try:
            runpy.run_module(f"benchmarks.{module}", run_name="__main__", alter_sys=True)
        except BaseException as end:
            code = end.code if isinstance(end, SystemExit) else repr(end)
    ends.append([code, said.getvalue()])
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ends() -> dict[tuple[str, ...], tuple[object, str]]:
    """Of each wrong command."""
    command = [sys.executable, "-c", ONE_BY_ONE, json.dumps(WRONG)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=seconds(240))
    found = json.loads(done.stdout.splitlines()[-1])
    return {words: (code, said) for words, (code, said) in zip(WRONG, found, strict=True)}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_numbers_that_cannot_be_are_refused_in_a_line(
    ends: dict[tuple[str, ...], tuple[object, str]], words: tuple[str, ...]
) -> None:
    code, said = ends[words]
    assert code == 2
    assert "Traceback" not in said
    assert f"argument {words[-2]}: {words[-1]}" in said


def test_what_a_rank_of_a_benchmark_refuses_is_a_line() -> None:
    command = [sys.executable, "-m", "benchmarks.memory", "--ranks", "3", "--tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds(120), check=False)
    assert done.returncode == 1
    # Where it takes long, its progress stands before.
    assert done.stderr.splitlines()[-1].startswith("ranks 0, 1, 2: ")
    assert "Traceback" not in done.stderr
