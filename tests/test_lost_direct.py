"""Ranks are lost at every step of rounds of `direct`, and the others go on: what `tests.lost_direct` finds.

Each guard is taken away as well. Those on who is masked are the same in all schemes
(`tests.test_lost_rounds`).
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_triton.core.config import Config
from moe_triton.operators.variants import DispatchVariant
from moe_triton.runtime.repeated_dispatch import RepeatedDispatch, Together
from moe_triton.runtime.rounds import Rounds
from moe_triton.schemes import layout_of
from moe_triton.schemes.direct.ascendc import DIRECT_SEND
from moe_triton.schemes.direct.scheme import WAIT_FOR_COUNTS
from tests.lost_direct import Case, Model
from tests.test_rounds import facts, record

WANDERING = layout_of(Config(3, 6, 64, 2, 4, scheme="direct", relaxed=True).normalized()).wandering


def case(calls: str, before: str = "", **faults: Any) -> Case:
    """Calls in the zones that they have after some others."""
    runs = record(Rounds(facts("direct", "cpu")), before + calls, capturing=False)
    zones = [run.zone for run in runs[len(before) :] if run.zone is not None]
    return Case(WANDERING, calls, tuple(zones), **faults)


ROUNDS = "DC" * 3
SLOW, DIES = case("D", slow=(1,)), case("D", dies=(1,))
# Two have the counts of a rank that is gone, and the third one dies too; but for notices nobody hears of it.
OF_FOUR = case("D", num_ranks=4, gone=(3,), told=(0, 1), dies=(2,), has_store=False)
# Who is slow lies before the only one that is left.
BESIDE = case("D", slow=(0,), gone=(2,))

SHORT = {
    "slow": SLOW,
    "two die, and the store's host": case("D", dies=(1, 2), has_store=False),
}
LONG = {
    "slow": case(ROUNDS, slow=(1,)),
    "slow or dead": case("DC", slow=(1,), dies=(1,)),
    "slow, beside a dead one": BESIDE,
    "slow, beside a dead one of which one has counts": case("D", slow=(1,), gone=(2,), told=(0,)),
    "two die, and the store's host": case(ROUNDS, dies=(1, 2), has_store=False),
    "two of four die, and the store's host": OF_FOUR,
}


def check(name: str, of: Case, capsys: pytest.CaptureFixture[str]) -> None:
    found = Model(of).explore()
    with capsys.disabled():
        print(f"\n{name}: {found.states} states ", end="")
    assert not found.trouble, found


@pytest.mark.parametrize("name", SHORT)
def test_others_go_on_in_a_dispatch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, SHORT[name], capsys)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_others_go_on(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, LONG[name], capsys)


OVER = "takes bytes of rank 1 in {}, attempt 0 among its {} for those of rank 2"
LATE, FOR_EVER, INNOCENT = OVER.format(0, "rows"), "waits for ever", "masked without a fault"
GUARDS = [
    # All who send agree on whose counts count: those who have others give up, before or behind their rows.
    ("sets", DIES, "takes nothing among its rows"),
    ("gives up", SLOW, "takes nothing among its rows"),
    # Who gives up tells the others, and all do the same. Whoever calls off has said so where it is settled.
    ("recall", SLOW, INNOCENT),
    ("first word", OF_FOUR, FOR_EVER),
    ("attempt", OF_FOUR, FOR_EVER),
    ("recall first", OF_FOUR, "rank 0 raises without a fault"),
    # Nothing of an attempt is left when the next one begins.
    ("meet", SLOW, FOR_EVER),
    ("meet again", SLOW, INNOCENT),
    ("clear", SLOW, FOR_EVER),
    # Rows have other memory, and stamps, in each zone; and peers write there.
    ("new memory", SLOW, LATE),
    ("zone 0", SLOW, LATE),
    ("zone 1", case("D", before="DC", slow=(1,)), LATE),
    ("part 0", SLOW, LATE),
    ("part 1", SLOW, OVER.format(0, "stamps")),
    ("follow", SLOW, "takes nothing among its rows"),
    # Who is masked does not follow.
    ("refused", BESIDE, "rank 1 takes bytes of rank 0 in 0, attempt 0 among its rows for those of rank 1"),
    # Of a masked rank all rows are taken, or none; results are where all have computed that they are.
    ("out", SLOW, "takes nothing among its rows for those of rank 1"),
    ("sent", case("DC", slow=(1,)), "rank 2 sums results in combine 0 that are not its own"),
    # Who is masked may read what is of two rounds later.
    ("read", LONG["slow"], "rank 1 sums results in combine 0 that are not its own"),
]
QUICK_GUARDS = {"gives up", "recall", "out", "new memory", "part 1"}


def without(guard: str, of: Case, trouble: str) -> None:
    found = Model(replace(of, without=guard)).explore()
    assert trouble in found.trouble
    print(found)


@pytest.mark.parametrize(("guard", "of", "trouble"), [each for each in GUARDS if each[0] in QUICK_GUARDS])
def test_a_guard_is_needed_in_a_dispatch(guard: str, of: Case, trouble: str) -> None:
    without(guard, of, trouble)


@pytest.mark.long
@pytest.mark.parametrize(("guard", "of", "trouble"), [each for each in GUARDS if each[0] not in QUICK_GUARDS])
def test_a_guard_is_needed(guard: str, of: Case, trouble: str) -> None:
    without(guard, of, trouble)


@pytest.mark.long
@pytest.mark.parametrize(
    ("guard", "of"),
    [
        # Who sends by other counts than a peer is found out by either entry.
        ("sets of counts", DIES),
        ("sets of rows", DIES),
        # All operators wait for every rank, so that nobody comes to the zone again without having heard.
        ("heard", SLOW),
    ],
)
def test_a_guard_is_spare_in_a_dispatch(guard: str, of: Case) -> None:
    assert not Model(replace(of, without=guard)).explore().trouble


class Ran:
    """A dispatch that has stopped, and what the library does then, in its order."""

    def __init__(self, gives_up: bool) -> None:
        self.steps: list[str] = []
        launch = SimpleNamespace(kernel=DIRECT_SEND)
        self.failed_launch = SimpleNamespace(step=WAIT_FOR_COUNTS) if gives_up else None
        self.ran = [[launch]]

    def does(self, step: str, returns: Any = None) -> Any:
        """Something that takes a step."""

        def do(*_: Any, **told: Any) -> Any:
            self.steps.append(step)
            return told.get("repeat", returns)

        return do

    def go_on(self) -> list[str]:
        """What comes before the dispatch runs again, or goes on."""
        variant = DispatchVariant(torch.bfloat16)
        region: Any = SimpleNamespace(offset=self.does("clear", 0), stride=lambda of: 0)
        scheme: Any = SimpleNamespace(context=None, statuses=(("dispatch", region),))
        masks: Any = SimpleNamespace(known=SimpleNamespace(masked=frozenset({1})))
        fixed = {"window": torch.zeros(1, dtype=torch.uint8)}
        run: Any = RepeatedDispatch(scheme, masks, fixed, {}, variant, owns_ids=False)
        run._drop_rows = self.does("drop")
        recall = SimpleNamespace(run=self.does("recall", 0))
        executables: Any = SimpleNamespace(
            key_of=lambda of: (variant, 0, "whole", 1), operator=lambda *key: recall
        )
        outcomes: Any = SimpleNamespace(settle=self.does("settle"))
        steps = self.does("learn"), self.does("meet"), self.does("renew"), self.does("fence")
        self.run, self.resume = self.does("run", 0), self.does("resume", 0)
        plan: Any = self
        assert run.go_on(7, plan, executables, Together(*steps, outcomes, 1.0)) == 0
        return self.steps


def test_steps_are_those_that_the_library_takes() -> None:
    """In the model "settle" learns first, "keep" renews and drops, "met again" learns; a "meet" is one."""
    kinds = [step.kind for step in Model(SLOW)._programmes[0]]
    aside = kinds[kinds.index("recall") :]
    assert aside == ["recall", "meet", "met", "clear", "renew", "again", "met again"]
    repeated = ["learn", "settle", "recall", "meet", "clear", "renew", "fence", "meet", "learn", "run"]
    assert Ran(gives_up=True).go_on() == repeated
    assert Ran(gives_up=False).go_on() == ["learn", "settle", "renew", "drop", "resume"]
