"""All C++ compiles for aarch64 with every warning an error, and what it is compiled with is CMake's own."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from moe_triton.tools.cli.build import find_program
from tests.aarch64.cross import SOURCES, configuration, needs_compiler
from tests.headers import HAS_HEADERS
from tests.patience import seconds

pytestmark = needs_compiler

LIBRARIES = ("moe_kernels", "moe_kernels_counting", "moe_kernels_strict", "moe_calls")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """By library, how each of its sources is compiled. Optimised as little as finds what flow tells."""
    folder = tmp_path_factory.mktemp("cross")
    build = folder / "build"
    command = [find_program("cmake"), "-S", str(SOURCES), "-B", str(build), *configuration(folder)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds(120))
    found: dict[str, list[list[str]]] = {}
    for each in json.loads((build / "compile_commands.json").read_text()):
        words = shlex.split(each["command"])
        at = words.index("-o") + 1
        library = Path(words[at]).parts[1].removesuffix(".dir")
        words[at] = "/dev/null"
        found.setdefault(library, []).append([*words, "-O1"])
    return found


@pytest.mark.parametrize("library", LIBRARIES)
def test_it_compiles_without_a_warning(commands: dict[str, list[list[str]]], library: str) -> None:
    if library == "moe_calls" and not HAS_HEADERS:
        pytest.skip("Python's headers are missing: apt-get install python3-dev")
    for command in commands[library]:
        assert "-Werror" in command
        assert "-march=x86-64-v2" not in command
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds(120))
        assert done.returncode == 0, done.stderr


def test_no_source_is_left_out(commands: dict[str, list[list[str]]]) -> None:
    compiled = {Path(word) for each in commands.values() for command in each for word in command}
    folders = ("host", "calls") if HAS_HEADERS else ("host",)
    sources = {path for folder in folders for path in (SOURCES / folder).glob("*.cpp")}
    assert sources | {SOURCES / "launch" / "moe_kernels.asc"} <= compiled
    assert commands.keys() == set(LIBRARIES if HAS_HEADERS else LIBRARIES[:-1])
