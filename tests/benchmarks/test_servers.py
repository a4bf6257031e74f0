"""The benchmark of several servers: its formula, where lines cross, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.servers.overlap import hidden
from benchmarks.servers.posts import crossing
from benchmarks.servers.runs import Wire

ROOT = Path(__file__).resolve().parents[2]


def test_the_link_carries_a_message_while_the_next_one_is_posted() -> None:
    wire = Wire(2.0, 5.0, 1.5)
    assert wire.us(4, 8000) == pytest.approx(4 * 1.5 + 5.0)
    assert wire.us(2, 8000) == pytest.approx(1.5 + 4.0 + 5.0)
    assert wire.us(0, 8000) == pytest.approx(4.0 + 5.0)


def test_where_lines_cross() -> None:
    first, second = [(1, 10.0), (3, 12.0), (5, 14.0)], [(1, 4.0), (3, 10.0), (5, 20.0)]
    assert crossing(first, second) == pytest.approx(3.5)
    assert crossing(second, first) is None  # it starts above
    assert crossing(first, [(1, 1.0), (3, 1.0), (5, 1.0)]) is None


def test_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    options = [
        "posts",
        "--ranks",
        "2",
        "--tokens",
        "1",
        "--topk",
        "2",
        "--iterations",
        "2",
        "--json",
        str(path),
    ]
    subprocess.run([sys.executable, "-m", "benchmarks.servers", *options], cwd=ROOT, check=True, timeout=200)
    found = [record for record in json.loads(path.read_text()) if record["metric"] == "time_vs_formula"]
    assert {(r["case"]["operator"], r["case"]["route"]) for r in found} == {
        (operator, route) for operator in ("dispatch", "combine") for route in ("blocks", "rows")
    }
    assert all(record["value"] >= 1 for record in found)  # no link is faster than its pace


def test_what_ran_beside_is_what_is_missing_of_the_two_one_after_the_other() -> None:
    assert hidden([5.0] * 3, [3.0] * 3, [2.0] * 3) == (1.0, 1.0, 1.0)
    assert hidden([5.0] * 3, [5.0] * 3, [2.0] * 3) == (0.0, 0.0, 0.0)
    assert hidden([5.0, 5.0, 6.0], [4.0, 5.0, 3.0], [2.0, 2.0, 3.0])[0] == 0.5


@pytest.mark.long  # six groups of processes
def test_overlap_runs(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    options = ["overlap", "--ranks", "2", "--tokens", "2", "--iterations", "2", "--json", str(path)]
    subprocess.run([sys.executable, "-m", "benchmarks.servers", *options], cwd=ROOT, check=True, timeout=200)
    found = json.loads(path.read_text())
    metrics = {"work_beside_link", "work_beside_posts", "posts_beside_link"}
    assert {(r["case"]["operator"], r["case"]["route"], r["metric"]) for r in found} == {
        (operator, route, f"{metric}{end}")
        for operator in ("dispatch", "combine")
        for route in ("blocks", "rows")
        for metric in metrics
        for end in ("", "_low", "_high")
    }


def records_of(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """What a figure writes."""
    path = tmp_path / "records.json"
    command = [sys.executable, "-m", "benchmarks.servers", *options, "--json", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def test_a_hierarchy_is_held_against_fullmesh(tmp_path: Path) -> None:
    """Counted bytes: 8 experts on 2 of 2 servers are 4 rows to the other one, or one token."""
    sizes = "--ranks", "4", "--tokens", "4", "--limit", "2", "--iterations", "2", "--wire", "1"
    found = {
        (r["case"]["operator"], r["metric"]): r["value"] for r in records_of(tmp_path, "hierarchy", *sizes)
    }
    for operator in ("dispatch", "combine"):
        assert 3.5 < found[operator, "predicted_by_bytes"] < 4.6
        assert found[operator, "gain_over_fullmesh"] > 0
        assert found[operator, "gain_over_gloo_by_arithmetic"] > 0


def test_stages_are_held_against_each_other(tmp_path: Path) -> None:
    sizes = "--ranks", "4", "--tokens", "4", "--factors", "1", "4", "--iterations", "2"
    found = records_of(tmp_path, "stages", *sizes)
    gains = [r for r in found if r["metric"] == "gain_of_stage_3"]
    assert {(r["case"]["operator"], r["case"]["link_vs_relay"]) for r in gains} == {
        (operator, factor) for operator in ("dispatch", "combine") for factor in (1.0, 4.0)
    }
    assert all(0 <= r["value"] <= 1 for r in found if r["metric"] == "hidden")
