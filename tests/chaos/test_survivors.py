"""Ranks that are lost while others go on: a trial of each strike, and what is told of those that go wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_triton.processes import RankFailedError
from moe_triton.tools.selftest.cases import expected_dispatch
from tests.chaos import survivors
from tests.chaos.lost_ranks import Checked, Life, Round
from tests.chaos.lost_trial import (
    CALLS,
    KINDS,
    ROUNDS,
    STRIKES,
    Account,
    Longest,
    Met,
    Span,
    Trial,
    complaints,
    draw,
    longest,
)
from tests.distributed.cases import Inputs, inputs_of
from tests.patience import UNTIL_MASKED_S

DEAD = RankFailedError({1: "died without an error"})
LOST = Met("RankLostError", "dispatch number 3 cannot go on without rank(s) [1]", (1,))
LATE = Met("CommunicationTimeoutError", "rank(s) [1]", (1,))
TOLD = Met("RankMaskedError", "rank 1 is masked")
FINE, RAISED = Account("mask", (1,)), Account("raise", (), (LOST,))


def trial_of(strike: str, api: str = "EPBuffer", scheme: str = "fullmesh_v1") -> Trial:
    """One that strikes rank 1 of 3."""
    number = KINDS.index((strike, api, scheme))
    drawn = (draw(number + turn * len(KINDS)) for turn in range(1000))
    return next(
        replace(each, victims=(1,), timeout_s=1.0)
        for each in drawn
        if each.case.config.num_ranks == 3 and each.case.config.topology.num_servers == 1
    )


KILL, BACK = trial_of("killed"), trial_of("stopped, continued three rounds later")


def test_every_kind_is_drawn() -> None:
    drawn = [draw(seed) for seed in range(10 * len(KINDS))]
    assert [(each.strike, each.api, each.case.config.scheme) for each in drawn] == KINDS * 10
    servers = {(each.case.config.scheme, each.case.config.topology.sizes) for each in drawn}
    for scheme in ("fullmesh_v1", "fullmesh", "hierarchy"):
        assert {(scheme, (2, 2)), (scheme, (1, 1, 1, 1)), (scheme, (1, 1, 1))} <= servers
    assert {(scheme, (4,)) for _, scheme in CALLS if scheme != "hierarchy"} <= servers
    assert not any(scheme == "hierarchy" and len(sizes) == 1 for scheme, sizes in servers)
    for each in drawn:
        assert len({*each.victims}) == each.what.victims < each.case.config.num_ranks - 1
        assert (0 in each.victims) == each.what.hits_host


def test_a_trial_that_goes_as_it_should_is_survived() -> None:
    assert complaints(KILL, [FINE, DEAD, FINE]) == []
    assert complaints(KILL, [RAISED, DEAD, RAISED]) == []
    assert complaints(BACK, [FINE, Account("mask", (), (TOLD,)), FINE]) == []
    late = replace(RAISED, met=(LATE,))
    assert complaints(BACK, [late, Account("raise", (), (LATE,)), late]) == []
    frozen = replace(trial_of("all frozen, all continued"), victims=())
    assert complaints(frozen, [Account("mask"), Account("raise"), Account("mask")]) == []


@pytest.mark.parametrize(
    ("account", "said"),
    [
        (DEAD, "died without an error"),
        (replace(FINE, masked=()), "has masked ()"),
        (replace(FINE, masked=(1, 2)), "has masked (1, 2)"),
        (replace(FINE, met=(LOST,)), "not 0 errors"),
        (replace(FINE, wrong=("round 4: sums differ",)), "sums differ"),
        (replace(FINE, left_behind=("a window",)), "a window"),
        (replace(RAISED, met=()), "not 1 errors"),
        (replace(RAISED, met=(LATE,)), "not RankLostError"),
        (replace(RAISED, met=(replace(LOST, named=(2,)),)), "does not name rank 1"),
        (replace(RAISED, met=(replace(LOST, named=(1, 2)),)), "names an innocent rank"),
    ],
)
def test_anything_else_is_told(account: Account | RankFailedError, said: str) -> None:
    (complaint,) = complaints(KILL, [FINE, DEAD, account])
    assert said in complaint


@pytest.mark.parametrize(
    ("account", "said"),
    [
        (RankFailedError({1: "no result within 90 s"}), "no result"),
        (Account("mask"), "was not told"),
        (Account("mask", (), (LATE,)), "was not told"),
        (Account("mask", (0,), (TOLD,)), "has masked (0,)"),
        (Account("raise"), "not one error"),
    ],
)
def test_who_was_continued_has_to_be_told(account: Account | RankFailedError, said: str) -> None:
    (complaint,) = complaints(BACK, [FINE, account, FINE])
    assert said in complaint


def test_a_victim_that_was_not_struck_makes_no_trial() -> None:
    (complaint,) = complaints(KILL, [FINE, Account("mask"), FINE])
    assert "was not struck" in complaint


def test_the_latest_call_is_found() -> None:
    def latest(trial: Trial, *calls: Span) -> Longest | None:
        waits = replace(FINE, spans=calls)
        others = replace(FINE, spans=(Span(0, 9.0, 9.5), Span(1, 9.5, 9.75), Span(2, 9.75, 11.5)))
        return longest(trial, [waits, DEAD, others], [10.0])

    assert latest(KILL, Span(5, 9.0, 10.25)) == Longest(1.5, 1.0)  # the other one's
    stopped = trial_of("stopped")
    assert latest(stopped, Span(2, 9.75, 12.0)) == Longest(2.0, 0.5)
    assert latest(stopped, Span(3, 10.0, 12.0)) == Longest(1.5, 0.0)  # the other one's, which held it up
    assert longest(KILL, [FINE, DEAD, FINE], [10.0]) is None


def life_of(trial: Trial, *rounds: Round) -> Life:
    """Rank 0's, with these rounds."""
    life = Life(0, trial)
    life.rounds += [replace(each, members=life.members) for each in rounds]
    return life


