"""The comparison on real ranks: small, and never about how fast."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare.cases import (
    AT_TEMPERATURES,
    ROOT,
    ROUTES,
    TEMPERATURES,
    Case,
    Job,
    Sample,
    from_message,
    read_csv,
)
from benchmarks.compare.launch import BenchmarkError, Message, Mpi, run_job
from tests.patience import seconds

TOKENS, ITERATIONS = 2, 2
NO_MPI = Mpi(None, "not on this machine")
WITHOUT_MPI = [name for name in ROUTES if not name.startswith("mpi_")]


def job(kind: str, ranks: int, tokens: tuple[int, ...], routes: tuple[str, ...]) -> Job:
    return Job(kind, ranks, tokens, ("", "int8"), routes, ITERATIONS, 1.0, results="")


def samples_of(messages: list[Message]) -> list[Sample]:
    return [s for m in messages if m["kind"] == "case" for s in from_message(m["samples"])]


def check_samples(samples: list[Sample], routes: list[str]) -> None:
    """Every route has every phase, in its own place of each iteration."""
    for quantize in ("", "int8"):
        mine = [s for s in samples if s.quantize == quantize and not s.absent]
        # dispatch and combine apart: in every other iteration
        wanted = {(r, "both", i) for r in routes for i in range(ITERATIONS)}
        wanted |= {(r, phase, 0) for r in routes for phase in ("dispatch", "combine")}
        wanted |= {(r, phase, 0) for r in AT_TEMPERATURES for phase in TEMPERATURES}
        assert {(s.route, s.phase, s.iteration) for s in mine} == wanted
        assert all(s.us is not None and s.us > 0 for s in mine)
        for s in mine:
            knows = s.route in ("slots", "direct", "blocks", "nowait")
            assert (s.kernels_us is not None and 0 < s.kernels_us < math.inf) == knows
        places = [s.order for s in mine if s.iteration == 0 and s.phase != "combine"]
        assert sorted(places) == list(range(2 * len(routes) + 2 * len(AT_TEMPERATURES)))


def test_two_ranks_without_mpi() -> None:
    """All routes that need no MPI run and agree, and those that do are absent, with the reason."""
    messages: list[Message] = []
    run_job(job("compare", 2, (TOKENS,), tuple(ROUTES)), NO_MPI, messages.append)
    samples = samples_of(messages)
    check_samples(samples, WITHOUT_MPI)
    absent = {(s.route, s.case, s.absent) for s in samples if s.us is None}
    missing = [name for name in ROUTES if name.startswith("mpi_")]
    assert absent == {(n, Case(2, TOKENS, q), NO_MPI.absent) for n in missing for q in ("", "int8")}
    assert sum(m["kind"] == "iteration" for m in messages) == 2 * ITERATIONS


def test_the_command_with_mpi(tmp_path: Path) -> None:
    """Every route in one group of ranks that mpirun started; the files that the page is made of."""
    mpi = Mpi.find()
    if mpi.mpirun is None:
        pytest.skip(f"no Open MPI: {mpi.absent}")
    command = [sys.executable, "-m", "benchmarks.compare", "--ranks", "2", "--tokens", str(TOKENS)]
    command += ["--iterations", str(ITERATIONS), "--both", "--out", str(tmp_path)]
    command += ["--json", str(tmp_path / "copy.json")]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds(240)
    )
    assert ended.returncode == 0, ended.stderr
    check_samples(read_csv(tmp_path / "compare.csv"), list(ROUTES))
    report = json.loads((tmp_path / "compare.json").read_text())
    assert report == json.loads((tmp_path / "copy.json").read_text())
    assert report["absent"] == []
    metrics = {r["metric"] for r in report["records"]}
    assert {"vs_gloo_alltoallv", "vs_mpi_best", "vs_mpi_native", "vs_nowait"} <= metrics
    assert {"direct_vs_slots", "fraction_of_memcpy"} <= metrics
    assert "Medians of the ratios in each iteration" in ended.stdout


@pytest.mark.parametrize(("kind", "ranks", "tokens", "sizes"), [
    ("tokens", 2, (2, 4), [2, 4]),
    ("ranks", 4, (2,), [2, 4]),
])  # fmt: skip
def test_sweeps(kind: str, ranks: int, tokens: tuple[int, ...], sizes: list[int]) -> None:
    messages: list[Message] = []
    run_job(job(kind, ranks, tokens, ("slots", "direct")), NO_MPI, messages.append)
    samples = samples_of(messages)
    found = {(s.route, s.quantize, getattr(s, kind), s.iteration) for s in samples if s.us is not None}
    assert found == {
        (route, quantize, size, i)
        for route in ("slots", "direct")
        for quantize in ("", "int8")
        for size in sizes
        for i in range(ITERATIONS)
    }


def test_failing_ranks_are_an_error_with_their_words() -> None:
    broken = job("ranks", 2, (1, 2), ("slots",))  # that sweep has one batch size
    with pytest.raises(BenchmarkError, match="too many values to unpack"):
        run_job(broken, NO_MPI, lambda message: None)
