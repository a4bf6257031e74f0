"""A scheme with a kernel of its own, without a line for it in the package: the build is told its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_triton.processes import RankFailedError, RankGroup
from moe_triton.tools.cli.app import app
from tests.distributed import keeping
from tests.distributed.cases import small_case
from tests.distributed.keeping.scheme import compare
from tests.patience import seconds

FOLDER = Path(keeping.__file__).parent
RANKS = 2


def build(*arguments: str) -> str:
    return CliRunner().invoke(app, ["build", "--backend", "cpu", *arguments]).output


@pytest.mark.long
def test_its_rounds_are_the_references(tmp_path: Path) -> None:
    said = build("--output", str(tmp_path), "--scheme", str(FOLDER))
    assert "built" in said, said
    case = replace(small_case(RANKS, "keeping", weights=True), rounds=3)
    with RankGroup(RANKS) as group:
        assert group.run(compare, case, str(tmp_path), timeout_s=seconds(60.0)) == [[]] * RANKS
    with (
        RankGroup(RANKS) as group,
        pytest.raises(RankFailedError, match=r"keep_rows in the library: no such kernel"),
    ):
        group.run(compare, case, None, timeout_s=seconds(60.0))


def test_a_folder_that_is_no_schemes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ascendc.py").touch()
    said = " ".join(build("--scheme", str(tmp_path)).split())
    assert "this one lacks launchers.asc" in said
