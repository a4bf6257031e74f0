"""Every bad call is refused by an error of ours that says what is wrong, and does no harm."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_triton.processes import RankGroup
from tests.bad_calls.runs import run_chain

Groups = Callable[[int], RankGroup]
CHAINS = ("EPBuffer", "V1", "V2", "norm", "halves", "group")


@pytest.mark.parametrize("name", CHAINS)
def test_bad_calls_on_all_ranks(ranks: Groups, name: str) -> None:
    for outcome in ranks(2).run(run_chain, name, False):
        assert outcome.wrong == []


@pytest.mark.parametrize("name", CHAINS)
def test_bad_calls_on_one_rank(ranks: Groups, name: str) -> None:
    for outcome in ranks(2).run(run_chain, name, True, 7):
        assert outcome.wrong == []
