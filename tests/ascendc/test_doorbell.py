"""No wake is lost between who raises flags and who sleeps until they are there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

EMULATION = Path(__file__).resolve().parents[2] / "kernels_ascendc" / "emulation"
ROUNDS = 4000


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doorbell") / "doorbell"
    source = Path(__file__).with_name("doorbell.cpp")
    command = ["g++", "-std=c++17", "-O2", "-pthread", f"-I{EMULATION}", str(source), "-o", str(path)]
    subprocess.run(command, check=True, timeout=120)
    return path


@pytest.mark.parametrize(("ringers", "sleepers"), [(1, 1), (1, 3), (3, 1), (3, 2)])
def test_no_wake_is_lost(program: Path, ringers: int, sleepers: int) -> None:
    arguments = [str(program), str(ROUNDS), str(ringers), str(sleepers)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(ROUNDS * ringers), str(ROUNDS * sleepers)]
