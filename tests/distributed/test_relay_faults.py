"""A2's hierarchy where a relay leaves, or one rank makes other calls: whom the others name."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from moe_triton.core.tuning import Posts
from moe_triton.processes import RankGroup
from tests.distributed.hierarchy_runs import relayed
from tests.distributed.relay_faults import LEAVES, SOON_S, differ, leave
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
TIMEOUT_S = seconds(4)


@pytest.mark.parametrize(
    ("operator", "how", "posts"),
    [
        ("dispatch", "close", "aiv"),
        ("dispatch", "ctrl-c", "aicpu"),
        ("combine", "close", "aicpu"),
        ("combine", "ctrl-c", "aiv"),
    ],
)
def test_a_relay_that_leaves_is_named_and_nobody_else(
    ranks: Groups, operator: str, how: str, posts: Posts
) -> None:
    """It says of nobody that they are missing; the others wait as for any rank that does not come."""
    given = relayed(2, 2), posts, operator, how, TIMEOUT_S
    left, *others = ranks(4).run(leave, *given, timeout_s=SOON_S + 6 * TIMEOUT_S)
    assert left.kind == {"close": "BufferStateError", "ctrl-c": "KeyboardInterrupt"}[how]
    for said in others:
        assert said.kind == "CommunicationTimeoutError"
        assert said.missing == (LEAVES,), said.text
        for within in re.findall(r"within ([\d.]+) s", said.text):
            assert said.waited_s >= float(within), said.text


@pytest.mark.parametrize(
    ("operator", "odd", "num_blocks", "posts"),
    [
        ("combine", 0, 1, "aiv"),
        ("combine", 3, 3, "aicpu"),
        ("dispatch", 0, 3, "aiv"),
        ("dispatch", 3, 1, "aicpu"),
    ],
)
def test_calls_that_differ_on_one_rank_are_told_to_every_server(
    ranks: Groups, operator: str, odd: int, num_blocks: int, posts: Posts
) -> None:
    of = relayed(2, 2, num_blocks=num_blocks)
    for said in ranks(4).run(differ, of, posts, odd, operator, timeout_s=2 * SOON_S):
        assert said.kind == "ConfigMismatchError", said.text
        values = dict(re.findall(r"(\S+) on rank\(s\) (\[[\d, ]+\])", said.text))
        assert len(values) == 2, said.text
        assert values["2" if operator == "combine" else "int8"] == f"[{odd}]", said.text
