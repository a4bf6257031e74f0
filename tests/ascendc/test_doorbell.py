"""No wake is lost between who raises flags, or posts, and who sleeps until it does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.patience import seconds

from .library import program

ROUNDS = 4000
POSTS = 100_000
UNTIL_DUE, GATHERING, UNTIL_POSTED = 1, 2, 3  # `Sleep` of post_ring.h


@pytest.fixture(scope="module")
def doorbell() -> Path:
    return program(Path(__file__).with_name("doorbell.cpp").read_text(), "-O2")


@pytest.fixture(scope="module")
def post_bell() -> Path:
    return program(Path(__file__).with_name("post_bell.cpp").read_text(), "-O2")


@pytest.mark.parametrize(("ringers", "sleepers"), [(1, 1), (1, 3), (3, 1), (3, 2)])
def test_no_wake_is_lost(doorbell: Path, ringers: int, sleepers: int) -> None:
    arguments = [str(doorbell), str(ROUNDS), str(ringers), str(sleepers)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=seconds(120))
    assert done.stdout.split() == [str(ROUNDS * ringers), str(ROUNDS * sleepers)]


@pytest.mark.parametrize(
    ("depth", "least"), [(UNTIL_POSTED, UNTIL_POSTED), (UNTIL_POSTED, UNTIL_DUE), (GATHERING, GATHERING)]
)
def test_no_post_is_slept_through(post_bell: Path, depth: int, least: int) -> None:
    arguments = [str(post_bell), str(POSTS), str(depth), str(least)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=seconds(120))
    assert done.stdout.split() == [str(POSTS)]
