"""The emulation's copies move what they are to, at any length and alignment, and blocks in their order."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.patience import seconds
from tests.surroundings import cxx

EMULATION = Path(__file__).resolve().parents[2] / "kernels_ascendc" / "emulation"


@pytest.mark.parametrize("sanitizer", ["-O3", "-fsanitize=address,undefined"])
def test_copies_of_every_length(tmp_path: Path, sanitizer: str) -> None:
    program = tmp_path / "copies"
    source = Path(__file__).with_name("copies.cpp")
    command = [*cxx(), "-std=c++17", "-O2", sanitizer, "-pthread", f"-I{EMULATION}", str(source)]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=seconds(120))
    done = subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=seconds(120))
    assert done.stdout.split() == ["0", "0", "0", "0", "0"]
