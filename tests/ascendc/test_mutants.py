"""Strict mode is worth something only if wrong kernels fail on it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .driver import Case, TimedOutError, World, WrongResultError
from .library import LaunchError, Library, build
from .mutants import MUTANTS, Mutant

MOST_SEEDS = 100
TRUE_SEEDS = 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_is_killed(mutant: Mutant) -> None:
    library = Library(build(strict=True, patches=mutant.patches))
    for seed in range(MOST_SEEDS):
        try:
            World(library, mutant.case, seed).run()
        except (LaunchError, WrongResultError, TimedOutError) as death:
            print(f"{mutant.name} | {type(death).__name__} | seed {seed} | {death}")
            return
    pytest.fail(f"survived {MOST_SEEDS} seeds")


# The mutants' cases, with all the time in the world and the right zone.
TRUE_CASES = list(
    dict.fromkeys(
        replace(mutant.case, slots_read_from=None, timeout_us=Case.timeout_us) for mutant in MUTANTS
    )
)


@pytest.mark.parametrize("case", TRUE_CASES, ids=range(len(TRUE_CASES)))
def test_true_kernels_pass_the_same_cases(strict: Library, case: Case) -> None:
    for seed in range(TRUE_SEEDS):
        World(strict, case, seed).run()
