"""The benchmark of the model on this CPU: a small run, whose table has what was measured and predicted."""

from __future__ import annotations

from pathlib import Path

from benchmarks import model_on_cpu
from benchmarks.model_on_cpu import OPERATORS, Round
from moe_triton.processes import RankGroup
from moe_triton.tools.text_table import markdown_of


def test_a_round_has_what_was_measured_and_predicted_of_every_step(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.json")
    for scheme, quantize in (("fullmesh_v1", "int8"), ("direct", None)):
        with RankGroup(2) as group:
            (rounds, taken_s), (none, _) = group.run(
                model_on_cpu.measure, scheme, 4, quantize, 2, path, timeout_s=90
            )
        assert [r.operator for r in rounds] == [*OPERATORS, *OPERATORS]
        assert none == []
        assert taken_s > 0
        for found in rounds:
            assert found.measured_us > 0
            assert found.predicted_us > 0
            assert found.measured_steps_us.keys() == found.predicted_steps_us.keys()
            # Together they may take longer: a block begins the next step while another is at this one.
            assert max(found.measured_steps_us.values()) <= found.measured_us * 1.001


def test_the_table_shows_ratios_with_their_spread() -> None:
    rounds = [
        Round(operator, 100.0 * n, 90.0 * n + n, {"send": 50.0}, {"send": 45.0})
        for operator in OPERATORS
        for n in (1, 2, 3)
    ]
    assert model_on_cpu._cells(rounds, "dispatch") == ["200", "0.91", "0.91 to 0.91"]
    records = model_on_cpu._records({"ranks": 2}, rounds)
    ratios = {r["case"]["operator"]: r["value"] for r in records if r["metric"].endswith("p50")}
    assert ratios == {"dispatch": 0.91, "combine": 0.91}
    steps = {(r["metric"], r["value"]) for r in records if r["metric"].endswith(" send")}
    assert steps == {("measured send", 50.0), ("predicted send", 45.0)}
    parts = model_on_cpu._parts([["2", "16", "int8", "direct", "1%", *6 * ["x"]]], {2: [-0.09, 0.03]})
    page = markdown_of(parts)
    assert "| 2 | 16 | int8 | direct | 1% |" in page
    assert "- 2 ranks: off by 6% in the mean, 9% at worst." in page


def test_cores_are_busy_for_part_of_the_time_that_passes() -> None:
    busy, passed = model_on_cpu._busy_s()
    assert 0 < busy <= passed
