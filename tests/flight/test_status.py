"""``moe-triton status``: what ranks of this machine say when they are asked, and what is known without."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from moe_triton.core import shared_memory
from moe_triton.core.flight_file import Header, Places, RunStruct, write_text
from moe_triton.tools import recorders
from moe_triton.tools.cli.app import app
from moe_triton.tools.cli.status import with_groups
from tests.flight.made import Made, MadeRun, S, calls
from tests.patience import seconds

BEFORE = calls(3)
RUNS = MadeRun("dispatch", 3, 0.1, None)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of windows."""
    monkeypatch.setattr(shared_memory, "USUAL", tmp_path)
    return tmp_path


def made(rank: int, *runs: MadeRun, **more: Any) -> Made:
    """A rank that has just opened its buffer, and is this process if nothing else is said."""
    values = {"pid": os.getpid(), "opened_ns": time.monotonic_ns(), **more}
    return Made(rank, runs=[*BEFORE, *runs], **values)


def status(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, ["status", *words], catch_exceptions=False)


@contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One that sleeps."""
    running = subprocess.Popen(["sleep", "600"])
    try:
        yield running
    finally:
        running.kill()
        running.wait(seconds(20))


def since_now(running: subprocess.Popen[bytes]) -> dict[str, int]:
    """A recorder that a process has just made; when it started is known to a tick."""
    return {"pid": running.pid, "opened_ns": time.monotonic_ns() + S}


class Answering(threading.Thread):
    """A rank in a call, which says what it waits for when it is asked.

    Args:
        path: of its recorder.
        answer: does so, with the recorder's memory.
    """

    def __init__(self, path: Path, answer: Callable[[mmap.mmap, Header], None]) -> None:
        super().__init__(daemon=True)
        self._path, self._answer, self._until = path, answer, time.monotonic() + seconds(60)
        self.was_asked = False

    def run(self) -> None:
        with self._path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            header = Header.from_buffer(memory)
            while time.monotonic() < self._until and not self.was_asked:
                if header.asked != header.answered:
                    self._answer(memory, header)
                    self.was_asked = True
                time.sleep(0.001)
            del header


def say_rank_3(memory: mmap.mmap, header: Header) -> None:
    now_ns = time.monotonic_ns()
    said = {
        "index": header.num_runs,
        "step": "wait",
        "since_ns": now_ns - 2 * S,
        "said_ns": now_ns,
        "ranks": [3],
    }
    with memoryview(memory) as view:
        write_text(view, header, Places.of(4), "said", json.dumps(said))
    header.answered = header.asked


def test_a_rank_in_a_call_is_asked_whom_it_waits_for(memory: Path) -> None:
    rank = Answering(made(0, RUNS).write(memory), say_rank_3)
    rank.start()
    result = status()
    rank.join(seconds(60))
    assert rank.was_asked
    assert result.exit_code == 0
    assert "rank 0 (process" in result.stdout
    assert "in dispatch number 3 (zone 0, step wait) for" in result.stdout
    assert re.search(r"; it has waited [2-9][\d.]* s for rank 3\n", result.stdout)


def test_who_goes_on_instead_of_answering_is_not_waited_for(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_on(memory: mmap.mmap, header: Header) -> None:
        at = Places.of(4).runs + header.num_runs * ctypes.sizeof(RunStruct)
        RunStruct.from_buffer(memory, at).end_ns = time.monotonic_ns()

    monkeypatch.setattr(recorders, "ANSWER_S", seconds(600))
    rank = Answering(made(0, RUNS).write(memory), go_on)
    rank.start()
    result = status()
    rank.join(seconds(60))
    assert "its last, dispatch number 3, ended well" in result.stdout


def test_who_does_not_answer_is_told_of_all_the_same(memory: Path) -> None:
    path = made(0, RUNS).write(memory)
    result = status()
    assert "it has not said whom it waits for" in result.stdout
    assert Header.from_buffer_copy(path.read_bytes()).asked == 1


def test_who_is_in_no_call_is_not_asked(memory: Path) -> None:
    path = made(0).write(memory)
    result = status(str(os.getpid()))
    assert result.exit_code == 0
    assert "in no call for" in result.stdout
    assert Header.from_buffer_copy(path.read_bytes()).asked == 0


def test_a_full_file_system_keeps_nobody_from_being_told_of(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    made(0, RUNS).write(memory)
    monkeypatch.setattr(recorders.os, "pwrite", full)
    assert "in dispatch number 3" in status().stdout


def test_a_stopped_process_is_said_to_be_and_not_asked(memory: Path) -> None:
    with process() as running:
        running.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, running.pid, os.WSTOPPED)
        path = made(0, RUNS, **since_now(running)).write(memory)
        result = status()
    assert f"rank 0 (process {running.pid}): its process is stopped; in dispatch number 3" in result.stdout
    assert Header.from_buffer_copy(path.read_bytes()).asked == 0


def test_a_process_that_is_gone_is_said_to_be(memory: Path) -> None:
    with process() as running:
        path = made(0, RUNS, **since_now(running)).write(memory)
        assert "is gone" not in status().stdout
        running.kill()
        os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
        assert "its process is gone; it ended in dispatch number 3" in status().stdout  # a zombie
    assert "its process is gone; it ended in dispatch number 3" in status().stdout
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # it has another number in another namespace
        assert "is gone" not in status().stdout


def test_a_process_that_has_the_number_of_another_is_not_taken_for_it(memory: Path) -> None:
    with process() as running:
        made(0, RUNS, pid=running.pid, opened_ns=1).write(memory)
        assert "its process is gone" in status().stdout


def test_of_a_process_of_another_machine_nothing_is_known(memory: Path) -> None:
    with process() as running:
        ended = since_now(running)
    made(0, RUNS, host="another", **ended).write(memory)
    assert "is gone" not in status().stdout


def test_a_process_without_a_buffer_is_an_error_and_others_are_told_of(memory: Path) -> None:
    made(0).write(memory)
    with process() as running:
        result = status(str(running.pid), str(os.getpid()), str(running.pid))
        assert result.exit_code == 1
        assert len(result.stderr.splitlines()) == 1
        assert (
            f"process {running.pid} has no buffer of moe_triton's here: {memory} has no recorder of it. Name "
            "a process that has made an EPBuffer"
        ) in result.stderr
    assert "in no call" in result.stdout
    assert "and there is no such process" in status(str(running.pid)).stderr


@pytest.mark.parametrize("word", ["0", "abc", "1.5", str(2**31), "9" * 5000, "²", ""])
def test_what_is_no_process_is_refused(word: str, memory: Path) -> None:
    result = status("1", word)
    assert result.exit_code == 1
    assert "but it must be the number of a process" in result.stderr


def test_where_nobody_has_a_buffer_it_says_so(memory: Path) -> None:
    result = status("--group")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "no process of yours has a buffer of moe_triton's here" in result.stderr


def test_a_recorder_that_cannot_be_read_is_named_and_others_are_told_of(memory: Path) -> None:
    made(0).write(memory)
    data = made(1).bytes()
    Header.from_buffer(data).version = 99
    other = memory / "moe_triton-flight-99"
    other.write_bytes(data)
    (memory / "moe_triton-flight-9.new").write_bytes(b"")
    result = status()
    assert result.exit_code == 0
    assert f"{other} is no recorder that can be read: it is of version 99, and this is 1" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert len(result.stdout.splitlines()) == 1


def test_recorders_of_other_users_are_left_alone(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(0, RUNS).write(memory)
    monkeypatch.setattr(recorders, "_is_own", lambda each: each != path)
    result = status()
    assert "no process of yours" in result.stderr
    assert Header.from_buffer_copy(path.read_bytes()).asked == 0


def test_a_group_is_told_of_as_a_whole_with_the_culprit_first(memory: Path) -> None:
    ranks = [made(rank, RUNS, waits_for=[3], pid=1_000_000 + rank, host="another") for rank in range(3)]
    for each in (*ranks, made(3), made(0, group="f00", pid=1)):
        each.write(memory)
    result = status("--group", "1000001")
    first, *lines = result.stdout.splitlines()
    culprit = (
        r"ranks 0 to 2 wait for rank 3, which has been in no call for \S+ m?s \(dispatch number 3, for .*"
    )
    assert re.fullmatch(culprit, first)
    assert [line[:6] for line in lines] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def flights_of(*groups_and_pids: tuple[str, Sequence[int]]) -> list[Any]:
    return [
        Made(rank, len(pids), group=group, pid=pid).flight()
        for group, pids in groups_and_pids
        for rank, pid in enumerate(pids)
    ]


def test_groups_of_groups_ranks_are_taken_in_for_they_may_hold_them_up() -> None:
    flights = flights_of(("a", [1, 2]), ("b", [2, 3]), ("c", [3, 4]), ("d", [5, 6]))
    assert {flight.group for flight in with_groups(flights, [1])} == {"a", "b", "c"}
    assert {flight.group for flight in with_groups(flights, [6])} == {"d"}
    assert with_groups(flights, [7]) == []


def test_json_has_all_of_it(memory: Path) -> None:
    path = made(0, RUNS, waits_for=[1], num_ranks=2).write(memory)
    (memory / "moe_triton-flight-1").write_bytes(b"")
    result = status("--json", "--group", str(os.getpid()), "1")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    (culprit,), (line,) = said["verdict"], said["lines"]
    assert culprit.startswith("rank 0 waits for rank 1, of which there is no record")
    assert line.startswith("rank 0 (process")
    (rank,) = said["ranks"]
    assert (rank["file"], rank["process"], rank["moe_triton_flight"]) == (str(path), "running", 1)
    assert said["missing"] == [1]
    assert said["unread"][0]["why"].startswith("it is cut: 0 bytes")


def test_a_recorder_that_is_cut_while_it_is_read_ends_nothing(memory: Path) -> None:
    path = made(0, RUNS).write(memory)
    with recorders.Recorder(path) as recorder:
        recorder.ask()
        os.truncate(path, 100)
        assert recorder.has_answered()
        assert recorder.read().rank == 0
