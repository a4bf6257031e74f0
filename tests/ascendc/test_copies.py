"""The emulation's copies move what they are to, at any length and alignment, and blocks in their order."""

from __future__ import annotations

import subprocess

import pytest

from tests.patience import seconds

from .targets import HERE, TARGETS, Target

SANITIZER = "-fsanitize=address,undefined"


@pytest.mark.parametrize(
    ("target", "option"),
    [
        *(pytest.param(*each.values, "-O3", id=each.id, marks=each.marks) for each in TARGETS),
        pytest.param(HERE, SANITIZER, id="sanitized"),  # which an emulator has no room for
    ],
)
def test_copies_of_every_length(target: Target, option: str) -> None:
    command = target.program("copies", "-O2", option)
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds(120))
    assert done.stdout.split() == ["0", "0", "0", "0", "0"]


def test_streamed_rows_are_there_before_anybody_is_told() -> None:
    command = HERE.program("streamed", "-O2")
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds(120))
    *missing, of_all, of_uncached = map(int, done.stdout.split())
    assert missing == [0] * 13
    assert (of_all, of_uncached) == (3 * 14336, 14336), "the rows were not streamed"
