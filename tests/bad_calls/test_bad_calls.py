"""Every bad call is refused by an error of ours that says what is wrong, and does no harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moe_triton.processes import RankGroup
from tests.bad_calls.runs import Outcome, run_chain, run_constructions, run_locals
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
CHAINS = ("EPBuffer", "V1", "V2", "norm", "halves", "group")
LEAST = 400
# Of a list of thousands, as many as a quick test has time for.
SOME = 11


def judge(outcomes: list[Outcome]) -> set[str]:
    """The calls that were made, once nothing was wrong."""
    assert [text for outcome in outcomes for text in outcome.wrong] == []
    return {name for outcome in outcomes for name in outcome.names}


def test_bad_calls_on_all_ranks(ranks: Groups, tmp_path: Path) -> None:
    made: dict[str, set[str]] = {}
    for name in CHAINS:
        outcomes = ranks(2).run(run_chain, name, False)
        assert outcomes[0].names == outcomes[1].names
        made[name] = judge(outcomes)
    made["local"] = judge(ranks(2).run(run_locals, str(tmp_path)))
    distinct = set().union(*made.values())
    assert len(distinct) >= 10 * LEAST
    functions = {name.split("(")[0] for name in distinct}
    assert {"EPBuffer.dispatch", "EPBuffer.combine", "get_buffer_size_hint"} < functions
    assert len([function for function in functions if "npu_" in function]) == 11


@pytest.mark.parametrize("name", CHAINS)
def test_bad_calls_on_one_rank(ranks: Groups, name: str) -> None:
    judge(ranks(2).run(run_chain, name, True, SOME))


@pytest.mark.parametrize("alone", [False, True])
def test_bad_constructions(ranks: Groups, tmp_path: Path, alone: bool) -> None:
    judge(ranks(2).run(run_constructions, str(tmp_path), alone, SOME))


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", CHAINS)
def test_every_bad_call_on_one_rank(ranks: Groups, name: str, num_ranks: int) -> None:
    made = judge(ranks(num_ranks).run(run_chain, name, True, timeout_s=seconds(300.0)))
    assert len(made) >= (LEAST if name != "EPBuffer" and name != "group" else LEAST // 4)


@pytest.mark.long
@pytest.mark.parametrize("name", CHAINS)
def test_bad_calls_on_all_of_four_ranks(ranks: Groups, name: str) -> None:
    judge(ranks(4).run(run_chain, name, False, timeout_s=seconds(300.0)))


@pytest.mark.long
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_bad_construction(ranks: Groups, tmp_path: Path, num_ranks: int, alone: bool) -> None:
    judge(ranks(num_ranks).run(run_constructions, str(tmp_path), alone, timeout_s=seconds(600.0)))
