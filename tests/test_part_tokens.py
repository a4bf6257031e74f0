"""In how many parts an operator runs, and who says so."""

from __future__ import annotations

import pytest

from moe_triton import Tuning
from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config
from moe_triton.schemes.rank_context import RankContext

OVERLAP = Tuning(communication_blocks=24)


def context(tuning: Tuning, tokens: int = 128, target: str = "npu") -> RankContext:
    config = Config(16, tokens, 7168, 8, 256, scheme="fullmesh_v1", relaxed=True)
    return RankContext(config, 0, 48, 1000, CAPABILITIES[target], tuning=tuning)


def test_on_an_npu_there_is_one_part_also_where_streams_overlap() -> None:
    assert [context(OVERLAP, most).parts("combine", most) for most in (16, 128, 256)] == [1, 1, 1]
    assert context(OVERLAP).part_tokens["dispatch"] == (128, "one part, unless set: the fastest by the model")


def test_the_caller_comes_first() -> None:
    found = context(Tuning(dispatch_tokens=8, combine_tokens=64, communication_blocks=1))
    assert [found.parts(operator, 128) for operator in ("dispatch", "combine")] == [16, 2]
    assert found.part_tokens["combine"].source == "Tuning(combine_tokens=64)"


def test_on_an_npu_without_overlap_there_is_one_part_whatever_is_set() -> None:
    found = context(Tuning(dispatch_tokens=8, combine_tokens=8))
    assert [found.parts(operator, 128) for operator in ("dispatch", "combine")] == [1, 1]


@pytest.mark.parametrize("blocks", [0, 24])
def test_on_a_cpu_64_tokens_are_a_part(blocks: int) -> None:
    found = context(Tuning(communication_blocks=blocks), target="cpu")
    assert [found.parts("combine", tokens) for tokens in (0, 64, 65, 128, 129)] == [1, 1, 2, 2, 3]
