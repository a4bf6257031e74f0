"""Strict mode is worth something only if wrong kernels fail on it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import Case, TimedOutError, WrongResultError
from .direct import DirectCase, DirectWorld
from .direct_missing import MissingCountsCase, check_missing_counts
from .disagreement import DisagreeingCase, check_disagreement
from .driver import World
from .exchange import Exchange, ExchangeCase
from .fused import FusedCase, FusedWorld, MissingRowsCase, check_missing_rows
from .library import LaunchError, Library, build, patched
from .mutants import MUTANTS, AnyCase, Mutant
from .mutants_calls import CALL_MUTANTS
from .mutants_direct import DIRECT_MUTANTS
from .mutants_fused import FUSED_MUTANTS
from .mutants_inband import INBAND_MUTANTS
from .mutants_memory import MEMORY_MUTANTS
from .mutants_offsets import OFFSETS_MUTANTS
from .mutants_parts import PART_MUTANTS
from .mutants_places import PLACE_MUTANTS
from .mutants_receiving import RECEIVING_MUTANTS
from .mutants_rows import ROW_MUTANTS
from .mutants_split import SPLIT_MUTANTS
from .mutants_words import WORD_MUTANTS
from .mutants_zones import ZONE_MUTANTS
from .offsets import OffsetsCase, check_offsets
from .receiving import MissingCase, ReceivingCase, ReceivingWorld, check_missing
from .split import SplitCase, check_split

MOST_SEEDS = 100
# The kernels have tests of their own: most seeds are here to show that what kills a mutant is the mutant.
TRUE_SEEDS = [range(4), pytest.param(range(4, 20), marks=pytest.mark.long)]
KINDS = (
    MUTANTS,
    CALL_MUTANTS,
    INBAND_MUTANTS,
    DIRECT_MUTANTS,
    ZONE_MUTANTS,
    MEMORY_MUTANTS,
    SPLIT_MUTANTS,
    WORD_MUTANTS,
    PART_MUTANTS,
    OFFSETS_MUTANTS,
    PLACE_MUTANTS,
    ROW_MUTANTS,
    FUSED_MUTANTS,
    RECEIVING_MUTANTS,
)
ALL = tuple(mutant for kind in KINDS for mutant in kind)
PARAMETERS = [pytest.param(mutant, id=mutant.name.replace(" ", "_")) for mutant in ALL]


def _run(library: Library, case: AnyCase, seed: int) -> None:
    if isinstance(case, OffsetsCase):
        check_offsets(library, case, seed)
    elif isinstance(case, SplitCase):
        check_split(library, case, seed)
    elif isinstance(case, DisagreeingCase):
        check_disagreement(library, case, seed)
    elif isinstance(case, MissingCountsCase):
        check_missing_counts(library, case, seed)
    elif isinstance(case, MissingRowsCase):
        check_missing_rows(library, case, seed)
    elif isinstance(case, MissingCase):
        check_missing(library, case, seed)
    elif isinstance(case, ReceivingCase):
        ReceivingWorld(library, case, seed).run()
    elif isinstance(case, FusedCase):
        FusedWorld(library, case, seed).run()
    elif isinstance(case, DirectCase):
        DirectWorld(library, case, seed).run()
    elif isinstance(case, Case):
        World(library, case, seed).run()
    else:
        Exchange(library, case, seed).run()


@pytest.mark.long  # seconds to compile each
@pytest.mark.parametrize("mutant", PARAMETERS)
def test_is_killed(mutant: Mutant) -> None:
    library = Library(build(strict=True, patches=mutant.patches))
    for seed in range(MOST_SEEDS):
        try:
            _run(library, mutant.case, seed)
        except (LaunchError, WrongResultError, TimedOutError) as death:
            print(f"{mutant.name} | {type(death).__name__} | seed {seed} | {death}")
            return
    pytest.fail(f"survived {MOST_SEEDS} seeds")


def test_every_mutant_changes_what_is_there() -> None:
    for mutant in ALL:
        patched(mutant.patches)


def _true_case(case: AnyCase) -> AnyCase:
    """A mutant's case, with all the time in the world and the right zone."""
    if isinstance(case, OffsetsCase | MissingCountsCase | MissingRowsCase | MissingCase):
        return case
    if isinstance(case, Case):
        return replace(case, slots_read_from=None, timeout_us=Case.timeout_us)
    return replace(case, timeout_us=ExchangeCase.timeout_us)


TRUE_CASES = list(dict.fromkeys(_true_case(mutant.case) for mutant in ALL))


@pytest.mark.parametrize("seeds", TRUE_SEEDS, ids=["few", "many"])
@pytest.mark.parametrize("case", TRUE_CASES, ids=range(len(TRUE_CASES)))
def test_true_kernels_pass_the_same_cases(strict: Library, case: AnyCase, seeds: range) -> None:
    for seed in seeds:
        _run(strict, case, seed)
