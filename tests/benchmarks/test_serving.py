"""The benchmark of a prefill: what it compares, what a small run leaves, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.compare.cases import Sample
from benchmarks.compare.figures import Samples
from benchmarks.serving import commands, memory, page, peers
from benchmarks.serving.report import BOTH, Report, merged, rounds_table
from benchmarks.serving.rounds import (
    BY_HAND,
    ONE_CALL,
    OPERATORS,
    OVERLAPPING,
    RATIOS,
    Inputs,
    Link,
    Measured,
    Setting,
)
from tests.drawing import needs_matplotlib

SMALL = Setting(2, "", 3, tokens=40, round_tokens=16, hidden=64, links=(Link(), Link(1.0)))


def measured(hand: list[float], one: list[float], setting: Setting = SMALL) -> Measured:
    """The same over every link."""
    by_route = {
        before + name: of for before in ("", OVERLAPPING) for name, of in ((BY_HAND, hand), (ONE_CALL, one))
    }
    times = {name: dict.fromkeys(OPERATORS, of) for name, of in by_route.items()}
    return Measured(setting, [times, times], [times, times], [False, True])


def some_report() -> Report:
    samples = [
        Sample(route, "both", 2, 40, "", number, 0, us)
        for route, us in (("slots", 2.0), ("gloo_alltoallv", 10.0), ("memcpy_slots", 1.0))
        for number in range(3)
    ]
    of_memory = memory.Measured(memory.Setting(), memory.Memory(30, 12, 10, 20, 6))
    return Report([measured([2.0, 3.0, 4.0], [1.0, 2.0, 4.0])], samples, of_memory, {"tokens": 40})


def test_rows_of_a_round_are_those_of_its_tokens() -> None:
    inputs = [Inputs.random(rank, SMALL) for rank in range(2)]
    for of in inputs:
        assert torch.stack(of.is_of_round).sum(0).eq(1).all()
        assert [len(answers) for answers in of.of_round] == [int(mask.sum()) for mask in of.is_of_round]
    for number, tokens in enumerate((16, 16, 8)):
        assert sum(len(of.of_round[number]) for of in inputs) == 2 * tokens * 8


def test_ratios_are_taken_inside_an_iteration() -> None:
    figures = measured([2.0, 3.0, 4.0], [1.0, 2.0, 4.0]).figures(1)
    assert figures[BOTH] == figures[f"dispatch_{BOTH}"] == 1.5
    assert (figures[f"{BOTH}_low"], figures[f"{BOTH}_high"]) == (1.0, 2.0)


def test_what_is_asked_is_judged() -> None:
    said = {metric: [row[-1] for row in rounds_table(some_report(), metric).rows] for metric in RATIOS}
    # Over the link cores were shared.
    assert list(said.values()) == [[">= 0.98: met", ""], ["", ""], ["", ">= 1.1"]]


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "serving.json"
    some_report().save(path)
    assert Report.load(path) == some_report()


def test_parts_that_were_not_measured_again_are_kept() -> None:
    new = Report(rounds=[measured([1.0], [1.0])])
    both = merged(some_report(), new)
    assert both.rounds == new.rounds
    assert (both.samples, both.memory) == (some_report().samples, some_report().memory)


@needs_matplotlib
def test_the_page_has_every_part(tmp_path: Path) -> None:
    some_report().save(tmp_path / page.RUN)
    text = page.text(tmp_path, tmp_path / "figures")
    for heading in ("## Rounds by hand", "## Peers", "## Memory"):
        assert heading in text
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"serving.svg", page.RECORDS}
    assert "No full run is on record yet." in page.text(tmp_path / "nothing", tmp_path)


def test_peers_are_held_against_ours() -> None:
    samples = Samples(some_report().samples)
    figures = peers.figures(samples, samples.cases[0])
    assert (figures["vs_gloo_alltoallv"], figures["fraction_of_memcpy"]) == (5.0, 0.5)
    assert "vs_mpi_best" not in figures


@pytest.mark.long
def test_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    commands.main(["--quick", "--out", str(tmp_path), "--json", str(file)])
    records = json.loads(file.read_text())
    assert {record["case"]["figure"] for record in records} == {"rounds", "peers", "memory"}
    metrics = {BOTH, f"core_{BOTH}", "vs_gloo_alltoallv", "fraction_of_memcpy", "peak_vs_needed"}
    assert {record["metric"] for record in records} >= metrics
    assert all(record["value"] > 0 for record in records)
    commands.main(["--quick", "--only", "memory", "--out", str(tmp_path)])
    assert Report.load(tmp_path / page.RUN).rounds
