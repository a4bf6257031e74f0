"""Groups of the search of pipelines: which there are, and those of NPUs and of A2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.intervals import Interval
from autotune.pipeline.candidate import Candidate, Sizes
from autotune.pipeline.measured import Effort
from autotune.pipeline.modelled import Modelled
from autotune.pipeline.race import Result
from autotune.pipeline.tune import priced_schemes, sizes_of, target_of, tune
from moe_triton import ArgumentError
from moe_triton.tables import FOLDER
from tests.autotune.test_pipeline import playing


def modelled(patch: pytest.MonkeyPatch, us: Callable[[Any], float]) -> list[Any]:
    """The model, made up: microseconds of a group; and the groups that it was asked about."""
    asked: list[Any] = []

    def price(group: Any, machine: Any, kernel_costs: Any) -> Any:
        asked.append(group)
        return SimpleNamespace(us=us(group))

    patch.setattr("autotune.pipeline.modelled.cluster.price", price)
    return asked


def test_on_an_npu_formats_are_added_and_what_cannot_be_captured_comes_from_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = modelled(monkeypatch, lambda group: 15.0 if group.comm_alg == "direct" else 10.0)
    sizes = Sizes(8, 64, 2048, 8, 256)
    found = Modelled(sizes).price(Candidate("fullmesh_v1"), Candidate("direct"))
    assert (found.ns, found.ratio) == (30_000, Interval.exact(1.5))
    assert [(g.comm_alg, g.quantize, g.mode) for g in asked] == [
        ("fullmesh_v1", None, "graph"),
        ("fullmesh_v1", "int8", "graph"),
        ("direct", None, "stream"),
        ("direct", "int8", "stream"),
    ]
    wide = Modelled(replace(sizes, topk=16))
    assert wide.price(Candidate("fullmesh_v1"), Candidate("fullmesh_v2")).refused


def test_on_an_npu_every_setting_of_a_space_is_in_the_plans_that_are_priced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = modelled(monkeypatch, lambda group: 10.0)
    settings = {"dispatch_tokens": 32, "combine_tokens": 16, "communication_blocks": 24, "num_blocks": 40}
    candidate = Candidate("fullmesh_v1", {**settings, "receiving_blocks": 8})
    prices = Modelled(Sizes(8, 64, 2048, 8, 256))
    prices.price(candidate, candidate)
    context = asked[0].scheme(prices.machine).context
    assert (context.parts("dispatch", 64), context.parts("combine", 64)) == (2, 4)
    assert (context.blocks("communication", 2), context.blocks("compute", 2)) == (24, 16)
    assert (context.num_blocks, context.receiving_blocks) == (40, 8)
    assert asked[0].scheme(prices.machine).context.tuning.tables == FOLDER


@pytest.mark.parametrize(("soc", "machine"), [("A2", "Ascend910B3"), ("Ascend910B3", "Ascend910B3")])
def test_hierarchy_is_for_several_servers(tmp_path: Path, soc: str, machine: str) -> None:
    groups = sizes_of(soc, ranks=[8], hidden=[1024], tokens=[16])
    told: list[Result] = []
    report: Any = lambda sizes, result: told.append(result)  # noqa: E731
    (found,) = tune(
        groups, soc, effort=Effort(budget=2), folder=tmp_path, study=tmp_path / "s.db", report=report
    )
    assert [row.values[0] for row in found.schemes] == ["fullmesh"] * 2
    assert (tmp_path / f"schemes-{machine}.json").is_file()
    refused = {each.candidate.scheme: each.refused for each in told}
    assert not refused["fullmesh"]
    assert "a group inside one server has its product's first scheme instead" in refused["hierarchy"]


def test_a2s_schemes_are_measured_each_against_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sums have other bits, so that neither stands for the other."""
    playing(monkeypatch, lambda c: 0.5 if c.settings.get("spins") == 0 else 1.0)
    groups = sizes_of("cpu", ranks=[2], hidden=[1024], topk=[2], tokens=[16], product="A2")
    study = tmp_path / "s.db"
    (found,) = tune(groups, effort=Effort(budget=60), folder=tmp_path, study=study)
    assert found.schemes == []
    assert {row.keys[0]: row.values[0] for row in found.pipelines} == {
        "fullmesh": "spins=0",
        "hierarchy": "spins=0",
    }
    assert not list(tmp_path.glob("schemes-*"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ranks": [0]}, "ranks is 0"),
        ({"ranks": [-1]}, "ranks is -1"),
        ({"topk": [100]}, "topk is 100"),
        ({"topk": [0]}, "topk is 0"),
        ({"hidden": [0]}, "hidden is 0"),
        ({"tokens": [0]}, "tokens is 0"),
        ({"ranks": [10**6]}, "ranks is 1000000"),
        ({"product": "A4"}, "product is 'A4'"),
    ],
)
@pytest.mark.parametrize("soc", ["cpu", "A2", "A3"])
def test_groups_that_there_are_not_are_refused_by_the_options_name(
    soc: str, given: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(ArgumentError, match=said):
        sizes_of(soc, **given)


def test_usual_sizes_are_those_that_the_product_takes() -> None:
    assert {one.tokens for one in sizes_of("A3")} == {1, 16, 64, 128, 256, 512}
    assert {one.tokens for one in sizes_of("A2")} == {1, 16, 64, 128, 256}
    with pytest.raises(ArgumentError, match="tokens is 512"):
        sizes_of("A2", tokens=[16, 512])
    assert {(one.hidden, one.topk) for one in sizes_of("A2", ranks=[16], tokens=[16], all_shipped=True)} == {
        (hidden, topk) for hidden in (7168, 4096, 5120, 8192, 2048) for topk in (1, 4, 6, 8, 16)
    }


def test_experts_are_shared_evenly_by_any_number_of_ranks() -> None:
    assert [one.experts for one in sizes_of("cpu", ranks=[3, 8], tokens=[16])] == [66, 64]
    assert [one.experts for one in sizes_of("A3", ranks=[3, 8], tokens=[16])] == [258, 256]


def test_targets_are_of_processors_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="soc is 'Ascend310'"):
        target_of("Ascend310", tmp_path)
    assert target_of("A3", tmp_path).machine == target_of("Ascend910_9391", tmp_path).machine


