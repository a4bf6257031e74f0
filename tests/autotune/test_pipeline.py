"""The search of pipelines: intervals, what a race finds, wrong bits, what is written, the command."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from autotune.cli import app as tune_app
from autotune.pipeline import measured, race, results, tune
from autotune.pipeline.candidate import Candidate, Sizes
from autotune.pipeline.command import pipeline
from autotune.pipeline.intervals import FEWEST, LOOKING, Interval
from autotune.pipeline.measured import Effort, Measured, is_better
from autotune.pipeline.modelled import Modelled
from autotune.pipeline.race import Race, Result, WrongBitsError, compare
from autotune.pipeline.results import Target
from moe_triton import ArgumentError, Tuning
from moe_triton.core.config import Config
from moe_triton.processes import RankFailedError, RankGroup
from moe_triton.schemes import SCHEMES, scheme_type
from moe_triton.tables import machine_of, pipelines, schemes
from moe_triton.tables.pipelines import filled

Groups = Callable[[int], RankGroup]
SMALL = Sizes(2, 4, 64, 2, 4)
BRIEF = Effort(budget=2, seconds=2.0, most=12)


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    make = torch.Generator().manual_seed(3)
    draws = torch.distributions.LogNormal(0.0, 0.3)
    torch.manual_seed(int(torch.randint(2**31, (1,), generator=make)))
    held = sum(i.low <= 1 <= i.high for i in (Interval.of(draws.sample((30,)).tolist()) for _ in range(400)))
    assert 0.92 <= held / 400 <= 0.995


def test_few_ratios_decide_nothing_and_many_of_one_side_do() -> None:
    assert Interval.of([0.5] * (FEWEST - 1)) == (0.0, 0.5, math.inf)
    assert not Interval.of([0.5] * (FEWEST - 1)).decides(0.02)
    assert Interval.of([0.5] * FEWEST).decides(0.0)
    assert Interval.of([2.0] * FEWEST).decides(0.0)
    one_side = [0.9] * 11 + [1.1]
    assert Interval.of(one_side).high < Interval.of(one_side, LOOKING).high
    unclear = Interval.of([0.9, 1.1] * 8)
    assert not unclear.decides(0.02)
    assert unclear.decides(0.5)


@pytest.mark.parametrize(
    ("interval", "expected"),
    [((0.8, 0.9, 0.95), True), ((0.8, 0.9, 1.01), False), ((0.97, 0.98, 0.99), False)],
)
def test_better_is_beyond_doubt_and_worth_it(interval: tuple[float, float, float], expected: bool) -> None:
    assert is_better(Result(Candidate("direct"), 1, Interval(*interval))) is expected
    assert not is_better(Result(Candidate("direct"), 1, Interval(*interval), "refused"))


def test_every_setting_that_a_scheme_declares_is_one_that_a_buffer_takes() -> None:
    for product, names in SCHEMES.items():
        for name in names:
            config = Config(2, 64, 1024, 2, 4, product=product, scheme=name)  # type: ignore[arg-type]
            for target, cores in (("cpu", 4), ("npu", 48)):
                space = scheme_type(config).space(config, target, cores)
                own = {setting: values[0] for setting, values in space.choices.items()}
                for setting, values in space.choices.items():
                    for value in values:
                        if space.allows({**own, setting: value}):
                            pipelines._check({**own, setting: value})
    fullmesh = scheme_type(Config(2, 64, 1024, 2, 4))
    assert "combine_tokens" in fullmesh.space(Config(2, 64, 1024, 2, 4), "cpu", 2).choices


def test_a_race_knows_its_default_and_every_scheme_gives_its_bits(ranks: Groups) -> None:
    names = Candidate("fullmesh_v1"), Candidate("fullmesh_v2"), Candidate("direct", {"num_blocks": 2})
    candidates = *names, Candidate("fullmesh_v1", {"combine_tokens": 1, "cached_bytes": 0})
    first, second = ranks(2).run(compare, Race(SMALL, candidates, most=16, seconds=5.0))
    assert second == []
    assert [each.candidate for each in first] == list(candidates)
    assert first[0].ratio == (1.0, 1.0, 1.0)
    assert all(each.ns > 0 and each.ratio.median > 0 and not each.refused for each in first)


def test_a_candidate_that_cannot_be_made_is_named_with_the_reason(ranks: Groups) -> None:
    wide = replace(SMALL, topk=16, experts=32)
    found = ranks(2).run(compare, Race(wide, (Candidate("fullmesh_v1"), Candidate("fullmesh_v2")), most=4))[0]
    assert found[1].ns == 0
    assert "num_topk is 16" in found[1].refused


def race_with_wrong_bits(rank: int, num_ranks: int, wrong_rank: int) -> str:
    """A race in which a candidate's combine is off by a bit on one rank."""
    usual = race._Lane.run

    def wrong(lane: Any, *arguments: Any, **named: Any) -> Any:
        received, out = usual(lane, *arguments, **named)
        if rank == wrong_rank and lane.candidate.settings:
            out.view(torch.int16)[0, 0] ^= 1
        return received, out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race._Lane, "run", wrong)
        candidates = Candidate("fullmesh_v1"), Candidate("fullmesh_v1", {"spins": 3})
        with pytest.raises(WrongBitsError) as caught:
            compare(rank, num_ranks, Race(SMALL, candidates, most=4))
    return str(caught.value)


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_other_bits_stop_the_race_on_every_rank_and_name_the_candidate(
    ranks: Groups, wrong_rank: int
) -> None:
    expected = f"fullmesh_v1 spins=3 gives other bits than the default on rank {wrong_rank}, rows as they are"
    assert ranks(2).run(race_with_wrong_bits, wrong_rank) == [expected] * 2


