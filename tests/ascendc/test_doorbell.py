"""No wake is lost between who raises flags, or posts, and who sleeps until it does."""

from __future__ import annotations

import subprocess

import pytest

from tests.patience import seconds

from .targets import TARGETS, Target

ROUNDS = 4000
POSTS = 100_000
UNTIL_DUE, GATHERING, UNTIL_POSTED = 1, 2, 3  # `Sleep` of post_ring.h


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("ringers", "sleepers"), [(1, 1), (1, 3), (3, 1), (3, 2)])
def test_no_wake_is_lost(target: Target, ringers: int, sleepers: int) -> None:
    arguments = [*target.program("doorbell", "-O2"), str(ROUNDS), str(ringers), str(sleepers)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=seconds(120))
    assert done.stdout.split() == [str(ROUNDS * ringers), str(ROUNDS * sleepers)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("depth", "least"), [(UNTIL_POSTED, UNTIL_POSTED), (UNTIL_POSTED, UNTIL_DUE), (GATHERING, GATHERING)]
)
def test_no_post_is_slept_through(target: Target, depth: int, least: int) -> None:
    arguments = [*target.program("post_bell", "-O2"), str(POSTS), str(depth), str(least)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=seconds(120))
    assert done.stdout.split() == [str(POSTS)]
