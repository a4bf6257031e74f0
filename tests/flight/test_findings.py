"""What is said of before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from moe_triton.core.flight_findings import KINDS, Finding, findings
from moe_triton.core.flight_group import Processes
from tests.flight.made import MASKED, REPORTED, Made, MadeRun, S, calls

BEFORE = calls(117)
AT = 10.0
GAVE_UP = MadeRun("dispatch", 117, AT, AT + 5, awaited=(3, 4.98), result=REPORTED)
RUNS = MadeRun("dispatch", 117, AT, None)
WHY = "dispatch number 117 timed out waiting for rank(s) [3]"
BROKEN = [Made(rank, runs=[*BEFORE, GAVE_UP], state="broken", why=WHY) for rank in range(3)]
BARRIER = MadeRun("barrier", 0, AT, None)


def found(*made: Made, **states: str) -> list[Finding]:
    flights = [each.flight() for each in made]
    processes: Processes = {
        (flight.host, flight.pid): states[f"rank{flight.rank}"]  # type: ignore[misc]
        for flight in flights
        if f"rank{flight.rank}" in states
    }
    return findings(flights, processes)


def texts(kind: str, every: Sequence[Finding]) -> list[str]:
    return [each.text for each in every if each.kind == kind]


def test_nothing_is_found_where_all_went_well() -> None:
    assert found(*(Made(rank, runs=BEFORE) for rank in range(4))) == []
    well = replace(GAVE_UP, awaited=None, result=MASKED)
    assert found(*(Made(rank, runs=[*BEFORE, well], state="closed") for rank in range(4))) == []
    assert found(*(Made(rank) for rank in range(4))) == []
    assert findings([]) == []


@pytest.mark.parametrize(
    ("changes", "state", "whereabouts"),
    [
        ({}, "", "last call combine number 116, ended well"),
        ({"state": "closed"}, "", "buffer closed, last call combine number 116, ended well"),
        ({}, "gone", "process gone, last call combine number 116, ended well"),
        ({"runs": []}, "", "no call until now"),
        (
            {"state": "broken", "why": "so"},
            "",
            "buffer broken, last call combine number 116, ended well",
        ),
    ],
)
def test_a_rank_that_never_began_a_call_is_said_first(
    changes: dict[str, object], state: str, whereabouts: str
) -> None:
    absent = replace(Made(3, runs=BEFORE), **changes)  # type: ignore[arg-type]
    first, *others = found(*BROKEN, absent, **({"rank3": state} if state else {}))
    assert first == Finding(
        "missed a call",
        "a1b2c3",
        (3,),
        "rank 3 never began dispatch number 117; ranks 0 to 2 waited 4.98 s for it and gave up; "
        f"rank 3: {whereabouts}",
    )
    assert f"the buffers of ranks 0 to 2 are broken: {WHY}" in [each.text for each in others]


def test_who_still_waits_has_not_given_up() -> None:
    since_ns = Made(0).ns(AT + 1)
    waits = Made(0, runs=[*BEFORE, RUNS], waits_for=[2], said={"since_ns": since_ns, "said_ns": since_ns + S})
    gave_up = Made(1, runs=[*BEFORE, replace(GAVE_UP, awaited=(2, 3.0))])
    every = found(waits, gave_up, Made(2, runs=BEFORE), Made(3, runs=BEFORE))
    assert texts("missed a call", every) == [
        "ranks 2 and 3 never began dispatch number 117; rank 1 waited 3 s for them and gave up; rank 0 has "
        "waited 1 s for them; ranks 2 and 3: last call combine number 116, ended well"
    ]


def test_buffers_are_broken_by_the_same_where_errors_begin_alike() -> None:
    made = [replace(each, why=f"{WHY}. Rank {each.rank} says more. Rebuild.") for each in BROKEN]
    assert texts("broken", found(*made)) == [f"the buffers of ranks 0 to 2 are broken: {WHY}"]


def test_who_goes_on_has_not_begun_a_call_yet() -> None:
    waits = Made(0, 2, runs=[*BEFORE, RUNS], waits_for=[1], said={"said_ns": Made(0).ns(AT + 3)})
    (text,) = texts("missed a call", found(waits, Made(1, 2, runs=BEFORE)))
    assert text.startswith("rank 1 has not begun dispatch number 117; rank 0 has waited 2.99 s for it; ")
    (text,) = texts("missed a call", found(waits, Made(1, 2, runs=BEFORE), rank1="gone"))
    assert text.startswith("rank 1 never began dispatch number 117; rank 0 has waited 2.99 s for it; ")


def test_records_of_more_calls_than_are_kept_are_known_by_their_number() -> None:
    """Of a rank whose newest calls are all barriers, it is known how many dispatches it has made."""
    barriers = [MadeRun("barrier", n, AT + n, AT + n + 0.1) for n in range(300)]
    every = found(*BROKEN, Made(3, runs=[*BEFORE, replace(GAVE_UP, result=0), *barriers]))
    assert texts("missed a call", every) == []


def test_a_process_that_ended_in_a_call_comes_before_all() -> None:
    killed = Made(3, runs=[*BEFORE, replace(RUNS, step=1)])
    every = found(*BROKEN, killed, rank3="gone")
    assert [each.kind for each in every] == ["ended in a call", "broken", "not ended"]
    assert every[0].text == "the process of rank 3 is gone: it ended in dispatch number 117, in step send"
    every = found(*BROKEN, killed, rank3="stopped")
    assert every[0].text == "the process of rank 3 is stopped in dispatch number 117, in step send"


def test_a_process_that_is_gone_between_calls_has_not_closed_its_buffer() -> None:
    every = found(
        *(Made(rank, runs=BEFORE) for rank in range(4)), rank1="gone", rank2="gone", rank3="running"
    )
    assert [(each.kind, each.ranks) for each in every] == [("left", (1, 2))]
    assert every[0].text == (
        "the processes of ranks 1 and 2 are gone, and the buffer was not closed; last call combine number "
        "116, ended well"
    )


@pytest.mark.parametrize("before", [0, 3, 117, 150])
def test_calls_that_differ_are_said_with_those_before(before: int) -> None:
    same = calls(before)
    ranks = [Made(rank, runs=[*same, replace(RUNS, number=before)]) for rank in (0, 1, 3)]
    every = found(*ranks, Made(2, runs=[*same, BARRIER]))
    after = f"after combine number {before - 1}" if before else "at first"
    assert every[0].kind == "different calls"
    assert every[0].ranks == (2,)
    assert every[0].text == (
        f"{after}, ranks 0, 1 and 3 made dispatch number {before} and rank 2 made barrier number 0: calls "
        "must be the same on every rank"
    )


def test_calls_are_compared_from_where_all_have_records() -> None:
    """One is ahead, so that its oldest calls are others: that is no difference."""
    ahead = Made(0, runs=calls(180))
    assert texts("different calls", found(ahead, *(Made(rank, runs=calls(170)) for rank in (1, 2, 3)))) == []
    assert texts("different calls", found(ahead, Made(1, runs=calls(20)))) == []


def test_halves_of_calls_are_one_call() -> None:
    halves = [
        MadeRun("dispatch", 0, 0.0, 0.1, phase="setup"),
        MadeRun("dispatch", 0, 0.2, 0.3, phase="teardown"),
    ]
    whole = [MadeRun("dispatch", 0, 0.0, 0.3)]
    assert found(Made(0, 2, halves), Made(1, 2, whole)) == []


def test_a_call_that_all_began_names_whom_it_waited_for_and_how_late_that_was() -> None:
    late = Made(3, runs=[*BEFORE, replace(GAVE_UP, begin_s=AT + 4.9, end_s=AT + 5, awaited=None)])
    every = found(*BROKEN, late)
    assert texts("not ended", every) == [
        "dispatch number 117 has not ended well on ranks 0 to 3, and no rank with a record missed it; rank 3 "
        "was awaited longest, 4.98 s; it began 4.9 s after the first"
    ]
    in_time = Made(3, runs=[*BEFORE, replace(GAVE_UP, awaited=None)])
    (text,) = texts("not ended", found(*BROKEN, in_time))
    assert text.endswith("rank 3 was awaited longest, 4.98 s")


def test_how_late_a_rank_was_is_by_the_time_of_day_on_other_machines() -> None:
    shift = 500 * S
    far = replace(
        Made(3, runs=[*BEFORE, replace(GAVE_UP, begin_s=AT + 4.9, awaited=None)], host="another"),
        opened_ns=Made(3).opened_ns - shift,
        unix_minus_monotonic_ns=Made(3).unix_minus_monotonic_ns + shift,
    )
    (text,) = texts("not ended", found(*BROKEN, far))
    assert text.endswith("it began 4.9 s after the first")


def test_a_call_that_has_just_begun_is_nothing() -> None:
    assert found(*(Made(rank, runs=[*BEFORE, RUNS]) for rank in range(4))) == []


def test_who_closed_before_others_went_on_is_said() -> None:
    on = [Made(rank, runs=[*BEFORE, replace(RUNS, end_s=AT + 1)]) for rank in range(3)]
    every = found(*on, Made(3, runs=BEFORE, state="closed"))
    assert [(each.kind, each.text) for each in every] == [
        (
            "left",
            "rank 3 closed its buffer, and ranks 0 to 2 went on to dispatch number 117; its last, combine "
            "number 116, ended well",
        )
    ]


@pytest.mark.parametrize(
    ("slow", "others", "said"),
    [
        (60, 0, "rank 2 was awaited longest in 60 of the last 60 rounds, 2.1 ms on average"),
        (54, 6, "rank 2 was awaited longest in 54 of the last 60 rounds, 2.1 ms on average"),
        (47, 13, None),
        (7, 0, None),
    ],
)
def test_a_rank_is_slow_that_is_awaited_longest_in_most_rounds(
    slow: int, others: int, said: str | None
) -> None:
    runs = [
        MadeRun("barrier", n, n / 10, n / 10 + 0.005, awaited=(1 if n >= slow else 2, 0.0021))
        for n in range(slow + others)
    ]
    of_all = [runs, runs, [replace(run, awaited=None) for run in runs]]
    every = found(*(Made(rank, 3, its) for rank, its in enumerate(of_all)))
    assert [(each.kind, each.ranks, each.text) for each in every] == ([("slow", (2,), said)] if said else [])


def test_waits_that_are_a_small_part_of_rounds_make_nobody_slow() -> None:
    runs = [MadeRun("barrier", n, n / 10, n / 10 + 0.05, awaited=(2, 0.0021)) for n in range(20)]
    assert found(*(Made(rank, 3, runs) for rank in range(3))) == []


def test_what_is_missing_is_said_last_and_groups_are_told_apart() -> None:
    every = found(BROKEN[0], replace(BROKEN[1], group="f00"))
    assert [each.kind for each in every][-2:] == ["no record", "no record"]
    assert [each.text for each in every][-2:] == [
        "group a1b2c3: of ranks 1 to 3 there is no record",
        "group f00: of ranks 0, 2 and 3 there is no record",
    ]
    assert [KINDS.index(each.kind) for each in every] == sorted(KINDS.index(each.kind) for each in every)
