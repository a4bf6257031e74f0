"""Masked ranks: nothing is sent to them or awaited from them, and all others go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_triton.processes import run_ranks
from tests.distributed.cases import small_case
from tests.distributed.masked import Masked, rounds_with_masks

SCHEMES = "fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"


@pytest.mark.parametrize("in_between", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_others_go_on(scheme: str, in_between: bool) -> None:
    case = small_case(4, scheme, rounds=5, weights=True)
    of = Masked(case, gone=(2,), before=1, in_between=in_between)
    assert run_ranks(rounds_with_masks, 4, (of, {})) == [[]] * 4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_rank_goes_on_alone(scheme: str) -> None:
    case = replace(small_case(3, scheme, "int8"), rounds=4, weights=True, num_blocks=2)
    of = Masked(case, gone=(0, 2), before=3)
    assert run_ranks(rounds_with_masks, 3, (of, {})) == [[]] * 3
