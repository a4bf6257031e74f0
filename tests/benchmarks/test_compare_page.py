"""The page of the documentation, and the figures of a scaling run, from samples that no run has made."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compare import commands, page, plots
from benchmarks.compare.cases import ROOT, ROUTES, Case, Sample
from benchmarks.compare.figures import (
    METRICS,
    SWEEPS,
    Samples,
    bytes_of,
    records,
    scaling_records,
    scaling_table,
    sweeps_of,
)
from benchmarks.compare.report import Files, Report
from tests.benchmarks.test_compare import NO_MPI, some_samples
from tests.drawing import needs_matplotlib


def save_runs(folder: Path) -> None:
    cases = [Case(ranks, tokens, "int8") for ranks in (2, 4) for tokens in (16, 64)]
    samples = [sample for case in cases for sample in some_samples(case)]
    found = Samples(samples)
    Files(folder).save(samples, Report.of(records(found), found, {"iterations": 3}))
    for kind in SWEEPS:
        scaled = sweep_samples(kind)
        report = Report.of(scaling_records(kind, Samples(scaled)), Samples(scaled), {})
        Files(folder, f"scaling_{kind}").save(scaled, report)


def sweep_samples(kind: str, slower: float = 1.0) -> list[Sample]:
    """Times that grow with the bytes, but for the largest size."""
    sizes = (64, 128, 256) if kind == "tokens" else (2, 4, 8)
    samples = []
    for size in sizes:
        case = Case(2, size, "") if kind == "tokens" else Case(size, 64, "")
        us = bytes_of("slots", case) / 1e3 * (slower if size == sizes[-1] else 1)
        samples += [Sample("slots", "both", case.ranks, case.tokens, "", i, 0, us) for i in range(3)]
    return samples


@needs_matplotlib
def test_the_page_shows_the_last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.reports.cores", lambda: 2)  # those that the samples are of
    save_runs(tmp_path / "runs")
    commands.page(["--out", str(tmp_path / "runs"), "--docs", str(tmp_path / "docs")])
    text = (tmp_path / "docs" / page.NAME).read_text()
    for metric in METRICS:
        assert f"### {metric.title}\n" in text
    assert "| 2 | 16 | int8 | 4.00 | 12.00 | 12.00 | >= 10 | met |" in text
    assert f"- {ROUTES['mpi_native']}: absent: {NO_MPI}" in text
    assert "### At the pace of memcpy" in text
    assert "## Where the time goes" in text
    assert "| 2 | 16 | int8 | 90 | 0 | 50 | 0 | 0 | 25 | 0 | 25 |" in text
    assert "| 4 | 16 | int8 | 90 |  |  |  |  |  |  |  |" in text
    assert "## Scaling" in text
    images = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert len(images) == 4
    for image in images:
        assert (tmp_path / "docs" / image).read_text().startswith("<?xml")
    copied = json.loads((tmp_path / "docs/benchmarks/compare.json").read_text())
    assert copied["records"]


@needs_matplotlib
def test_the_page_is_the_same_for_the_same_run(tmp_path: Path) -> None:
    save_runs(tmp_path / "runs")
    for docs in ("one", "two"):
        page.write(tmp_path / "runs", tmp_path / docs)
    for path in (tmp_path / "one").glob("**/*.*"):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()


def test_without_a_run_the_page_has_the_method_only(tmp_path: Path) -> None:
    page.write(tmp_path / "nothing", tmp_path / "docs")
    text = (tmp_path / "docs" / page.NAME).read_text()
    assert "No full run is on record yet" in text
    assert "![" not in text


def test_the_page_of_the_documentation_states_the_method_of_the_code() -> None:
    text = (ROOT / "docs" / page.NAME).read_text()
    assert text.startswith(page.METHOD), "run: python -m benchmarks.compare page"


def test_without_matplotlib_a_run_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(plots, "is_available", lambda: False)
    commands._plot(lambda: pytest.fail("there is nothing to draw with"), tmp_path)
    assert "plots: absent: matplotlib is not installed" in capsys.readouterr().out


# Scaling


@pytest.mark.parametrize(("kind", "slower", "expected"), [
    ("tokens", 1.0, "met"),
    ("tokens", 1.19, "met"),
    ("tokens", 1.21, "missed"),
    ("tokens", 0.8, "missed"),
    ("ranks", 1.0, "met"),
    ("ranks", 0.5, "met"),
    ("ranks", 1.01, "missed"),
])  # fmt: skip
def test_time_is_to_grow_with_the_bytes(kind: str, slower: float, expected: str) -> None:
    samples = Samples(sweep_samples(kind, slower))
    (sweep,) = sweeps_of(kind, samples)
    assert sweep.verdict() == expected
    assert [spread.p50 for spread in sweep.per_byte.values()] == pytest.approx([1, 1, slower])
    assert str(scaling_table(kind, samples).rows[-1][-1]) == expected


def test_figures_of_more_ranks_than_cores_are_marked() -> None:
    samples = [replace(sample, shared=sample.ranks > 2) for sample in sweep_samples("ranks")]
    for row in scaling_table("ranks", Samples(samples)).rows:
        assert [str(cell).startswith("(") for cell in row[4:8]] == [str(row[2]) != "2"] * 4
