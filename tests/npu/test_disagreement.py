"""Calls that differ where nobody waits for them: `synchronize` says so on every rank, in graphs too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_triton.processes import RankGroup
from tests.distributed.cases import Case
from tests.npu.disagreement_workers import differ, differ_in_graphs, recorded, recorded_waits
from tests.npu.test_dispatch_combine import config

Ranks = Callable[[int], RankGroup]


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"])
@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"int8": True}, "row format: bf16 on rank(s) [0], int8 on rank(s) [1]"),
        ({"weights": True}, "weights: no on rank(s) [0], yes on rank(s) [1]"),
    ],
    ids=["int8", "weights"],
)
def test_synchronize_names_what_differs(
    ranks: Ranks, scheme: str, change: dict[str, bool], line: str
) -> None:
    case = Case(config(scheme=scheme), 3, "uniform", (8, 8), num_blocks=2)
    for said, after in ranks(2).run(differ, case, change):
        assert said.split("\n")[:2] == ["dispatch number 1: ranks made different calls:", f"  {line}"]
        assert "the buffer is broken: dispatch number 1: ranks made different calls" in after


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2"])
def test_a_graph_keeps_the_kind_of_its_combine(ranks: Ranks, scheme: str) -> None:
    case = Case(config(scheme=scheme), 3, "uniform", (8, 8), num_blocks=2)
    for said, _ in ranks(2).run(differ_in_graphs, case):
        assert "  row format of the combine before: bf16 on rank(s) [0], fp16 on rank(s) [1]" in said


def test_the_flight_recorder_has_what_was_started_and_how_it_ended(ranks: Ranks) -> None:
    case = Case(config(scheme="fullmesh_v1"), 3, "uniform", (8, 8), num_blocks=2)
    for before, is_quiet, behind, last, says_why in ranks(2).run(recorded, case, {"int8": True}):
        assert before == ["running", "running"], "nobody has looked at the device yet"
        assert is_quiet, "to look at the recorder waits for nothing"
        assert behind == [("dispatch number 0", 8, "well"), ("combine number 0", 8, "well")]
        assert [name for name, _ in last] == ["dispatch number 1", "combine number 1"]
        assert "stopped or reported" in {ended for _, ended in last}
        assert says_why


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "fullmesh"])
def test_the_flight_recorder_has_what_calls_raise_in_performance_info(ranks: Ranks, scheme: str) -> None:
    case = Case(config(scheme=scheme), 3, "uniform", (8, 8), num_blocks=2)
    for seen, sums, after in ranks(2).run(recorded_waits, case):
        total = [0, 0]
        for is_quiet, awaited, infos in seen:
            assert is_quiet, "copies are waited for by nobody"
            assert [us for _, us in awaited] == [max(info) for info in infos]
            assert all(info[rank] == us for (rank, us), info in zip(awaited, infos, strict=True))
            total = [sum(values) for values in zip(total, *infos, strict=True)]
        assert sums == total
        assert after == [None, None], "calls that were given none say nothing"
