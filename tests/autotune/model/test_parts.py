"""One part is what buffers on an NPU take: the model finds it fastest. The command says where it is not."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from autotune.model.clusters import parts
from autotune.model.clusters.group import Group
from autotune.model.kernel_costs.kernel_cost import kernel_cost_of
from autotune.model.kernel_costs.remembered import Remembered
from moe_triton.tools.cli.app import app

# A decode size, and the two where the model is nearest to cutting.
SAMPLE = (
    Group(16, 16, 7168),
    Group(64, 512, 7168),
    Group(64, 256, 2048, comm_alg="fullmesh_v2"),
)


def test_one_part_is_fastest_for_some_groups() -> None:
    kernel_costs = Remembered(kernel_cost_of)
    for group in SAMPLE:
        found = parts.priced(group, kernel_costs)
        assert [(each.operator, each.parts) for each in found] == [("dispatch", 1), ("combine", 1)], group


@pytest.mark.long
def test_one_part_is_fastest_for_all_groups() -> None:
    kernel_costs = Remembered(kernel_cost_of)
    found = [each for group in parts.groups() for each in parts.priced(group, kernel_costs)]
    assert len(found) == 216
    assert [each for each in found if each.parts > 1] == []


def test_what_takes_least_is_chosen_and_of_as_good_ones_the_fewest() -> None:
    assert parts.Priced(SAMPLE[0], "combine", {1: 3.0, 2: 2.0, 4: 2.0}).parts == 2


def test_direct_cannot_be_cut() -> None:
    assert parts.priced(Group(8, 16, 2048, comm_alg="direct"), Remembered(kernel_cost_of)) == []


def run() -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["model", "parts"])
    return result.exit_code, result.output


def test_the_command_says_in_how_many_groups_one_part_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "groups", lambda: iter(SAMPLE[:1]))
    code, output = run()
    assert code == 0
    assert "fullmesh_v1  7168  16  16  dispatch " in output
    assert "is fastest in 2 of 2" in output
    cut = parts.Priced(SAMPLE[0], "combine", {1: 3.0, 2: 2.0, 4: 2.0})
    monkeypatch.setattr(parts, "priced", lambda *_: [cut])
    code, output = run()
    assert code == 1
    assert "is fastest in 0 of 1" in output
