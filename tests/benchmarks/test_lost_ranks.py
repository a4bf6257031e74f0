"""The benchmark of lost ranks: which round counts, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lost_ranks import SETTINGS, Rounds, next_whole_round
from tests.patience import seconds

ROOT = Path(__file__).resolve().parents[2]


def test_a_round_counts_that_all_others_began_after_the_strike() -> None:
    first = Rounds([(0.0, 1.0), (1.0, 3.0), (3.0, 3.5), (3.5, 4.0)], [])
    second = Rounds([(0.0, 1.0), (2.25, 3.25), (3.25, 3.5), (3.5, 4.0)], [])
    assert next_whole_round(2.0, [first, second]) == 1.5
    assert next_whole_round(2.0, [second]) == 1.25
    assert next_whole_round(0.5, [first, second]) == 2.75


@pytest.mark.long
def test_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "lost.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.lost_ranks", "--trials", "1", "--ranks", "3", "--json", str(file)],
        cwd=ROOT,
        check=True,
        timeout=seconds(300),
    )
    records = json.loads(file.read_text())
    assert {record["case"]["lost"] for record in records} == {each.name for each in SETTINGS}
    assert {record["metric"] for record in records} == {
        f"{way}_{figure}" for way in ("mask", "anew") for figure in ("median", "worst")
    }
