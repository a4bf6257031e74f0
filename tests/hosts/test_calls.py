"""A buffer's other calls on ranks that share no memory."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import namespaces
from tests.hosts import calls
from tests.patience import seconds

pytestmark = [
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "there are hosts"),
    pytest.mark.long,
]
HOSTS = 2, 2
HAS_CLOCKS = Path("/proc/self/ns/time").exists()


@cache
def found_by_ranks() -> list[Any]:
    """What each rank has found; one job does for several tests."""
    return namespaces.run(calls.everything, HOSTS, timeout_s=seconds(60))


def test_calls_of_a_buffer() -> None:
    for each in found_by_ranks():
        found = dict(each["calls"])
        assert "out_bytes is None, but ranks are on several hosts" in found.pop("refused")
        assert found == {
            "states": ["alive"] * 4,
            "two buffers": [True] * 3,
            "left": ["0", "1", "2", "3"],
            **dict.fromkeys(("hint", "exact", "rounds", "handle", "later", "un-masked", "once more"), True),
        }


def test_weights_of_experts_move_between_hosts() -> None:
    assert [each["moves"] for each in found_by_ranks()] == [[]] * 4


@pytest.mark.skipif(not HAS_CLOCKS, reason="the kernel has no namespaces of time")
def test_who_has_not_come_is_named_whatever_clocks_show() -> None:
    given = {"timeout_s": seconds(60), "clocks": (0, 7200)}
    named = namespaces.run(calls.without_one, HOSTS, 3, **given)
    assert named == [[3], [3], [3], []]