@pytest.mark.parametrize(
    ("ranks", "tokens", "hidden", "topk"),
    [(8, 1, 7168, 8), (16, 128, 7168, 8), (64, 16, 2048, 1), (8, 512, 4096, 6)],
)
def test_the_model_finds_no_scheme_that_is_faster_than_the_own_one_of_a3(
    ranks: int, tokens: int, hidden: int, topk: int
) -> None:
    """Which is why no table of schemes is shipped for it; of A2's, none stands for another on one server."""
    (sizes,) = sizes_of("A3", ranks=[ranks], tokens=[tokens], hidden=[hidden], topk=[topk])
    assert len(sizes.alike) == 3
    for row in priced_schemes(sizes, "A3"):
        assert row.values[0] == "fullmesh_v1"


@pytest.mark.parametrize("us_of_v2", [5.0, 20.0])
def test_of_the_packages_folder_only_a_table_with_a_decision_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, us_of_v2: float
) -> None:
    monkeypatch.setattr("autotune.pipeline.tune.FOLDER", tmp_path / "shipped")
    modelled(monkeypatch, lambda group: us_of_v2 if group.comm_alg == "fullmesh_v2" else 10.0)
    groups = sizes_of("A3", ranks=[8], tokens=[16, 64])
    for folder in (tmp_path / "shipped", tmp_path / "own"):
        folder.mkdir()
        given = {"folder": folder, "study": folder / "s.db", "settings": False}
        assert len(list(tune(groups, "A3", **given))) == 2
    assert (tmp_path / "own" / "schemes-Ascend910_9391.json").exists()
    assert (tmp_path / "shipped" / "schemes-Ascend910_9391.json").exists() == (us_of_v2 < 10)


def test_a_cpus_table_stays_in_the_package_though_all_its_rows_name_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a buffer would go by the table of another family, which may name another scheme."""
    monkeypatch.setattr("autotune.pipeline.tune.FOLDER", tmp_path)
    playing(monkeypatch, lambda candidate: 1.0)
    groups = sizes_of("cpu", ranks=[2], hidden=[1024], topk=[2], tokens=[16])
    (found,) = tune(groups, folder=tmp_path, study=tmp_path / "s.db", settings=False)
    assert {row.values[0] for row in found.schemes} == {"fullmesh_v1"}
    assert list(tmp_path.glob("schemes-cpu-*.json"))
    assert list(tune([], "A3", folder=tmp_path, study=tmp_path / "s.db")) == []
