"""The table of parts is what the model says, and the command says where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.model.bodies.body import body_of
from autotune.model.bodies.remembered import Remembered
from autotune.model.clusters import parts
from autotune.model.clusters.group import Group
from moe_triton.schemes import part_tokens
from moe_triton.tools.cli.app import app

# A decode size, and the two where the model is nearest to cutting.
SAMPLE = (
    Group(16, 16, 7168),
    Group(64, 512, 7168),
    Group(64, 256, 2048, comm_alg="fullmesh_v2"),
)


def test_the_table_has_a_row_for_every_group_that_can_be_cut() -> None:
    cut = [group for group in parts.groups() if group.comm_alg != "direct"]
    expected = [(g.product, g.comm_alg, g.hidden, g.ranks, g.tokens) for g in cut for _ in range(2)]
    kept = part_tokens.kept().rows
    assert [(*row.keys[:2], *row.sizes) for row in kept] == expected
    assert set(SAMPLE) <= set(cut)


def test_the_table_is_of_these_constants() -> None:
    assert part_tokens.kept().source == parts.source(), part_tokens.COMMAND


def test_some_rows_are_what_the_model_says() -> None:
    bodies, kept = Remembered(body_of), part_tokens.kept().rows
    for group in SAMPLE:
        found = parts.priced(group, bodies)
        assert [each.operator for each in found] == ["dispatch", "combine"]
        for each in found:
            assert each.row in kept, (each, part_tokens.COMMAND)


def test_what_takes_least_is_chosen_and_of_as_good_ones_the_fewest() -> None:
    priced = parts.Priced(SAMPLE[0], "combine", {1: 3.0, 2: 2.0, 4: 2.0})
    assert priced.parts == 2
    assert priced.row.values == (2,)


def test_direct_cannot_be_cut() -> None:
    assert parts.priced(Group(8, 16, 2048, comm_alg="direct"), Remembered(body_of)) == []


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The command prices one group, and keeps it in a folder of its own."""
    monkeypatch.setattr(parts, "groups", lambda: iter(SAMPLE[:1]))
    path = tmp_path / "parts.json"
    monkeypatch.setattr(part_tokens, "TABLE", path)
    return path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["model", "parts", *arguments])
    return result.exit_code, result.output


def test_the_command_writes_the_table_and_compares_with_it(few: Path) -> None:
    assert run()[0] == 1  # there is none
    code, output = run("--write")
    assert code == 0
    assert "fullmesh_v1  7168  16  16  dispatch " in output
    assert len(part_tokens.kept().rows) == 2
    assert run()[0] == 0
    few.write_text(few.read_text().replace('"dispatch", 7168, 16, 16, 1]', '"dispatch", 7168, 16, 16, 4]'))
    part_tokens.read_table.cache_clear()
    code, output = run()
    assert code == 1
    assert '-     ["A3", "fullmesh_v1", "dispatch", 7168, 16, 16, 4]' in output
    assert part_tokens.COMMAND in output


@pytest.mark.long
def test_all_rows_are_what_the_model_says() -> None:
    bodies = Remembered(body_of)
    rows = [each.row for group in parts.groups() for each in parts.priced(group, bodies)]
    assert parts.table_of(rows) == part_tokens.kept()
