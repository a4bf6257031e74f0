"""The benchmark of several servers: its formula, where lines cross, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.servers.figures import crossing, hidden
from benchmarks.servers.runs import Wire
from benchmarks.servers.traces import Relayed, packed, relayed
from tests.patience import seconds

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
    subprocess.run(
        [sys.executable, "-m", "benchmarks.servers", *options], cwd=ROOT, check=True, timeout=seconds(200)
    )
    found = [record for record in json.loads(path.read_text()) if record["metric"] == "time_vs_formula"]
    assert {(r["case"]["operator"], r["case"]["route"]) for r in found} == {
        (operator, route) for operator in ("dispatch", "combine") for route in ("blocks", "rows")
    }
    assert all(record["value"] >= 1 for record in found)  # no link is faster than its pace


def test_what_ran_beside_is_what_is_missing_of_the_two_one_after_the_other() -> None:
    assert hidden([5.0] * 3, [3.0] * 3, [2.0] * 3) == (1.0, 1.0, 1.0)
    assert hidden([5.0] * 3, [5.0] * 3, [2.0] * 3) == (0.0, 0.0, 0.0)
    assert hidden([5.0, 5.0, 6.0], [4.0, 5.0, 3.0], [2.0, 2.0, 3.0])[0] == 0.5


def trace_of(tmp_path: Path, *spans: tuple[str, str, int, int, float, float]) -> Path:
    """Of {operator and number, name, rank, core, begin, end}; what the link carries is named by its rank."""
    path = tmp_path / "trace.json"
    events = [
        {
            "ph": "X",
            "cat": "link" if name.startswith("to") else "other",
            "name": name,
            "pid": rank,
            "tid": core,
            "ts": begin,
            "dur": end - begin,
            "args": {"of": of, "rank": int(name[-1])} if name.startswith("to") else {"of": of},
        }
        for of, name, rank, core, begin, end in spans
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_relaying_is_hidden_where_links_carry_tokens_to_that_rank(tmp_path: Path) -> None:
    call = "dispatch #1"
    path = trace_of(
        tmp_path,
        (call, "send", 0, 0, 0, 9),
        (call, "write", 0, 0, 2, 9),  # sending is no relaying
        (call, "relay", 0, 0, 10, 50),
        (call, "poll", 0, 0, 10, 18),
        (call, "write", 0, 0, 18, 28),  # 2 of 10 beside the link
        (call, "write", 0, 0, 40, 48),
        (call, "flag", 0, 0, 48, 50),
        (call, "relay", 0, 1, 10, 30),
        (call, "write", 0, 1, 13, 23),  # 7
        (call, "to rank 0", 1, 1, 5, 12),
        (call, "to rank 0", 2, 1, 11, 20),
        (call, "to rank 1", 0, 2, 0, 100),
        ("combine #1", "to rank 0", 1, 1, 40, 50),
        (call, "relay", 1, 0, 90, 120),
        (call, "write", 1, 0, 90, 120),  # 10 of 30
        ("dispatch #0", "relay", 0, 0, 0, 5),
        ("dispatch #0", "write", 0, 0, 0, 5),
        ("dispatch #2", "relay", 0, 0, 200, 300),
    )
    first, second, third = relayed(path, "dispatch", 3)
    assert first == Relayed((5,), (0,))
    assert second == Relayed((10 + 8 + 2 + 10, 30, 0), (2 + 7, 10, 0))
    assert (first.hidden, second.hidden, third.hidden) == (0, 19 / 60, 0)
    assert relayed(path, "dispatch", 2) == [second, third]


def test_server_sums_are_hidden_where_the_own_link_carries_partial_rows(tmp_path: Path) -> None:
    call = "combine #4"
    path = trace_of(
        tmp_path,
        (call, "server sum", 0, 0, 0, 10),
        (call, "to rank 1", 0, 1, 10, 25),
        (call, "server sum", 0, 0, 20, 30),
        (call, "sum", 0, 0, 10, 20),
        (call, "server sum", 1, 0, 10, 20),  # beside another's
        (call, "to rank 0", 1, 1, 30, 40),
    )
    assert relayed(path, "combine", 1) == [Relayed((20, 10), (5, 0))]


def test_packing_is_hidden_where_the_own_link_carries_blocks(tmp_path: Path) -> None:
    call = "dispatch #2"
    path = trace_of(
        tmp_path,
        (call, "send", 0, 0, 0, 30),
        (call, "flag", 0, 0, 0, 2),
        (call, "write", 0, 0, 2, 10),
        (call, "to rank 1", 0, 1, 8, 16),  # 2 of 8
        (call, "post", 0, 0, 10, 14),
        (call, "write", 0, 0, 14, 24),  # 2 and 4 of 10
        (call, "to rank 2", 0, 1, 20, 50),
        (call, "arrange", 0, 0, 30, 40),
        (call, "write", 0, 0, 40, 44),  # of another launch
        (call, "send", 1, 0, 0, 10),
        (call, "write", 1, 0, 2, 8),  # beside another's
        ("combine #2", "send", 0, 0, 60, 70),
    )
    assert packed(path, "dispatch", 1) == [8 / 24]
    assert packed(path, "combine", 1) == [0.0]


def test_parts_are_held_against_one(tmp_path: Path) -> None:
    """A link so slow that it carries the first block while the next ones are made."""
    sizes = "--ranks", "4", "--tokens", "4", "--factors", "20", "--iterations", "2"
    found = {
        (r["case"]["operator"], r["metric"]): r["value"] for r in records_of(tmp_path, "packing", *sizes)
    }
    for operator in ("dispatch", "combine"):
        assert found[operator, "gain_of_parts"] > 0
        assert found[operator, "hidden_in_whole"] == 0
        assert 0 < found[operator, "hidden_in_parts"] <= 1


@pytest.mark.long  # six groups of processes
def test_overlap_runs(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    options = ["overlap", "--ranks", "2", "--tokens", "2", "--iterations", "2", "--json", str(path)]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.servers", *options], cwd=ROOT, check=True, timeout=seconds(200)
    )
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
    subprocess.run(command, cwd=ROOT, check=True, timeout=seconds(240))
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
    second, third = (
        [r["value"] for r in found if r["metric"] == f"hidden_in_stage_{stage}"] for stage in (2, 3)
    )
    assert second == [0] * 4
    assert len(third) == 4
    assert all(0 <= value <= 1 for value in third)
    of_own = [r["case"] for r in found if r["metric"] == "link_vs_own_relaying"]
    assert [(case["operator"], case["link_vs_relay"]) for case in of_own] == [
        (operator, factor) for factor in (1.0, 4.0) for operator in ("dispatch", "combine")
    ]
