"""Wrong kernels, each with a case that it fails on, and how they are run until they do."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from .announced import CallCase, CallWorld, TablesCase, TablesWorld
from .batches import build_batch, can_share, load_from_batch
from .blocks import BlocksWorld
from .blocks_case import BlocksCase
from .blocks_hostile import HostileBlockCase, check_hostile
from .case import Case, TimedOutError, WrongResultError
from .direct import DirectCase, DirectWorld
from .direct_masking import MaskedLaterCase, check_masked_later
from .direct_missing import MissingCountsCase, check_missing_counts
from .disagreement import DisagreeingCase, check_disagreement
from .driver import World
from .exchange import Exchange
from .fused import FusedCase, FusedWorld, MissingRowsCase, check_missing_rows
from .hierarchy import HierarchyWorld
from .hierarchy_case import HierarchyCase
from .hierarchy_hostile import GoneCase, HostileRailCase, OddCase, check_gone, check_hostile_rail, check_odd
from .hierarchy_words import HostileWordsCase, check_hostile_words
from .library import LaunchError, Library, NoLauncherError, build
from .masking import (
    MaskedBlocksCase,
    MaskedBlocksWorld,
    MaskedCase,
    MaskedDirectCase,
    MaskedDirectWorld,
    MaskedReceivingCase,
    check_masked,
    check_masked_receiving,
)
from .masking_rails import (
    DirectEntriesCase,
    MaskedMeanwhileCase,
    MaskedRailCase,
    check_direct_entries,
    check_masked_meanwhile,
    check_masked_rail,
)
from .mutants import MUTANTS, AnyCase, Mutant
from .mutants_announced import ANNOUNCED_MUTANTS
from .mutants_blocks import BLOCKS_MUTANTS
from .mutants_calls import CALL_MUTANTS
from .mutants_direct import DIRECT_MUTANTS
from .mutants_fused import FUSED_MUTANTS
from .mutants_hierarchy import HIERARCHY_MUTANTS
from .mutants_inband import INBAND_MUTANTS
from .mutants_masking import MASKING_MUTANTS
from .mutants_memory import MEMORY_MUTANTS
from .mutants_offsets import OFFSETS_MUTANTS
from .mutants_parts import PART_MUTANTS
from .mutants_placed import PLACED_MUTANTS
from .mutants_places import PLACE_MUTANTS
from .mutants_posts import POST_MUTANTS
from .mutants_receiving import RECEIVING_MUTANTS
from .mutants_rows import ROW_MUTANTS
from .mutants_split import SPLIT_MUTANTS
from .mutants_words import WORD_MUTANTS
from .mutants_zones import ZONE_MUTANTS
from .offsets import OffsetsCase, check_offsets
from .posts import PostingCase, PostingWorld
from .receiving import MissingCase, ReceivingCase, ReceivingWorld, check_missing
from .split import SplitCase, check_split
from .standing_in import StandingInCase, check_standing_in
from .wrong_places import WrongPlaceCase, check_wrong_place

MOST_SEEDS = 300
PER_BATCH = 12  # a quarter of the time that each would take by itself; more of them save little
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
    PLACED_MUTANTS,
    ROW_MUTANTS,
    FUSED_MUTANTS,
    RECEIVING_MUTANTS,
    BLOCKS_MUTANTS,
    POST_MUTANTS,
    HIERARCHY_MUTANTS,
    ANNOUNCED_MUTANTS,
    MASKING_MUTANTS,
)
ALL = tuple(mutant for kind in KINDS for mutant in kind)
PARAMETERS = [pytest.param(mutant, id=mutant.name.replace(" ", "_")) for mutant in ALL]


def run_case(library: Library, case: AnyCase, seed: int) -> None:
    """Runs what the class of the case stands for; raises if anything is wrong."""
    if isinstance(case, MaskedCase):
        check_masked(library, case, seed)
    elif isinstance(case, MaskedReceivingCase):
        check_masked_receiving(library, case, seed)
    elif isinstance(case, MaskedLaterCase):
        check_masked_later(library, case, seed)
    elif isinstance(case, MaskedDirectCase):
        MaskedDirectWorld(library, case, seed).run()
    elif isinstance(case, MaskedBlocksCase):
        MaskedBlocksWorld(library, case, seed).run()
    elif isinstance(case, MaskedMeanwhileCase):
        check_masked_meanwhile(library, case, seed)
    elif isinstance(case, StandingInCase):
        check_standing_in(library, case, seed)
    elif isinstance(case, DirectEntriesCase):
        check_direct_entries(library, case, seed)
    elif isinstance(case, MaskedRailCase):
        check_masked_rail(library, case, seed)
    elif isinstance(case, OffsetsCase):
        check_offsets(library, case, seed)
    elif isinstance(case, SplitCase):
        check_split(library, case, seed)
    elif isinstance(case, DisagreeingCase):
        check_disagreement(library, case, seed)
    elif isinstance(case, MissingCountsCase):
        check_missing_counts(library, case, seed)
    elif isinstance(case, MissingRowsCase):
        check_missing_rows(library, case, seed)
    elif isinstance(case, WrongPlaceCase):
        check_wrong_place(library, case, seed)
    elif isinstance(case, MissingCase):
        check_missing(library, case, seed)
    elif isinstance(case, ReceivingCase):
        ReceivingWorld(library, case, seed).run()
    elif isinstance(case, PostingCase):
        PostingWorld(library, case, seed).run()
    elif isinstance(case, FusedCase):
        FusedWorld(library, case, seed).run()
    elif isinstance(case, HostileBlockCase):
        check_hostile(library, case, seed)
    elif isinstance(case, BlocksCase):
        BlocksWorld(library, case, seed).run()
    elif isinstance(case, HostileRailCase):
        check_hostile_rail(library, case, seed)
    elif isinstance(case, HostileWordsCase):
        check_hostile_words(library, case, seed)
    elif isinstance(case, GoneCase):
        check_gone(library, case, seed)
    elif isinstance(case, OddCase):
        check_odd(library, case, seed)
    elif isinstance(case, HierarchyCase):
        HierarchyWorld(library, case, seed).run()
    elif isinstance(case, DirectCase):
        DirectWorld(library, case, seed).run()
    elif isinstance(case, CallCase):
        CallWorld(library, case, seed).run()
    elif isinstance(case, TablesCase):
        TablesWorld(library, case, seed).run()
    elif isinstance(case, Case):
        World(library, case, seed).run()
    else:
        Exchange(library, case, seed).run()


DEATHS = (LaunchError, WrongResultError, TimedOutError)
# How a process ends that a mutant was run in.
DIED, ODD = 1, 2


@functools.cache
def launchers_of(case: AnyCase) -> frozenset[str]:
    """Symbols of the launchers that a case calls, found by running it: how that ends is no matter here."""
    library = Library(build(strict=True))
    with contextlib.suppress(Exception):
        run_case(library, case, 0)
    return frozenset(library.called)


def check_killed(mutant: Mutant, others: Sequence[Mutant] = ()) -> None:
    """Fails the test unless a strict build of this mutant fails its case with one of many seeds.

    Args:
        mutant: the wrong kernel.
        others: those that will be checked by this process; some are compiled with it.
    """
    if mutant.may_crash:
        _check_killed_apart(mutant)
        return
    library = _library_of(mutant, others)
    for seed in range(MOST_SEEDS):
        death = _death(library, mutant.case, seed)
        if library.lacked:  # this seed calls another launcher: nobody dies of that
            library = Library(build(strict=True, patches=mutant.patches))
            death = _death(library, mutant.case, seed)
        if death is not None:
            print(f"{mutant.name} | {type(death).__name__} | seed {seed} | {death}")
            return
    pytest.fail(f"survived {MOST_SEEDS} seeds")


def _check_killed_apart(mutant: Mutant) -> None:
    """The same in processes of their own, whose crash is a death too."""
    library = Library(build(strict=True, patches=mutant.patches))
    for seed in range(MOST_SEEDS):
        pid = os.fork()
        if pid == 0:
            faulthandler.disable()
            status = ODD
            try:
                status = DIED if _death(library, mutant.case, seed) else 0
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status != ODD, "the case itself has failed"
        if status:
            print(f"{mutant.name} | seed {seed} | " + (f"signal {-status}" if status < 0 else "an error"))
            return
    pytest.fail(f"survived {MOST_SEEDS} seeds")


def _library_of(mutant: Mutant, others: Sequence[Mutant]) -> Library:
    if not can_share(mutant.patches):
        launchers = launchers_of(mutant.case)
        return Library(build(strict=True, patches=mutant.patches, launchers=launchers))
    sharing = tuple(other for other in others if can_share(other.patches)) or (mutant,)
    number = sharing.index(mutant)
    first = number // PER_BATCH * PER_BATCH
    return load_from_batch(_batch(sharing[first : first + PER_BATCH]), number - first)


@functools.cache
def _batch(mutants: tuple[Mutant, ...]) -> Path:
    return build_batch([(mutant.patches, launchers_of(mutant.case)) for mutant in mutants])


def _death(library: Library, case: AnyCase, seed: int) -> Exception | None:
    try:
        run_case(library, case, seed)
    except (*DEATHS, NoLauncherError) as death:
        return death
    return None
