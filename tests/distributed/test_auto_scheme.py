"""Ranks that let tables choose the scheme: the one named, its bits, and ranks whose tables differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_triton import ArgumentError, ConfigMismatchError, Tuning
from moe_triton.processes import RankGroup
from tests.distributed.cases import Case, inputs_of, small_case
from tests.distributed.workers import expected_round, make_buffer, one_round
from tests.test_scheme_tables import write

Groups = Callable[[int], RankGroup]
RANKS = 3
TABLE = {("own", 64): "fullmesh_v2", ("window", 64): "direct"}


def automatic(case: Case, **options: Any) -> Case:
    return replace(case, config=replace(case.config, scheme="auto"))


def run(rank: int, num_ranks: int, case: Case, folder: str, outputs: str) -> tuple[str, str, bool]:
    """The scheme taken, who said so, and whether the bits are the reference's."""
    with make_buffer(automatic(case), outputs=outputs, tuning=Tuning(tables=folder)) as buffer:
        _, combined = one_round(buffer, case, inputs_of(case, rank, 0), None)
        same = combined.equal(expected_round(case, 0)[1][rank])
        return buffer.config.scheme, buffer.tuning_source()["comm_alg"], same


@pytest.mark.parametrize(("outputs", "expected"), [("own", "fullmesh_v2"), ("window", "direct")])
def test_ranks_run_the_scheme_that_the_table_names(
    ranks: Groups, tmp_path: Path, outputs: str, expected: str
) -> None:
    write(tmp_path, TABLE)
    for scheme, source, same in ranks(RANKS).run(run, small_case(RANKS), str(tmp_path), outputs):
        assert (scheme, same) == (expected, True)
        assert source.startswith(f"{expected}: table schemes-")


def construct(rank: int, num_ranks: int, case: Case, folders: list[str]) -> str:
    try:
        with make_buffer(automatic(case), tuning=Tuning(tables=folders[rank])):
            return "constructed"
    except (ConfigMismatchError, ArgumentError) as error:
        return f"{type(error).__name__}: {error}"


def test_ranks_whose_tables_name_others_say_so(ranks: Groups, tmp_path: Path) -> None:
    write(tmp_path / "a", TABLE)
    write(tmp_path / "b", {("own", 64): "fullmesh_v1"})
    folders = [str(tmp_path / name) for name in "aba"]
    for said in ranks(RANKS).run(construct, small_case(RANKS), folders):
        assert said.startswith("ConfigMismatchError")
        assert "scheme: 'fullmesh_v2' on rank(s) [0, 2], 'fullmesh_v1' on rank(s) [1]" in said


def test_a_damaged_table_on_one_rank_is_told_to_all_at_construction(ranks: Groups, tmp_path: Path) -> None:
    write(tmp_path / "a", TABLE)
    path = write(tmp_path / "b", TABLE)
    path.write_text("{")
    folders = [str(tmp_path / name) for name in "aab"]
    first, second, third = ranks(RANKS).run(construct, small_case(RANKS), folders)
    assert third.startswith("ArgumentError: table schemes-")
    assert first == second
    assert first.startswith("ConfigMismatchError: rank 2 cannot be constructed: table schemes-")
