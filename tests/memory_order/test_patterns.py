"""Nothing that threads and processes tell each other goes wrong on Arm, as the cross compiler has it."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.ascendc.library import Patch
from tests.patience import seconds

from .compiled import FLAGS, SOURCES, Machine, TornError, build, missing
from .mutants import ENOUGH, MUTANTS, Mutant
from .orders import ALONE, HEADERS, SPARE, Order, has_orders, orders_of, spares_of
from .patterns import BY_NAME, PATTERNS, Pattern

needs_compiler = pytest.mark.skipif(bool(missing()), reason=missing())
BOTH = (True, False)
ORDERS = [order for file in HEADERS for order in orders_of(file)]
ATOMICS = pytest.mark.parametrize("has_lse", BOTH, ids=["LSE", "exclusives"])
# One of each header, so that each run sees the model find some.
FEW = (
    *(
        "no fences around copies, and words of blocks in any order",
        "the wish is written relaxed",
        "the tail is read relaxed",
    ),
    *("the round is read relaxed", "a round of the pool ends relaxed", "Python has no fence"),
)


@needs_compiler
@ATOMICS
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name.replace(" ", "_"))
def test_pattern(pattern: Pattern, has_lse: bool) -> None:
    program = pattern.program(Machine(build(pattern.probe), has_lse))
    assert pattern.ends(program) == []
    # The threads can go their ways, unless it is these that must not go together.
    assert program.allows({}) is ({} not in pattern.never)


def ends_badly(patches: tuple[Patch, ...], name: str, has_lse: bool) -> bool:
    """Whether headers with less order let a pattern end as it must not."""
    pattern = BY_NAME[name]
    try:
        program = pattern.program(Machine(build(pattern.probe, patches), has_lse))
    except TornError:
        return True
    return pattern.ends(program) != []


def check_mutant(mutant: Mutant) -> None:
    """Fails the test unless the model finds what is missing, whichever atomics there are."""
    for name in mutant.patterns:
        assert [ends_badly(mutant.patches, name, has_lse) for has_lse in BOTH] == [True, True], name


@needs_compiler
def test_probes_are_compiled_as_the_library_is(tmp_path: Path) -> None:
    toolchain = tmp_path / "toolchain.cmake"
    toolchain.write_text(
        "set(CMAKE_SYSTEM_NAME Linux)\nset(CMAKE_SYSTEM_PROCESSOR aarch64)\n"
        "set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)\n"
    )
    cmake = Path(sysconfig.get_path("scripts")) / "cmake"
    options = (
        "-G",
        "Ninja",
        "-Wno-dev",
        f"-DCMAKE_TOOLCHAIN_FILE={toolchain}",
        f"-DPython_EXECUTABLE={sys.executable}",
    )
    command = [cmake, "-S", SOURCES, "-B", tmp_path / "build", *options]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds(120))
    commands = json.loads((tmp_path / "build" / "compile_commands.json").read_text())
    (command_line,) = [each["command"] for each in commands if each["file"].endswith("plan_runner.cpp")]
    theirs = {
        word
        for word in command_line.split()
        if word.startswith(("-O", "-f", "-m", "-std", "-DNDEBUG", "-march"))
    }
    # CMake names no standard that the compiler has by itself.
    assert theirs | {"-std=gnu++17"} == set(FLAGS)


@needs_compiler
@pytest.mark.parametrize("name", FEW, ids=lambda name: name.replace(" ", "_"))
def test_some_mutants_are_found(name: str) -> None:
    check_mutant(next(mutant for mutant in MUTANTS if mutant.name == name))


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_mutant_is_found(mutant: Mutant) -> None:
    check_mutant(mutant)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("mutant", ENOUGH, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_what_is_left_is_enough(mutant: Mutant) -> None:
    for name in mutant.patterns:
        assert [ends_badly(mutant.patches, name, has_lse) for has_lse in BOTH] == [False, False], name


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_each_order_is_needed_or_spare(order: Order) -> None:
    """Takes it away alone, and looks at all patterns that its header has part in."""
    names = [pattern.name for pattern in PATTERNS if pattern.probe in HEADERS[order.file]]
    badly = [name for name in names if any(ends_badly((order.patch,), name, lse) for lse in BOTH)]
    spares = spares_of(order)
    assert bool(badly) is not bool(spares), (badly, [spare.why for spare in spares])


def test_orders_are_those_of_all_headers() -> None:
    names = {path.name for path in (SOURCES / "emulation").glob("*.h")}
    assert {name for name in names if has_orders(name)} == HEADERS.keys() | ALONE.keys()
    assert sorted(spare for order in ORDERS for spare in spares_of(order)) == sorted(SPARE)


def test_each_pattern_has_a_mutant() -> None:
    assert {name for mutant in MUTANTS for name in mutant.patterns} == set(BY_NAME)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
