"""Groups that are destroyed, and processes that end: nothing of ours holds the one or breaks the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moe_triton.processes import RankGroup
from tests.distributed import endings
from tests.patience import seconds

Groups = Callable[[int], RankGroup]


@pytest.mark.parametrize("closes", [False, True])
def test_a_destroyed_group_is_held_by_nobody(ranks: Groups, closes: bool) -> None:
    assert ranks(2).run(endings.holders_of_a_group, closes, seconds(60)) == [[], []]


def exit_codes(num_ranks: int, *call: Any) -> list[int | None]:
    with RankGroup(num_ranks) as group:
        group.run(*call, allow_failures=True, timeout_s=seconds(60))
        for process in group.processes:
            process.join(seconds(30))
        return [process.exitcode for process in group.processes]


@pytest.mark.parametrize("ending", endings.ENDINGS)
def test_a_process_ends_well(ending: str) -> None:
    assert exit_codes(2, endings.end, ending, seconds(60)) == [0, 0]


def test_a_process_ends_well_while_a_thread_is_in_a_store() -> None:
    assert exit_codes(1, endings.end_in_a_thread, 0.2) == [0]