def right_round(trial: Trial, number: int, *, without: bool) -> Round:
    """What rank 0 gets of a round by the reference, with rank 1 or without."""
    case = trial.case
    everyone = [inputs_of(case, rank, number) for rank in range(3)]
    own = everyone[0]
    lost = (own.topk_idx // case.config.num_local_experts == 1) & without
    made = Checked(
        trial, 0, Round(number, Life(0, trial).members, own, own.x, own.x, (lost, lost), True, frozenset())
    )
    if without:
        everyone[1] = Inputs(own.x[:0], own.topk_idx[:0], own.topk_weights[:0])
    rows = expected_dispatch(case, everyone)[0].tokens
    masked = frozenset({1}) if without else frozenset[int]()
    return replace(made.round, rows=rows, sums=made.sums_without(lost), masked=masked)


def test_results_are_held_against_the_reference() -> None:
    with_it, before = (right_round(KILL, number, without=False) for number in (2, ROUNDS - 2))
    without, last = (right_round(KILL, number, without=True) for number in (3, ROUNDS - 1))
    assert list(life_of(KILL, with_it, without, last).wrong()) == []
    no_marks = torch.zeros_like(last.lost[1])
    for rounds, said in (
        ((without, before), "rows differ"),  # they have come again
        ((replace(with_it, rows=with_it.rows + 1),), "rows differ"),
        ((replace(with_it, sums=with_it.sums + 1),), "sums differs"),
        ((replace(last, lost=(no_marks, no_marks)),), "sums differs"),
        ((replace(last, masked=frozenset()),), "marks"),
    ):
        assert said in " ".join(life_of(KILL, *rounds).wrong())
    # Who is told what is masked now, and not what a call was without, may have the sums of before.
    summed_before = replace(without, lost=(torch.zeros_like(without.lost[0]), without.lost[1]))
    summed_before = replace(summed_before, sums=right_round(KILL, 3, without=False).sums, rows=without.rows)
    assert list(life_of(KILL, replace(summed_before, of_call=False)).wrong()) == []
    assert list(life_of(KILL, summed_before).wrong()) != []


TAKES_LONG = (
    "stopped, and another one killed a round later",
    "stopped, host of the store",
    "stopped, masked by hand, continued",
)


@pytest.mark.parametrize(
    ("strike", "api", "scheme"),
    [
        pytest.param(
            strike,
            *CALLS[(2 * number) % len(CALLS)],
            marks=pytest.mark.long if strike in TAKES_LONG else (),
            id=strike,
        )
        for number, strike in enumerate(STRIKES)
    ],
)
def test_others_survive(strike: str, api: str, scheme: str) -> None:
    """Nobody is taken for lost that is only slow: time-outs are longer than in `make chaos-survivors`."""
    trial = draw(KINDS.index((strike, api, scheme)))
    longer = UNTIL_MASKED_S if trial.what.is_timed else trial.timeout_s
    assert survivors.run(replace(trial, timeout_s=longer)) == []
