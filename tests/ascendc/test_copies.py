"""The emulation's copies move what they are to, at any length and alignment, and blocks in their order."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.patience import seconds

from .library import program


@pytest.mark.parametrize("sanitizer", ["-O3", "-fsanitize=address,undefined"])
def test_copies_of_every_length(sanitizer: str) -> None:
    command = [program(Path(__file__).with_name("copies.cpp").read_text(), "-O2", sanitizer)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds(120))
    assert done.stdout.split() == ["0", "0", "0", "0", "0"]


def test_streamed_rows_are_there_before_anybody_is_told() -> None:
    command = [program(Path(__file__).with_name("streamed.cpp").read_text(), "-O2")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds(120))
    *missing, of_all, of_uncached = map(int, done.stdout.split())
    assert missing == [0] * 13
    assert (of_all, of_uncached) == (3 * 14336, 14336), "the rows were not streamed"
