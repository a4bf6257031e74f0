"""The search of pipelines: intervals, what a race finds, wrong bits, what is written, the command."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.intervals import FEWEST, LOOKING, Interval
from autotune.pipeline import measured, race, results
from autotune.pipeline.candidate import Candidate, Sizes
from autotune.pipeline.measured import Effort, Measured
from autotune.pipeline.race import Race, Result, compare
from autotune.pipeline.results import Target
from autotune.pipeline.tasks import settings_task
from autotune.pipeline.tune import is_better, tune
from autotune.search.task import WrongBitsError
from moe_triton import Tuning
from moe_triton.backends import CAPABILITIES
from moe_triton.core.capabilities import Capabilities
from moe_triton.core.config import Config
from moe_triton.core.space import Space
from moe_triton.processes import RankFailedError, RankGroup
from moe_triton.schemes import SCHEMES, scheme_type
from moe_triton.schemes.fullmesh.scheme import Fullmesh
from moe_triton.tables import FOLDER, machine_of, pipelines, schemes
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
            config = Config(16, 64, 1024, 2, 16, product=product, scheme=name)  # type: ignore[arg-type]
            for target, cores in (("cpu", 4), ("npu", 48)):
                space = scheme_type(config).space(config, CAPABILITIES[target], cores)
                own = {name: space.usual.get(name, values[0]) for name, values in space.choices.items()}
                assert space.allows(own), (name, target)
                for setting, values in space.choices.items():
                    for value in values:
                        if space.allows({**own, setting: value}):
                            pipelines._check({**own, setting: value})
    fullmesh = scheme_type(Config(2, 64, 1024, 2, 4))
    assert "combine_tokens" in fullmesh.space(Config(2, 64, 1024, 2, 4), CAPABILITIES["cpu"], 2).choices


def test_a_race_knows_its_default_and_every_scheme_gives_its_bits(ranks: Groups) -> None:
    names = Candidate("fullmesh_v1"), Candidate("fullmesh_v2"), Candidate("direct", {"num_blocks": 2})
    candidates = *names, Candidate("fullmesh_v1", {"combine_tokens": 1, "cached_bytes": 0})
    first, second = ranks(2).run(compare, Race(SMALL, candidates, most=16, seconds=5.0))
    assert second == []
    assert [each.candidate for each in first] == list(candidates)
    assert first[0].ratio == (1.0, 1.0, 1.0)
    assert all(each.ns > 0 and each.ratio.median > 0 and not each.refused for each in first)


def test_a_candidate_that_cannot_be_made_is_named_with_the_reason(ranks: Groups) -> None:
    many = replace(SMALL, tokens=257)
    found = ranks(2).run(compare, Race(many, (Candidate("fullmesh_v1"), Candidate("fullmesh_v2")), most=4))[0]
    assert found[1].ns == 0
    assert "num_max_tokens_per_rank is 257" in found[1].refused


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


Oracle = Callable[[Candidate], float]


def playing(patch: pytest.MonkeyPatch, oracle: Oracle) -> list[Candidate]:
    """Ratios made up: what an oracle says of each candidate; and whom it was asked about."""
    tried: list[Candidate] = []

    def price(self: Measured, default: Candidate, candidate: Candidate, seed: int = 0) -> Result:
        tried.append(candidate)
        ratio = oracle(candidate) / oracle(default)
        return Result(candidate, round(1e6 * ratio), Interval.exact(ratio))

    patch.setattr(Measured, "price", price)
    return tried


def settings_found(folder: Path, budget: int, **given: Any) -> dict[str, str]:
    """The settings that a search of a group finds, by scheme."""
    groups = [replace(SMALL, tokens=64)]
    study = folder / "study.db"
    (found,) = tune(groups, effort=replace(BRIEF, budget=budget), folder=folder, study=study, **given)
    return {str(row.keys[0]): str(row.values[0]) for row in found.pipelines}


def by_settings(candidate: Candidate) -> float:
    s = candidate.settings
    return (0.5 if s.get("combine_tokens") == 16 else 1.0) * (0.9 if s.get("spins") == 1000 else 1.0)


def test_the_search_tries_settings_one_by_one_and_then_what_goes_with_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = playing(monkeypatch, by_settings)
    assert settings_found(tmp_path, 60) == {"fullmesh_v1": "combine_tokens=16 spins=1000"}
    of_scheme = [each for each in tried if each.scheme == "fullmesh_v1"][2:]
    ones = [each for each in of_scheme if len(each.settings) == 1]
    assert of_scheme[: len(ones)] == ones
    assert {name for each in ones for name in each.settings} >= {"dispatch_tokens", "cached_bytes", "yields"}
    (row,) = pipelines.checked_table(next(tmp_path.glob("pipelines-*.json"))).rows
    assert row.values[1:] == (450_000, 1_000_000)


def test_where_nothing_is_better_the_defaults_stay_and_a_budget_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = playing(monkeypatch, lambda candidate: 1.0 if candidate.settings else 0.99)
    assert settings_found(tmp_path, 5) == {}
    assert len(tried) == 3 + 5
    assert not list(tmp_path.glob("pipelines-*"))


def test_who_wins_by_luck_does_not_win_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def price(self: Measured, default: Candidate, candidate: Candidate, seed: int = 0) -> Result:
        seeds.append(seed)
        is_lucky = candidate.settings.get("yields") == 0 and not seed
        return Result(candidate, 1000, Interval.exact(0.5 if is_lucky else 1.0))

    monkeypatch.setattr(Measured, "price", price)
    assert settings_found(tmp_path, 60) == {}
    assert seeds.count(1) == 2


def test_more_settings_are_searched_where_they_were_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = playing(monkeypatch, by_settings)
    assert settings_found(tmp_path, 5, settings=False) == {}
    assert len(tried) == 3
    assert settings_found(tmp_path, 60, resume=True)["fullmesh_v1"].startswith("combine_tokens=16")
    before = len(tried)
    assert before > 3 + 20
    assert settings_found(tmp_path, 60, resume=True)["fullmesh_v1"].startswith("combine_tokens=16")
    assert len(tried) == before


def test_an_interrupted_search_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Candidate] = []

    def interrupted(candidate: Candidate) -> float:
        if len(tried) == 9 and candidate.settings:
            raise KeyboardInterrupt
        return by_settings(candidate)

    tried = playing(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        settings_found(tmp_path, 60)
    assert schemes.checked_table(next(tmp_path.glob("schemes-*.json")), SCHEMES["A3"]).rows
    known = list(map(str, tried[:8]))
    tried = playing(monkeypatch, by_settings)
    assert settings_found(tmp_path, 60, resume=True) == {"fullmesh_v1": "combine_tokens=16 spins=1000"}
    again = list(map(str, tried[:-2]))  # the best is measured once more, with other inputs
    assert not set(known) & set(again)


def test_a_setting_that_a_scheme_adds_needs_no_line_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeouts` is no field of `Tuning`: what a buffer takes is the scheme's and `Tuning`'s affair."""
    usual = Fullmesh.space.__func__  # type: ignore[attr-defined]

    def space(cls: type[Fullmesh], config: Config, capabilities: Capabilities, cores: int) -> Space:
        found: Space = usual(cls, config, capabilities, cores)
        return replace(found, choices={**found.choices, "timeouts": (7, 8)})

    monkeypatch.setattr(Fullmesh, "space", classmethod(space))
    task = settings_task(SMALL, "fullmesh_v1", CAPABILITIES["cpu"], 2, lambda *_: Result(*given), "a test", 0)
    given = Candidate("fullmesh_v1"), 1, Interval.exact(1.0)
    assert task.own["timeouts"] == 7
    assert task.candidate_of({**task.own, "timeouts": 8}).settings == {"timeouts": 8}