class Played(Measured):
    """Ratios made up: what an oracle says of each candidate, whatever it is raced against."""

    def __init__(self, oracle: Callable[[Candidate], float], effort: Effort = BRIEF) -> None:
        self.sizes, self.effort, self.oracle = replace(SMALL, tokens=64), effort, oracle
        self.tried: list[Candidate] = []

    def race(self, default: Candidate, others: Any, seed: int = 0) -> list[Result]:
        self.tried += others
        own = self.oracle(default)
        ratios = [self.oracle(each) / own for each in others]
        rows = zip((default, *others), (1.0, *ratios), strict=True)
        return [Result(each, round(1000 * ratio), Interval.exact(ratio)) for each, ratio in rows]


def test_the_search_finds_what_is_best_setting_by_setting() -> None:
    def oracle(candidate: Candidate) -> float:
        s = candidate.settings
        return (0.5 if s.get("combine_tokens") == 16 else 1.0) * (0.9 if s.get("spins") == 1000 else 1.0)

    played = Played(oracle, replace(BRIEF, budget=100))
    found = played.settings("fullmesh_v1")
    assert found.candidate.settings == {"combine_tokens": 16, "spins": 1000}
    assert found.ratio.median == pytest.approx(0.45)
    assert all(each.scheme == "fullmesh_v1" for each in played.tried)


def test_where_nothing_is_better_the_defaults_stay_and_a_budget_is_kept() -> None:
    played = Played(lambda candidate: 1.0 if candidate.settings else 0.99, replace(BRIEF, budget=5))
    assert played.settings("fullmesh_v1").candidate == Candidate("fullmesh_v1")
    assert len(played.tried) == 5


def test_who_wins_by_luck_does_not_win_again() -> None:
    class Lucky(Played):
        def race(self, default: Candidate, others: Any, seed: int = 0) -> list[Result]:
            found = super().race(default, others)
            return [r._replace(ratio=Interval.exact(1.0)) for r in found] if seed else found

    played = Lucky(lambda c: 0.5 if c.settings.get("yields") == 0 else 1.0, replace(BRIEF, budget=100))
    assert played.settings("direct").candidate == Candidate("direct")


def target(folder: Path) -> Target:
    return Target(machine_of("cpu", "A3"), 2, "a test", folder)


def test_rows_go_where_buffers_look_and_replace_their_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_TRITON_TABLES", str(tmp_path))
    fast = [Result(Candidate(n), 500, Interval.exact(r)) for n, r in (("fullmesh_v2", 0.9), ("direct", 0.5))]
    found = [Result(Candidate("fullmesh_v1"), 1000, Interval.exact(1.0)), *fast]
    rows = results.scheme_rows(SMALL, found, fast)
    assert [(*row.keys, row.values[0]) for row in rows] == [("own", "fullmesh_v2"), ("window", "direct")]
    assert [row.values[0] for row in results.scheme_rows(SMALL, found, [])] == ["fullmesh_v1"] * 2
    results.write(schemes.KIND, target(tmp_path), rows)
    others = results.scheme_rows(replace(SMALL, tokens=8), found, [])
    results.write(schemes.KIND, target(tmp_path), others)
    results.write(schemes.KIND, target(tmp_path), rows[:1])
    table = results.kept(schemes.KIND, target(tmp_path))
    assert table is not None
    assert set(table.rows) == {*rows, *others}
    assert results.kept(schemes.KIND, target(tmp_path)._replace(source="another")) is None
    best = Candidate("direct", {"spins": 3})
    results.write(
        pipelines.KIND, target(tmp_path), [results.pipeline_row(target(tmp_path), SMALL, best, 9, 10)]
    )
    machine = machine_of("cpu", "A3")
    assert filled(machine, SMALL.config("direct"), 2, None, None).tuning == Tuning(spins=3)
    names = [each.scheme for each in schemes.named(machine, SMALL.config("direct"), "window", SCHEMES)]
    assert names == ["direct", "fullmesh_v2"]


