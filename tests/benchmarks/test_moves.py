"""The benchmark of moves: which steps it compares, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.moves import SETTINGS, Found, Setting, placements, step_ratios
from tests.patience import seconds

ROOT = Path(__file__).resolve().parents[2]


def test_only_steps_that_all_ranks_can_compare_are_compared() -> None:
    spans = [(0.0, 2.0), (10.0, 11.0), (20.0, 21.0), (30.0, 33.0), (40.0, 41.0), (50.0, 51.0)]
    with_copy = [True, False, False, True, True, False]
    first = Found(spans, [(kind, True) for kind in with_copy])
    second = Found(spans, [(kind, n < 4) for n, kind in enumerate(with_copy)])
    assert step_ratios([first, second]) == [2.0, 3.0]
    assert step_ratios([first, first]) == [2.0, 3.0, 1.0]


def test_placements_exchange_experts_between_neighbours() -> None:
    setting = Setting("allocated", "layer", 3, ranks=3)
    made = placements(setting)
    assert len(made) == 4
    for old, new in pairwise(made):
        changed = (old.phy2log != new.phy2log).view(setting.layers, 3, -1).sum(2)
        assert (changed > 0).all()
        assert changed.sum() <= 2 * 2 * 2 * setting.layers


@pytest.mark.long
def test_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "moves.json"
    options = ["--moves", "1", "--hidden", "1024", "--intermediate", "256", "--json", str(file)]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.moves", *options], cwd=ROOT, check=True, timeout=seconds(300)
    )
    records = json.loads(file.read_text())
    assert {(r["case"]["held"], r["case"]["side"]) for r in records} == set(SETTINGS)
    assert {r["metric"] for r in records} >= {"step", "of_memcpy", "switch", "switch_us"}