def test_words_are_numbers_in_a_space_and_words_in_a_buffer(tmp_path: Path) -> None:
    config = Config(16, 64, 1024, 2, 16, product="A2", scheme="hierarchy")
    space = scheme_type(config).space(config, CAPABILITIES["cpu"], 2)
    assert [Candidate("hierarchy", {"posts": n}).tuning.posts for n in space.choices["posts"]] == [
        "aiv",
        "aicpu",
    ]
    settings = {name: values[0] for name, values in space.choices.items()} | dict(space.usual)
    assert space.allows({**settings, "posts": 0, "message_tokens": 1})
    assert space.allows({**settings, "posts": 1})
    assert not space.allows({**settings, "posts": 1, "message_tokens": 1})
    with pytest.raises(ValueError, match="posts must be 0 to 1"):
        pipelines._check({"posts": 2})
    assert Candidate("fullmesh_v1").tuning == Tuning(tables=FOLDER)  # not what a user has found before


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2"])
def test_blocks_that_receive_are_searched(scheme: str) -> None:
    config = Config(8, 64, 1024, 2, 16, scheme=scheme)
    for target, cores, own in (("cpu", 2, 0), ("npu", 48, 24)):
        space = scheme_type(config).space(config, CAPABILITIES[target], cores)
        assert space.usual["receiving_blocks"] == own
        values = space.choices["receiving_blocks"]
        assert {0, cores // 2} <= set(values)
        assert not space.allows({**space.usual, "num_blocks": 1, "receiving_blocks": 1})


def test_what_comes_before_a_table_with_receiving_blocks_is_the_callers_number_of_blocks(
    tmp_path: Path,
) -> None:
    machine, columns = machine_of("cpu", "A3"), pipelines.columns_of(SMALL.config("direct"), 2)
    row = Candidate("direct", {"num_blocks": 4, "receiving_blocks": 2})
    results.write(
        pipelines.KIND, target(tmp_path), [results.pipeline_row(target(tmp_path), SMALL, row, 9, 10)]
    )
    found = functools.partial(filled, machine, SMALL.config("direct"), columns[0], Tuning(tables=tmp_path))
    assert (found(None).num_blocks, found(None).tuning.receiving_blocks) == (4, 2)
    assert (found(1).num_blocks, found(1).tuning.receiving_blocks) == (1, None)


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


def test_a_group_of_a2_races(ranks: Groups) -> None:
    sizes = Sizes(2, 4, 1024, 2, 4, "A2")
    for scheme in SCHEMES["A2"]:
        candidates = Candidate(scheme), Candidate(scheme, {"spins": 3})
        first, _ = ranks(2).run(compare, Race(sizes, candidates, most=4, seconds=5.0))
        assert [each.refused for each in first] == ["", ""]


def test_other_bits_are_an_error_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Traceback\n...\nautotune.search.task.WrongBitsError: direct spins=3 gives other bits\n"

    class Ranks:
        def run(self, function: Any, *given: Any, **named: Any) -> list[Any]:
            raise RankFailedError({0: text, 1: text})

    prices = Measured(SMALL, BRIEF)
    prices._ranks = Ranks()  # type: ignore[assignment]
    with pytest.raises(WrongBitsError, match=r"^direct spins=3 gives other bits$"):
        prices.price(Candidate("direct"), Candidate("direct", {"spins": 3}))
    assert measured._as_wrong_bits(RankFailedError({0: "ValueError: no"})) is None


def test_a_table_names_the_commands_that_make_it_again(tmp_path: Path) -> None:
    found = [Result(Candidate("fullmesh_v1"), 1000, Interval.exact(1.0))]

    def command_after(tokens: int, command: str) -> str:
        rows = results.scheme_rows(replace(SMALL, tokens=tokens), found, [])
        path = results.write(schemes.KIND, target(tmp_path)._replace(command=command), rows)
        return schemes.checked_table(path, SCHEMES["A3"]).command

    assert command_after(4, "one") == "one"
    assert command_after(4, "two") == "two"  # nothing of the first is left
    assert command_after(8, "three") == "two && three"
    assert command_after(8, "three") == "two && three"