def test_on_an_npu_formats_are_added_and_parts_tried_with_half_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def price(group: Any, machine: Any, bodies: Any) -> Any:
        asked.append(group)
        return SimpleNamespace(us=10.0 + (group.parts or 0) + 5.0 * (group.comm_alg == "direct"))

    monkeypatch.setattr("autotune.pipeline.modelled.cluster.price", price)
    sizes, prices = Sizes(8, 64, 2048, 8, 256), Modelled()
    found = {each.candidate.scheme: each for each in prices.schemes(sizes)}
    assert {name: each.ns for name, each in found.items()} == {
        "fullmesh_v1": 20_000,
        "fullmesh_v2": 20_000,
        "direct": 30_000,
    }
    assert found["direct"].ratio == Interval.exact(1.5)
    assert [(g.quantize, g.mode) for g in asked if g.comm_alg == "direct"] == [
        (None, "stream"),
        ("int8", "stream"),
    ]
    asked.clear()
    own, *others = prices.settings(sizes, "fullmesh_v1")
    assert own.candidate == Candidate("fullmesh_v1")
    half = int(prices.machine.cores) // 2
    assert [each.candidate.settings for each in others] == [
        {"dispatch_tokens": tokens, "combine_tokens": tokens, "communication_blocks": half}
        for tokens in (16, 32)
    ]
    assert [(g.parts, g.communication_blocks) for g in asked] == [(None, None)] * 2 + [(4, half)] * 2 + [
        (2, half)
    ] * 2
    assert prices.price(replace(sizes, topk=16), Candidate("fullmesh_v2")).refused


@pytest.mark.long
def test_on_an_npu_the_slowest_rank_is_priced_and_parts_are_tried() -> None:
    sizes, prices = Sizes(4, 16, 1024, 4, 16), Modelled()
    own, *others = prices.schemes(sizes)
    assert own.candidate.scheme == "fullmesh_v1"
    assert {each.candidate.scheme for each in others} == {"fullmesh_v2", "direct"}
    assert all(each.ratio.median == each.ns / own.ns for each in others)
    with_parts = prices.settings(sizes, "fullmesh_v1")
    assert with_parts[0].candidate == Candidate("fullmesh_v1")
    assert prices.price(replace(sizes, topk=16), Candidate("fullmesh_v2")).refused


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(pipeline)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))
    return result.exit_code, result.output


def test_the_command_writes_tables_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "sizes_of", lambda *_: [SMALL])
    options = "--budget", "0", "--seconds", "1", "--output", str(tmp_path)
    code, output = run(*options)
    assert code == 0
    assert "H 64, K 2, EP 2, BS 4: own: fullmesh_" in output
    table = results.kept(schemes.KIND, tune.target_of("cpu", tmp_path))
    assert table is not None
    assert [row.keys[0] for row in table.rows] == ["own", "window"]
    assert table.source == measured.source()
    assert run(*options, "--resume") == (0, "")


def test_the_command_refuses_what_it_cannot_price_and_says_who_gave_other_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, output = run("--soc", "Ascend310", "--output", str(tmp_path))
    assert code == 1
    assert "soc is 'Ascend310'" in output

    def fails(self: Any) -> list[Result]:
        raise RankFailedError({0: "WrongBitsError: direct default gives other bits"})

    monkeypatch.setattr(tune, "sizes_of", lambda *_: [SMALL])
    monkeypatch.setattr(Measured, "schemes", fails)
    code, output = run("--output", str(tmp_path))
    assert code == 1
    assert "direct default gives other bits" in output
    assert not list(tmp_path.iterdir())
    with pytest.raises(ArgumentError, match="soc is"):
        tune.target_of("Ascend310")


def test_the_command_is_one_of_tune() -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(tune_app, ["pipeline", "--help"])
    assert result.exit_code == 0
    assert "--write-shipped" in result.output
