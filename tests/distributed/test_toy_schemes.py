"""A scheme from outside: registered by a line, it runs between real processes and is diagnosed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from moe_triton.processes import RankGroup
from tests.distributed.cases import small_case
from tests.distributed.toy_schemes import compare, keep_outputs, leave_before_combine
from tests.patience import seconds

Groups = Callable[[int], RankGroup]


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_two_windows(ranks: Groups, quantize: str | None) -> None:
    case = replace(small_case(3, "two_windows", quantize=quantize), rounds=6)
    assert ranks(3).run(compare, case, timeout_s=seconds(120.0)) == [[]] * 3


def test_who_is_missing_in_the_second_window(ranks: Groups) -> None:
    case = small_case(3, "two_windows", weights=False)
    found = ranks(3).run(leave_before_combine, case, timeout_s=seconds(60.0))
    assert found == [("combine", (2,)), ("combine", (2,)), None]


def test_three_zones(ranks: Groups) -> None:
    case = replace(small_case(3, "three_zones", quantize="int8", weights=True), rounds=8)
    assert ranks(3).run(compare, case, timeout_s=seconds(120.0)) == [[]] * 3


def test_three_zones_keep_outputs_longer(ranks: Groups) -> None:
    case = small_case(3, "three_zones", weights=False)
    assert ranks(3).run(keep_outputs, case, timeout_s=seconds(120.0)) == [[]] * 3
