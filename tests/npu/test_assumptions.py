"""The checks of what the back end assumes: they hold on the stand-in, and fail where it behaves otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_triton.processes import RankGroup
from moe_triton.tools.selftest.npu_assumptions import ASSUMPTIONS
from tests.npu import assumption_workers
from tests.npu.device import POLICIES

Ranks = Callable[[int], RankGroup]
NAMES = [assumption.name for assumption in ASSUMPTIONS]


def test_each_is_named_once_and_has_a_page() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all(assumption.page for assumption in ASSUMPTIONS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_it_holds_on_the_stand_in(ranks: Ranks, name: str, policy: str) -> None:
    assert ranks(1).run(assumption_workers.check, name, policy) == [None]


@pytest.mark.parametrize(("name", "fault"), assumption_workers.FAULTS.items())
def test_it_fails_where_it_does_not_hold(ranks: Ranks, name: str, fault: str) -> None:
    (found,) = ranks(1).run(assumption_workers.check_with_fault, name, fault)
    assert found


def test_every_assumption_about_running_has_a_fault() -> None:
    assert set(assumption_workers.FAULTS) == set(NAMES) - {"the window library's functions"}
