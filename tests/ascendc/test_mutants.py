"""Strict mode is worth something only if wrong kernels fail on it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .blocks_hostile import HostileBlockCase
from .case import Case
from .direct_missing import MissingCountsCase
from .disagreement import DisagreeingCase
from .exchange import ExchangeCase
from .fused import MissingRowsCase
from .hierarchy_hostile import GoneCase, HostileRailCase
from .library import Library, patched
from .mutants import AnyCase, Mutant
from .mutation import ALL, PARAMETERS, check_killed, run_case
from .offsets import OffsetsCase
from .orders import orders
from .receiving import MissingCase

# The kernels have tests of their own: most seeds are here to show that what kills a mutant is the mutant.
TRUE_SEEDS = orders(4, 20)


@pytest.mark.long  # seconds to compile each: half of them are in test_other_mutants.py, for another process
@pytest.mark.parametrize("mutant", PARAMETERS[::2])
def test_is_killed(mutant: Mutant, chosen_mutants: tuple[Mutant, ...]) -> None:
    check_killed(mutant, chosen_mutants)


def test_every_mutant_changes_what_is_there() -> None:
    for mutant in ALL:
        patched(mutant.patches)


# What has no deadline, or waits for what does not come: all the time in the world would be waited.
IN_VAIN = (
    OffsetsCase,
    MissingCountsCase,
    MissingRowsCase,
    MissingCase,
    HostileBlockCase,
    HostileRailCase,
    GoneCase,
)


def _true_case(case: AnyCase) -> AnyCase:
    """A mutant's case, with all the time in the world and the right zone."""
    if isinstance(case, IN_VAIN) or (isinstance(case, DisagreeingCase) and case.absent_rank is not None):
        return case
    if isinstance(case, Case):
        return replace(case, slots_read_from=None, timeout_us=Case.timeout_us)
    return replace(case, timeout_us=ExchangeCase.timeout_us)


TRUE_CASES = list(dict.fromkeys(_true_case(mutant.case) for mutant in ALL))


@TRUE_SEEDS
@pytest.mark.parametrize("case", TRUE_CASES, ids=range(len(TRUE_CASES)))
def test_true_kernels_pass_the_same_cases(strict: Library, case: AnyCase, seeds: range) -> None:
    for seed in seeds:
        run_case(strict, case, seed)
