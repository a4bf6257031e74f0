"""No wake is lost between who raises flags, or posts, and who sleeps until it does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.patience import seconds
from tests.surroundings import cxx

EMULATION = Path(__file__).resolve().parents[2] / "kernels_ascendc" / "emulation"
ROUNDS = 4000
POSTS = 100_000
UNTIL_DUE, GATHERING, UNTIL_POSTED = 1, 2, 3  # `Sleep` of post_ring.h


def _built(folder: Path, name: str) -> Path:
    path, source = folder / name, Path(__file__).with_name(f"{name}.cpp")
    command = [*cxx(), "-std=c++17", "-O2", "-pthread", f"-I{EMULATION}", str(source), "-o", str(path)]
    subprocess.run(command, check=True, timeout=seconds(120))
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built(tmp_path_factory.mktemp("doorbell"), "doorbell")


@pytest.fixture(scope="module")
def post_bell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built(tmp_path_factory.mktemp("post_bell"), "post_bell")


@pytest.mark.parametrize(("ringers", "sleepers"), [(1, 1), (1, 3), (3, 1), (3, 2)])
def test_no_wake_is_lost(program: Path, ringers: int, sleepers: int) -> None:
    arguments = [str(program), str(ROUNDS), str(ringers), str(sleepers)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=seconds(120))
    assert done.stdout.split() == [str(ROUNDS * ringers), str(ROUNDS * sleepers)]


@pytest.mark.parametrize(
    ("depth", "least"), [(UNTIL_POSTED, UNTIL_POSTED), (UNTIL_POSTED, UNTIL_DUE), (GATHERING, GATHERING)]
)
def test_no_post_is_slept_through(post_bell: Path, depth: int, least: int) -> None:
    arguments = [str(post_bell), str(POSTS), str(depth), str(least)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=seconds(120))
    assert done.stdout.split() == [str(POSTS)]
