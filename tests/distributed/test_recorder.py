"""The flight recorder of real ranks: what it has, what it says while they wait, and what outlives them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_triton.processes import RankFailedError, RankGroup, run_ranks
from tests.distributed import recorded
from tests.distributed.cases import Case, small_case
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
LATE = 1


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct"])
def test_it_has_what_ran_and_whom_it_waited_for(ranks: Groups, scheme: str, kernels: str) -> None:
    case = small_case(3, scheme)
    found = ranks(3).run(recorded.recorded, case, LATE, kernels)
    groups = {flight.group for flight, _, _ in found}
    assert len(groups) == 1
    assert groups != {""}
    for rank, (flight, metrics, _) in enumerate(found):
        assert (flight.rank, flight.num_ranks, flight.state) == (rank, 3, "open")
        ours = [run for run in flight.runs if run.operator != "barrier"]
        assert [(run.operator, run.number) for run in ours] == [
            (operator, number)
            for number in range(2 + recorded.ROUNDS)
            for operator in ("dispatch", "combine")
        ]
        for run in flight.runs:
            assert run.ended == "well"
            assert run.end_ns is not None
            us = (run.end_ns - run.begin_ns) / 1e3
            assert 0 < sum(run.steps_us.values()) <= us * 1.01 + 1, run
        assert {run.tokens for run in ours} == {4}
        assert metrics.rounds["dispatch"] == metrics.rounds["combine"] == 2 + recorded.ROUNDS
        assert metrics.tokens["dispatch"] == 4 * (2 + recorded.ROUNDS)
        assert sum(run.rows or 0 for run in ours if run.operator == "dispatch") == metrics.rows["dispatch"]
        if rank == LATE:
            continue
        late = [run for run in ours[4:] if run.operator == "dispatch"]
        least_us = recorded.LATE_S * 1e6 / 2  # the others may be late, too
        assert all(run.awaited is not None and run.awaited[0] == LATE for run in late), late
        assert all(run.awaited[1] >= least_us for run in late if run.awaited), late
        assert sum(metrics.waits[LATE]) >= len(late)
        assert metrics.waited_s[LATE] >= len(late) * least_us / 1e6
        assert json.loads(json.dumps(flight.as_json()))["group"] == flight.group


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "direct"])
def test_a_rank_that_waits_says_for_whom(ranks: Groups, scheme: str) -> None:
    for rank, said in enumerate(ranks(3).run(recorded.asked, small_case(3, scheme), LATE)):
        assert len(said) == (rank != LATE)
        for line in said:
            assert line.startswith(f"rank {rank} (process ")
            assert "in dispatch number 1 (zone 1, " in line
            assert f"for rank {LATE}" in line


def test_what_a_killed_rank_has_recorded_is_written_down_by_the_others(tmp_path: Path) -> None:
    arguments = small_case(3), str(tmp_path)
    results = run_ranks(recorded.killed, 3, arguments, allow_failures=True, timeout_s=seconds(60))
    assert isinstance(results[2], RankFailedError)
    for written, are_left in results[:2]:
        assert any(name.endswith("-rank2.json") for name in written)
        assert are_left == [False, False], "its own file, and that of the rank that has died"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.rpartition("-")[2] for name in names] == ["rank0.json", "rank1.json", "rank2.json"]


def test_calls_go_on_where_there_is_no_room_for_it(ranks: Groups) -> None:
    assert ranks(2).run(recorded.without_room, small_case(2)) == [("None", 2)] * 2


def test_without_it_nothing_is_made_and_status_says_so(ranks: Groups) -> None:
    for said, files in ranks(2).run(recorded.switched_off, small_case(2)):
        assert said.startswith("there is no flight recorder (MOE_TRITON_FLIGHT is off). Unset the variable")
        assert files == []


@pytest.mark.parametrize(
    ("variable", "value", "takes", "said"),
    [
        ("MOE_TRITON_FLIGHT", "folder", False, "MOE_TRITON_FLIGHT is folder, but it is 'on' or 'off'"),
        ("MOE_TRITON_DUMP_SIGNAL", "HUPP", False, "it is the name or the number of a signal"),
        ("MOE_TRITON_DUMP_SIGNAL", "9", False, "SIGKILL is not for programs to take"),
        ("MOE_TRITON_DUMP_SIGNAL", "SIGUSR2", True, "SIGUSR2: it has a handler already, or is ignored"),
    ],
)
def test_wrong_variables_are_refused_on_every_rank(
    ranks: Groups, variable: str, value: str, takes: bool, said: str
) -> None:
    for message in ranks(2).run(recorded.refused, small_case(2), variable, value, takes):
        assert said in message


def test_a_signal_has_a_waiting_process_say_for_whom() -> None:
    texts = run_ranks(recorded.asked_by_signal, 2, (small_case(2),), timeout_s=seconds(60))
    assert "of moe_triton:\nrank 0 (process " in texts[0]
    assert "in dispatch number 1" in texts[0]
    assert "for rank 1" in texts[0]


def test_a_call_that_ran_out_of_time_is_counted_and_written_down(ranks: Groups, tmp_path: Path) -> None:
    (timeouts, flight), (others, _) = ranks(2).run(recorded.timed_out, small_case(2), str(tmp_path))
    assert (timeouts, others) == (1, 0)
    assert flight is not None
    assert flight.state == "broken"
    assert "CommunicationTimeoutError: dispatch number 1 (zone 1) timed out " in flight.why
    *_, last = flight.runs
    assert (last.name, last.step, last.ended) == ("dispatch number 1", "wait", "stopped or reported")
    assert last.awaited is not None
    assert last.awaited[0] == 1


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "direct"])
def test_bytes_by_peer_are_those_of_rows(ranks: Groups, scheme: str) -> None:
    case: Case = small_case(3, scheme)
    for counted, rows in ranks(3).run(recorded.spread, case):
        assert counted == rows
        assert sum(rows) > 0


def test_a_slow_rank_is_named_in_the_log(ranks: Groups) -> None:
    for rank, lines in enumerate(ranks(3).run(recorded.slow, small_case(3), LATE)):
        if rank == LATE:  # for whom others may be slow, as they wake up late on a loaded machine
            continue
        line = lines[0]
        assert line.startswith(f"rank {rank} of 3 [group ")
        assert f"]: rank {LATE} was awaited longest in " in line
