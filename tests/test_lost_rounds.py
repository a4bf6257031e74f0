"""Ranks are lost at every step of three ranks' rounds, and the others go on: what `tests.lost_rounds` finds.

Each guard is taken away as well. Which of them matter depends on the fault: some are spare in some rounds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_triton.core.config import Config
from moe_triton.runtime.rounds import Rounds
from moe_triton.schemes import layout_of
from moe_triton.schemes.rank_context import OPERATORS, RoundFacts
from tests.lost_rounds import Case, Form, Model
from tests.lost_rules import NUM_ZONES
from tests.test_rounds import facts, record

V2 = Config(3, 6, 64, 2, 4, scheme="fullmesh_v2", relaxed=True).normalized()
V1 = replace(V2, scheme="fullmesh_v1", version=1)
SHARED = RoundFacts(NUM_ZONES, frozenset(OPERATORS), shared=frozenset({"dispatch", "combine"}))


def own(calls: str, before: str = "", is_sparse: bool = False) -> Form:
    """A combine waits for the results of its own tokens; zones are as they are after some other calls."""
    runs = record(Rounds(facts("fullmesh_v2", "cpu")), before + calls, capturing=False)
    done = {"dispatch": 0, "combine": 0}
    zones = []
    for run in runs:
        zones.append(done[run.operator] % NUM_ZONES if run.zone is None else run.zone)
        done[run.operator] += 1
    shift = 1 if is_sparse else 2
    return Form(
        "own", False, layout_of(V2).wandering, calls, tuple(zones[len(before) :]), 2, shift, is_sparse
    )


def every(calls: str) -> Form:
    """A combine waits for every rank, and has its zones in turn with dispatches."""
    runs = record(Rounds(SHARED), calls, capturing=False)
    zones = [number % NUM_ZONES if run.zone is None else run.zone for number, run in enumerate(runs)]
    return Form("every", True, layout_of(V1).wandering, calls, tuple(zones), 1)


ROUNDS = "DC" * 3
# Two combines in a row, of which rank 2 needs nothing of rank 1.
SPARSE = own("DCCDC", is_sparse=True)

SHORT = {
    "slow or dead": Case(own("DC"), slow=(1,), dies=(1,)),
    "dead in two rounds": Case(own("DCDC"), dies=(1,)),
    "every rank is waited for": Case(every("DC"), slow=(1,)),
    "both slow": Case(own("D"), slow=(1, 2)),
    "cut apart": Case(own("D"), cut=(0,)),
}
LONG = {
    "slow or dead": Case(own(ROUNDS), slow=(1,), dies=(1,)),
    "slow, and the other zone first": Case(own(ROUNDS, before="DC"), slow=(1,)),
    "slow or dead, combines in a row": Case(SPARSE, slow=(1,), dies=(1,)),
    "slow or dead, every rank is waited for": Case(every(ROUNDS), slow=(1,), dies=(1,)),
    "slow, beside a dead one": Case(own(ROUNDS), slow=(1,), gone=(2,)),
    "slow, beside a dead one, every rank is waited for": Case(every("DCDC"), slow=(1,), gone=(2,)),
    "slow, and another one dies": Case(own("DCD"), slow=(1,), dies=(2,)),
    "two are slow": Case(own("DCD"), slow=(1, 2)),
    "two die": Case(own("DCDC"), dies=(1, 2)),
    "cut apart": Case(own("DCD"), cut=(0,)),
}


def check(name: str, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    found = Model(case).explore()
    with capsys.disabled():
        print(f"\n{name}: {found.states} states ", end="")
    assert not found.trouble, found


@pytest.mark.parametrize("name", SHORT)
def test_others_go_on_in_a_round(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, SHORT[name], capsys)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_others_go_on(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, LONG[name], capsys)


OVER, FOR_EVER, INNOCENT = (
    r"sums rank 1's bytes of round 0 instead of",
    "waits for ever",
    "masked without a fault",
)
SLOW, SLOW_EVERY = Case(own(ROUNDS), slow=(1,)), Case(every("DCDC"), slow=(1,))
BESIDE, BESIDE_EVERY = (
    LONG["slow, beside a dead one"],
    LONG["slow, beside a dead one, every rank is waited for"],
)
GUARDS = [
    # Zones have other memory; without it what comes late lies over another rank's bytes.
    ("new memory", SLOW, OVER),
    ("new memory", SLOW_EVERY, OVER),
    # In each zone, for bytes and for flags. Over this round's flag one of an earlier round must not come.
    ("zone 0", SLOW, OVER),
    ("zone 1", Case(own(ROUNDS, before="DC"), slow=(1,)), OVER),
    ("part 0", SLOW, OVER),
    ("part 1", SLOW, INNOCENT),
    # Peers follow.
    ("follow", SLOW, FOR_EVER),
    ("follow", SLOW_EVERY, "takes an entry without rows"),
    # Not before the run has ended: others' bytes are there.
    ("run's end", SLOW, INNOCENT),
    ("run's end", SLOW_EVERY, "sums empty memory"),
    # Not before everybody has heard of the mask: who has not does not follow.
    ("heard", SLOW_EVERY, "takes an entry without rows"),
    ("heard", Case(SPARSE, slow=(1,)), FOR_EVER),
    # Who is masked does not follow: it would write where peers read now.
    ("refused", BESIDE, OVER),
    ("refused", BESIDE_EVERY, OVER),
    # Flags are numbers of rounds. The dead leave flags in memory that nobody renews.
    ("numbers", Case(own(ROUNDS), dies=(1,)), OVER),
    # One set of each number; who is in it names nobody, and ends.
    ("compare_set", Case(own("DC"), cut=(0,)), "have masked each other, and both go on"),
    ("compare_set", Case(own("DC"), slow=(1, 2)), "have masked each other, and both go on"),
    ("names nobody", Case(own("DC"), cut=(0,)), "nobody goes on"),
    ("names nobody", Case(own("DC"), slow=(1,)), INNOCENT),
    ("raise", Case(own("DC"), slow=(1,)), FOR_EVER),
    # Nothing counts that has come of a masked rank in the call; who waits for a third is not masked.
    ("leave out", Case(own("D"), slow=(1,)), "takes rows of"),
    ("notes", Case(own("DC"), slow=(1,)), INNOCENT),
]
QUICK_GUARDS = {"run's end", "compare_set", "raise", "leave out", "notes"}


def without(guard: str, case: Case, trouble: str) -> None:
    found = Model(replace(case, without=guard)).explore()
    assert trouble in found.trouble
    print(found)


@pytest.mark.parametrize(("guard", "case", "trouble"), [each for each in GUARDS if each[0] in QUICK_GUARDS])
def test_a_guard_is_needed_in_a_round(guard: str, case: Case, trouble: str) -> None:
    without(guard, case, trouble)


@pytest.mark.long
@pytest.mark.parametrize(
    ("guard", "case", "trouble"), [each for each in GUARDS if each[0] not in QUICK_GUARDS]
)
def test_a_guard_is_needed(guard: str, case: Case, trouble: str) -> None:
    without(guard, case, trouble)


@pytest.mark.long
@pytest.mark.parametrize(
    ("guard", "case"),
    [
        # New memory has no flags: only what is not renewed keeps those of another round.
        ("numbers", SLOW),
        # Between two combines in a zone lie two dispatches. The slow rank cannot post in both of them, as
        # those who mask it post nothing to it; so everybody has heard.
        ("heard", SLOW),
        # Who knows of no other mask follows nobody anyway.
        ("refused", SLOW),
    ],
)
def test_a_guard_is_spare_in_these_rounds(guard: str, case: Case) -> None:
    assert not Model(replace(case, without=guard)).explore().trouble
