"""The simulated day: its routing, rows as they are dispatched, and what a small run leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.balance import commands, costs, page, plots
from benchmarks.balance.loads import bounded, physical, rows_of_ranks, skew_of
from benchmarks.balance.policies import NONE, ORACLE, PERFECT, REBALANCE, REFINE, Periodic, fixed, known
from benchmarks.balance.processes import VARIANTS, Setting, placement_for, skewed_ids
from benchmarks.balance.report import Report, goals
from benchmarks.balance.routing import Burst, Day, Ints, with_skew
from benchmarks.balance.simulation import MODES, sampled_steps, simulate
from benchmarks.compare.cases import ROOT
from moe_triton.balance import Placement, rank_loads_by_source
from tests.drawing import needs_matplotlib

SMALL = Day(steps=1_000, experts=32, topk=4, travel=16.0, bursts=(Burst(300, 50, (3, 4), 6.0),))
RANKS, TOKENS = 16, 24


def counted(ids: Ints, experts: int) -> Ints:
    return np.bincount(ids.ravel(), minlength=experts)


def priced_by_rows(slots: Ints, num_slots: int) -> costs.Communication:
    """In the place of the model, which takes seconds."""
    rows = np.bincount(slots.ravel() // (num_slots // len(slots)), minlength=len(slots)).max()
    return costs.Communication(float(rows) / 10, float(rows) / 5)


@pytest.fixture
def _cheap_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(costs, "communication", priced_by_rows)
    costs.row_us.cache_clear()
    yield
    costs.row_us.cache_clear()


LIMITED = replace(SMALL, groups=8, top_groups=2, _known={})


@pytest.mark.parametrize("day", [SMALL, LIMITED], ids=["any", "node-limited"])
def test_tokens_want_distinct_experts_and_the_same_ones_again(day: Day) -> None:
    ids = day.draw(500, 4, 64)
    assert ids.shape == (4, 64, 4)
    assert all(len(set(row)) == 4 for row in ids.reshape(-1, 4).tolist())
    assert np.array_equal(ids, replace(day, _known={}).draw(500, 4, 64))
    assert not np.array_equal(ids, day.draw(501, 4, 64))
    assert not np.array_equal(ids, replace(day, seed=1, _known={}).draw(500, 4, 64))
    assert np.array_equal(day.counted(500, 100, 64), replace(day, _known={}).counted(500, 100, 64))


def test_node_limited_tokens_stay_in_few_groups() -> None:
    groups = LIMITED.draw(500, 4, 64) // 4
    assert max(len(set(row)) for row in groups.reshape(-1, 4).tolist()) == 2


def test_what_is_expected_is_what_is_drawn() -> None:
    drawn = counted(SMALL.draw(320, 16, 4096), 32)  # within the burst
    assert drawn == pytest.approx(SMALL.expected(320) * 16 * 4096, rel=0.05)
    assert SMALL.expected(320).sum() == pytest.approx(4)


def test_the_head_moves_and_bursts_come_and_go() -> None:
    heads = [int(SMALL.popularity(step).argmax()) for step in range(0, 1_000, 125) if step != 250]
    assert len(set(heads)) == len(heads)
    before, within = SMALL.popularity(299), SMALL.popularity(300)
    assert within[3] / within[0] == pytest.approx(6 * before[3] / before[0], rel=0.05)
    assert SMALL.popularity(350)[3] < within[3] / 3


@pytest.mark.parametrize("wanted", [1.5, 2.0])
def test_a_day_has_the_skew_that_was_stated(wanted: float) -> None:
    day = with_skew(Day(bursts=()), wanted, 16)
    placement = fixed(NONE, day, 16)
    steps = sampled_steps(day, 30)
    found = [
        skew_of(rows_of_ranks(placement, physical(placement, day.draw(s, 16, 64), "token"))) for s in steps
    ]
    assert np.mean(found) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_ranks_are_those_of_the_table(mode: str) -> None:
    ids = SMALL.draw(320, RANKS, TOKENS)
    placement = known(counted(ids, 32), RANKS, mode)
    rows = rows_of_ranks(placement, physical(placement, ids, mode))
    table = placement.table(0).numpy()
    expected = np.zeros(RANKS, dtype=np.int64)
    for rank, token, place in np.ndindex(ids.shape):
        expert = ids[rank, token, place]
        count, *slots = table[expert]
        replica = (token + rank + expert) % count if mode == "token" else rank // -(-RANKS // count)
        expected[placement.rank_of(int(slots[replica]))] += 1
    assert rows.tolist() == expected.tolist()
    assert rows.sum() == RANKS * TOKENS * 4
    if mode == "rank":
        by_source = np.stack([counted(of, 32) for of in ids])[None]
        assert torch.equal(rank_loads_by_source(placement, by_source)[0].long(), torch.from_numpy(rows))


def test_moonep_deals_rows_evenly_as_far_as_slots_reach() -> None:
    counts = np.array([90, 10, 4, 4, 6, 6, 0, 0])
    assert bounded(counts, 4, 0).rows.tolist() == [100, 8, 12, 0]
    plan = bounded(counts, 4, 1)
    assert plan.rows.tolist() == [30, 30, 30, 30]
    assert (plan.copies, plan.most_copies) == (3, 1)


@pytest.mark.parametrize("policy", [REBALANCE, REFINE])
def test_placements_change_once_a_period(policy: str) -> None:
    changing = Periodic(policy, SMALL, 100, RANKS, TOKENS)
    first = changing.at(0)
    assert changing.at(99) is first
    second = changing.at(100)
    moved = changing.moved[-1]
    assert second != first
    assert 0 < moved.most <= moved.copies
    if policy == REFINE:
        assert moved.copies <= RANKS
    skipped = Periodic(policy, SMALL, 100, RANKS, TOKENS)
    assert skipped.at(500) == [changing.at(step) for step in range(200, 600, 100)][-1]


@pytest.mark.usefixtures("_cheap_model")
def test_no_policy_beats_the_bound_and_known_loads_come_close() -> None:
    outcomes = {each.name: each for each in simulate(SMALL, RANKS, TOKENS, 5, [100])}
    assert set(outcomes[PERFECT].skew["token"]) == {1.0}
    for each in outcomes.values():
        assert each.skew["token"] >= outcomes[PERFECT].skew["token"]
        assert min(each.rows) >= TOKENS * 4
    with_replicas = [each.step_us for each in outcomes.values() if each.policy != NONE]
    assert min(with_replicas) == pytest.approx(outcomes[PERFECT].step_us)
    assert outcomes[ORACLE].mean() < outcomes[f"{REBALANCE}, 100"].mean() < outcomes[NONE].mean()


def test_known_loads_are_balanced_as_dispatched() -> None:
    """EP 16, E 256, R 320, skew 2: 1.15 of the mean at most, by token and by rank."""
    day = with_skew(Day(), 2.0, 16)
    ids = day.draw(20_000, 16, 256)
    for mode in MODES:
        placement = known(counted(ids, 256), 16, mode)
        assert placement.num_replicas == 320
        assert skew_of(rows_of_ranks(placement, physical(placement, ids, mode))) <= 1.15


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_have_the_skew_that_was_stated(ranks: int) -> None:
    setting = Setting(ranks=ranks)
    ids = skewed_ids(setting)
    loads = [
        rows_of_ranks(placement, physical(placement, ids, "token"))
        for placement in (
            Placement.initial(1, setting.experts, setting.experts, ranks),
            placement_for(setting, ids),
        )
    ]
    assert skew_of(loads[0]) == pytest.approx(setting.skew, rel=0.05)
    assert skew_of(loads[1]) < 1.1
    assert loads[0].argmax() == 0


@needs_matplotlib
@pytest.mark.usefixtures("_cheap_model")
def test_a_quick_run_leaves_figures_plots_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, docs = tmp_path / "runs", tmp_path / "docs"
    with monkeypatch.context() as patch:
        patch.setattr(plots, "plot", lambda report, folder: [])  # the page draws the same
        commands.main(["--quick", "--out", str(runs), "--json", str(tmp_path / "records.json")])
    report = Report.load(runs / page.RUN)
    records = json.loads((tmp_path / "records.json").read_text())
    assert records == report.records()
    (measured,) = report.measured
    assert {sum(rows) for rows in measured.rows.values()} == {2 * 16 * 4}
    assert list(measured.rows) == list(VARIANTS)
    assert measured.skew(VARIANTS[1]) < measured.skew(NONE)
    assert all(len(seconds) == 1 for seconds in measured.seconds.values())
    shown = capsys.readouterr().out
    commands.main(["page", "--out", str(runs), "--docs", str(docs)])
    text = (docs / page.NAME).read_text()
    assert text.startswith(page.METHOD)
    for line in goals(report):
        assert line in shown
        assert f"- {line}" in text
    for image in ("balance_day.svg", "balance_gains.svg"):
        assert f"({page.FIGURES}/{image})" in text
        assert (docs / page.FIGURES / image).read_text().startswith("<?xml")
    assert json.loads((docs / page.FIGURES / page.RECORDS).read_text())["records"] == records


def test_without_a_run_the_page_has_the_method_only(tmp_path: Path) -> None:
    page.write(tmp_path / "nothing", tmp_path / "docs")
    assert "No full run is on record yet" in (tmp_path / "docs" / page.NAME).read_text()


def test_the_page_of_the_documentation_states_the_method_of_the_code() -> None:
    text = (ROOT / "docs" / page.NAME).read_text()
    assert text.startswith(page.METHOD), "run: python -m benchmarks.balance page"
