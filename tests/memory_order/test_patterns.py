"""Nothing that threads and processes tell each other goes wrong on Arm, as the cross compiler has it."""

from __future__ import annotations

import pytest

from .compiled import Machine, TornError, build, missing
from .mutants import MUTANTS, SPARE, Mutant, Spare
from .patterns import BY_NAME, PATTERNS, Pattern

needs_compiler = pytest.mark.skipif(bool(missing()), reason=missing())
ATOMICS = pytest.mark.parametrize("has_lse", [True, False], ids=["LSE", "exclusives"])
# One of each header, so that each run sees the model find some.
FEW = (
    *("no fences around copies", "the wish is written relaxed", "the tail is read relaxed"),
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


def ends_badly(mutant: Mutant | Spare, name: str, has_lse: bool) -> bool:
    """Whether headers with less order let a pattern end as it must not."""
    pattern = BY_NAME[name]
    try:
        program = pattern.program(Machine(build(pattern.probe, mutant.patches), has_lse))
    except TornError:
        return True
    return pattern.ends(program) != []


def check_mutant(mutant: Mutant) -> None:
    """Fails the test unless the model finds what is missing, whichever atomics there are."""
    for name in mutant.patterns:
        assert [ends_badly(mutant, name, has_lse) for has_lse in (True, False)] == [True, True], name


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
@pytest.mark.parametrize("spare", SPARE, ids=lambda spare: spare.name.replace(" ", "_"))
def test_what_is_spare_is_not_needed(spare: Spare) -> None:
    for name in spare.patterns:
        assert [ends_badly(spare, name, has_lse) for has_lse in (True, False)] == [False, False], name


def test_each_pattern_has_a_mutant() -> None:
    assert {name for mutant in MUTANTS for name in mutant.patterns} == set(BY_NAME)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
