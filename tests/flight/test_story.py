"""What is said of a moment: each rank's line, and who holds up all others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from moe_triton.core.flight_group import Processes
from moe_triton.core.flight_story import status_lines, verdict
from tests.flight.made import OPENED_NS, REPORTED, Made, MadeRun, S, calls

BEFORE = calls(117)
AT = 10.0
NOW_NS = OPENED_NS + 15 * S
DISPATCH = MadeRun("dispatch", 117, AT, None)
BARRIER = MadeRun("barrier", 5, AT, None)
IDLE = "which has been in no call for 12.7 s"
CALL = "(dispatch number 117, for 4.99 s)"


def waiting(rank: int, *ranks: int, run: MadeRun = DISPATCH, **said: object) -> Made:
    return Made(rank, runs=[*BEFORE, run], waits_for=ranks, said=said)


def idle(rank: int, **more: object) -> Made:
    return replace(Made(rank, runs=BEFORE), **more)  # type: ignore[arg-type]


def lines_of(*made: Made, processes: Processes | None = None) -> list[str]:
    return status_lines([each.flight() for each in made], NOW_NS, processes)


def verdict_of(*made: Made, processes: Processes | None = None) -> list[str]:
    return verdict([each.flight() for each in made], NOW_NS, processes)


def process_of(made: Made, state: str) -> Processes:
    flight = made.flight()
    return {(flight.host, flight.pid): state}  # type: ignore[dict-item]


def test_a_line_says_the_call_and_whom_it_waits_for() -> None:
    said: Mapping[str, object] = {
        "awaited": "12 of 64 tokens",
        "num_bytes": 1_234_567,
        "queues": {"3": 2, "1": 0},
        "said_ns": NOW_NS - S // 10,
    }
    assert lines_of(waiting(0, 3, **said)) == [
        "rank 0 (process 1000000): in dispatch number 117 (zone 0, step wait) for 5 s; it has waited 4.99 s "
        "for rank 3, 12 of 64 tokens, 1.23 MB at most; posts that its queues still hold: 2 for rank 3"
    ]


@pytest.mark.parametrize(
    ("made", "state", "ending"),
    [
        (Made(1, runs=calls(2)), None, "in no call for 15 s; its last, combine number 1, ended well"),
        (Made(1), None, "in no call for 15 s; no call until now"),
        (
            replace(waiting(1), waits_for=None),
            None,
            "in dispatch number 117 (zone 0, step wait) for 5 s; it has not said whom it waits for",
        ),
        (waiting(1), None, "for 5 s; it waits for no rank; it said so 4.99 s ago"),
        (
            waiting(1, run=replace(DISPATCH, phase="setup"), group="tensor"),
            None,
            "in dispatch number 117 (setup, zone 0, step wait) for 5 s; it has waited 4.99 s for its "
            "tensor-parallel peer; it said so 4.99 s ago",
        ),
        (waiting(1, 2), "gone", "its process is gone; it ended in dispatch number 117 (zone 0, step wait)"),
        (
            waiting(1, 2, said_ns=NOW_NS),
            "stopped",
            "its process is stopped; in dispatch number 117 (zone 0, step wait) for 5 s; it has waited 4.99 "
            "s for rank 2",
        ),
        (
            Made(1, runs=[replace(DISPATCH, end_s=14, result=REPORTED)], state="broken", why="it\ntimed out"),
            "running",
            "its buffer is broken: it timed out; in no call for 1 s; its last, dispatch number 117, ended in "
            "an error, or was stopped",
        ),
        (idle(1, state="closed"), None, "its buffer is closed; in no call for 12.7 s; its last, combine"),
    ],
)
def test_a_line_says_what_a_rank_does(made: Made, state: str | None, ending: str) -> None:
    (line,) = lines_of(made, processes=process_of(made, state) if state else None)
    assert line.startswith("rank 1 (process 1000001): ")
    assert ending in line


def test_lines_are_of_groups_where_there_are_several_and_of_the_newest_record() -> None:
    other = replace(idle(0), group="f00", runs=calls(1))
    older = replace(idle(1), runs=calls(1))
    lines = lines_of(waiting(1, 0), other, idle(0), older)
    assert [line.partition(" (")[0] for line in lines] == [
        "rank 0 of group a1b2c3",
        "rank 1 of group a1b2c3",
        "rank 0 of group f00",
    ]
    assert "dispatch number 117" in lines[1]


def test_buffers_that_have_not_met_others_are_no_group() -> None:
    alone = [replace(idle(0), group="", pid=pid).flight() for pid in (1, 2)]
    alone[1] = replace(alone[1], source="another")
    lines = status_lines(alone, NOW_NS)
    assert [line.partition(": ")[0] for line in lines] == [
        "rank 0 of a group that has not met yet (process 1)",
        "rank 0 of a group that has not met yet (process 2)",
    ]


THREE = [waiting(rank, 3) for rank in range(3)]


@pytest.mark.parametrize(
    ("made", "state", "said"),
    [
        (idle(3), None, f"ranks 0 to 2 wait for rank 3, {IDLE} {CALL}"),
        (idle(3), "running", f"ranks 0 to 2 wait for rank 3, {IDLE} {CALL}"),
        (idle(3), "gone", f"ranks 0 to 2 wait for rank 3, whose process is gone {CALL}"),
        (
            waiting(3, 0),
            "gone",
            f"ranks 0 to 2 wait for rank 3, whose process is gone since dispatch number 117 {CALL}",
        ),
        (waiting(3, 0), "stopped", f"ranks 0 to 2 wait for rank 3, which is stopped {CALL}"),
        (idle(3, state="closed"), None, f"ranks 0 to 2 wait for rank 3, whose buffer is closed {CALL}"),
        (
            idle(3, state="broken", why="it met a row that names no place"),
            None,
            "ranks 0 to 2 wait for rank 3, whose buffer is broken: it met a row that names no place",
        ),
        (
            waiting(3, 0, 1, 2, run=BARRIER),
            None,
            "ranks 0 to 2 wait for rank 3, which is in another call: barrier number 5 while others are in "
            f"dispatch number 117 {CALL}",
        ),
        (
            waiting(3, run=BARRIER),
            None,
            "ranks 0 to 2 wait for rank 3, which is in another call: barrier number 5 while others are in "
            f"dispatch number 117 {CALL}",
        ),
        (
            waiting(3),
            None,
            f"ranks 0 to 2 wait for rank 3, which is in the same call, and not known to wait {CALL}",
        ),
        (None, None, f"ranks 0 to 2 wait for rank 3, of which there is no record {CALL}"),
    ],
)
def test_the_culprit_is_said_in_a_line(made: Made | None, state: str | None, said: str) -> None:
    everybody = [*THREE, *([made] if made else [])]
    (line,) = verdict_of(*everybody, processes=process_of(made, state) if made and state else None)
    assert line.startswith(said)


def test_who_waits_for_others_that_wait_is_none() -> None:
    (line,) = verdict_of(waiting(0, 1), waiting(1, 2), waiting(2, 3), idle(3))
    assert line == f"ranks 0 to 2 wait for rank 3, {IDLE} {CALL}"


def test_several_culprits_are_told_apart_by_what_they_do() -> None:
    stopped = idle(3)
    (line,) = verdict_of(
        waiting(0, 2, 1), idle(1), idle(2), stopped, processes=process_of(stopped, "stopped")
    )
    assert line == f"rank 0 waits for ranks 1 and 2, which have been in no call for 12.7 s {CALL}"
    (line,) = verdict_of(
        waiting(0, 3, 1), idle(1), idle(2), stopped, processes=process_of(stopped, "stopped")
    )
    assert line == f"rank 0 waits for rank 1, {IDLE}, and for rank 3, which is stopped {CALL}"


def test_who_has_said_nothing_seems_to_wait_for_those_behind() -> None:
    silent = [replace(waiting(rank), waits_for=None) for rank in (0, 1)]
    (line,) = verdict_of(*silent, idle(3))
    assert line == (
        f"ranks 0 and 1 seem to wait for rank 3, {IDLE} (dispatch number 117, for 5 s); "
        "of rank 2 there is no record"
    )
    (line,) = verdict_of(*silent)
    assert line == (
        "ranks 0 and 1 seem to wait for ranks 2 and 3, of which there is no record (dispatch number 117, for "
        "5 s)"
    )


def test_ranks_of_one_call_that_wait_for_each_other_are_no_circle_of_groups() -> None:
    (line,) = verdict_of(waiting(0, 1), waiting(1, 0), idle(2), idle(3))
    assert line == (
        "ranks 0 and 1 wait for each other in dispatch number 117, for 4.99 s: what they posted there has "
        "not all come"
    )


def in_two_groups(*, second: Sequence[int] = (0, 1)) -> list[Made]:
    """Two processes: one is in a dispatch of group A, and the other in a combine of group B.

    Args:
        second: their ranks in B.
    """
    of_a = [MadeRun("dispatch", n, n, n + 0.5) for n in range(4)]
    of_b = [MadeRun("combine", n, n, n + 0.5) for n in range(7)]
    first, other = second
    return [
        Made(0, 2, [*of_a, MadeRun("dispatch", 4, 5, None)], waits_for=[1], group="A", pid=10),
        Made(1, 2, of_a, group="A", pid=11),
        Made(first, 2, of_b, group="B", pid=10),
        Made(other, 2, [*of_b, MadeRun("combine", 7, 8, None)], waits_for=[first], group="B", pid=11),
    ]


def test_a_circle_of_two_groups_is_said_once() -> None:
    assert verdict_of(*in_two_groups()) == [
        "rank 0 waits for rank 1 in group A (dispatch number 4), and rank 1 for rank 0 in group B "
        "(combine number 7): a circle"
    ]


def test_a_circle_says_processes_where_they_are_other_ranks_in_other_groups() -> None:
    assert verdict_of(*in_two_groups(second=(1, 0))) == [
        "rank 0 (process 10) waits for rank 1 (process 11) in group A (dispatch number 4), and rank 0 "
        "(process 11) for rank 1 (process 10) in group B (combine number 7): a circle"
    ]


def test_processes_of_two_machines_are_not_taken_for_each_other() -> None:
    of_a0, of_a1, of_b0, of_b1 = in_two_groups()
    elsewhere = [replace(of_b0, host="another"), replace(of_b1, host="another")]
    lines = verdict_of(of_a0, of_a1, *elsewhere)
    assert [line.partition(",")[0] for line in lines] == [
        "group A: rank 0 waits for rank 1",
        "group B: rank 1 waits for rank 0",
    ]
    assert "circle" not in str(lines)


def test_a_rank_that_is_in_another_group_s_call_is_said_to_be_there() -> None:
    of_a0, of_a1, of_b0, of_b1 = in_two_groups()
    lines = verdict_of(of_a0, of_a1, replace(of_b0, pid=12), of_b1)
    assert lines == [
        "group A: rank 0 waits for rank 1, which is in combine number 7 of group B (dispatch number 4, for "
        "9.99 s)",
        "group B: rank 1 waits for rank 0, which has been in no call for 8.5 s (combine number 7, for "
        "6.99 s)",
    ]


def test_a_third_rank_is_told_of_beside_a_circle() -> None:
    of_a0, of_a1, *of_b = in_two_groups()
    third = replace(of_a0, rank=2, num_ranks=4, pid=12, waits_for=[3])
    lines = verdict_of(replace(of_a0, num_ranks=4), replace(of_a1, num_ranks=4), third, *of_b)
    assert lines[0].endswith(": a circle")
    assert lines[1:] == [
        "group A: rank 2 waits for rank 3, of which there is no record (dispatch number 4, for 9.99 s)"
    ]


def test_that_nobody_waits_is_said_with_what_all_do() -> None:
    gone = idle(3)
    broken = idle(2, state="broken", why="so")
    peer = waiting(1, 0, group="tensor")
    (line,) = verdict_of(idle(0), peer, broken, gone, processes=process_of(gone, "gone"))
    assert line == (
        "nobody waits for another rank (rank 0: in no call; rank 1: in dispatch number 117, for its "
        "tensor-parallel peer; rank 2: buffer broken; rank 3: process gone)"
    )
    assert verdict_of() == []


def test_ranks_that_do_not_exist_are_not_waited_for() -> None:
    (line,) = verdict_of(waiting(0, 0, 7, -1), idle(1), idle(2), idle(3))
    assert re.match("nobody waits", line)
