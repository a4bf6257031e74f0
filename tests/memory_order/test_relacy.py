"""Queues, bells and meetings under Relacy, which tries orders that C++ allows, whatever the processor."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.ascendc.library import Patch, patched
from tests.patience import seconds
from tests.surroundings import cxx

from .mutants import MUTANTS

FOLDER = Path(__file__).with_name("relacy")
HAS_RELACY = Path("/usr/include/relacy/relacy.hpp").exists()
needs_relacy = pytest.mark.skipif(not HAS_RELACY, reason="Relacy is missing: apt-get install relacy-dev")
ITERATIONS = 20_000
# Relacy knows no sized delete. Its own code has warnings.
FLAGS = ("-std=gnu++17", "-O0", "-w", "-pthread", "-fno-sized-deallocation")
# A static atomic would be made before there is anything that checks it.
NUMBER_OF_LAUNCHES = Patch(
    "emulation/meeting.h",
    "static inline std::atomic<uint64_t> launches_{0};",
    "static inline uint64_t launches_ = 0;",
)
# By program, mutants that it must find.
FOUND = {
    "post_ring": (
        *("the tail is written relaxed", "the tail is read relaxed", "the head is written relaxed"),
        *("what is delivered is read relaxed", "rings are counted relaxed", "the depth is read relaxed"),
        *("the depth is written relaxed", "rings are read relaxed before a sleep"),
        *("rings are read relaxed before posts", "who wakes the NIC says so too late"),
    ),
    "doorbell": (
        *("the count is relaxed", "the wish is read relaxed", "the wish is written relaxed"),
        *("the last look is relaxed", "who wakes says so too late", "wakes are looked at too late"),
    ),
    "meeting": (
        *("who arrives acquires nothing", "who arrives releases nothing", "the round is released by nobody"),
        *("the round is read relaxed", "arrivals are set back behind the round"),
    ),
}


def check(name: str, patches: tuple[Patch, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Compiles a program with the headers, changed, and runs it."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for path, text in patched((NUMBER_OF_LAUNCHES, *patches)).items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)
        include = [f"-I{folder / each}" for each in ("emulation", "include")]
        program = folder / name
        command = [*cxx(), *FLAGS, f"-I{FOLDER}", *include, str(FOLDER / f"{name}.cpp"), "-o", str(program)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds(120))
        return subprocess.run(
            [program, str(ITERATIONS)], check=False, capture_output=True, text=True, timeout=seconds(120)
        )


@needs_relacy
@pytest.mark.parametrize("name", FOUND)
def test_no_order_is_missing(name: str) -> None:
    done = check(name)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"iterations: {ITERATIONS}" in done.stdout


def _check_found(name: str, mutant: str) -> None:
    (patches,) = [each.patches for each in MUTANTS if each.name == mutant]
    done = check(name, patches)
    # A race, a deadlock, or an assertion: nothing else that could go wrong here counts.
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert any(what in done.stdout for what in ("data race", "DEADLOCK", "ASSERT", "LIVELOCK")), done.stdout[
        -3000:
    ]


@needs_relacy
def test_a_lost_wake_up_is_found() -> None:
    _check_found("post_ring", "the depth is written relaxed")


@pytest.mark.long
@needs_relacy
@pytest.mark.parametrize(("name", "mutant"), [(n, m) for n, found in FOUND.items() for m in found])
def test_mutant_is_found(name: str, mutant: str) -> None:
    _check_found(name, mutant)
