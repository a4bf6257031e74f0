"""Writes between processes by libfabric, with each library that is here."""

from __future__ import annotations

import contextlib
import ctypes.util
import subprocess
from pathlib import Path

import pytest

from moe_triton.backends.cpu import fabric
from moe_triton.core.errors import WindowError
from tests.patience import seconds

from .library import program

SOURCES = Path(__file__).resolve().parents[2] / "kernels_ascendc" / "hosts"


def libraries() -> list[tuple[str, str]]:
    """Those that are installed, each with its provider."""
    found = []
    with contextlib.suppress(WindowError):
        found.append((fabric.find_library({}), fabric.PROVIDERS[0]))
    system = ctypes.util.find_library("fabric")
    if system is not None and (system, fabric.PROVIDERS[0]) not in found:
        found.append((system, fabric.PROVIDERS[1]))
    return found


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("rows", "wrong 0, told 200\n" * 2),
        ("loose", "wrong 0, told 200\n" * 2),
        ("strangers", "changed 0\n" * 2),  # a wrong key, and a write beyond the end
        ("dropped", "lost\nchanged 0\n"),  # in the middle of its writes
        ("ends", "lost\n"),
    ],
)
@pytest.mark.parametrize(
    ("library", "provider"),
    libraries() or [pytest.param("", "", marks=pytest.mark.skip(reason="no libfabric is installed"))],
)
def test_writes_between_processes(library: str, provider: str, case: str, said: str) -> None:
    text = Path(__file__).with_name("fabric.cpp").read_text(encoding="utf-8")
    folders = f"-I{SOURCES}", f"-isystem{SOURCES / 'libfabric'}"
    built = program(text, "-O2", "-Wall", "-Wextra", "-Werror", *folders, "-ldl")
    run = [str(built), library, provider, case]
    done = subprocess.run(run, check=False, capture_output=True, text=True, timeout=seconds(60))
    assert (done.stdout, done.returncode) == (said, 0), done.stderr
