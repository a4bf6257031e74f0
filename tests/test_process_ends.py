"""How processes of one machine watch each other: what is handed over, what is refused, and what is left."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_triton.core.shared_memory import USUAL
from moe_triton.rendezvous import process_ends
from moe_triton.rendezvous.process_ends import (
    BY_LINE,
    CLOSED,
    ENDED,
    HERE,
    LEFT,
    UNREADABLE,
    Board,
    Entrance,
    OtherProcess,
    Watcher,
    connect,
    remove_names,
    remove_stale_entrances,
)
from tests.patience import seconds

End = tuple[bytes, bool]


@pytest.fixture
def folder() -> Iterator[Path]:
    """One whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir=USUAL) as made:
        yield Path(made)


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    """One of its own, which has nothing left to watch in the end."""
    made = Watcher()
    yield made
    processes = list(made._processes)
    made.do(lambda: made.forget(processes))
    until(lambda: made._thread is None)


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board()
    yield made
    made.close()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds(20)
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def other(token: str = "00" * 8, is_far: bool = False) -> tuple[OtherProcess, list[End]]:
    ends: list[End] = []
    return OtherProcess(token, lambda word, has_ended: ends.append((word, has_ended)), is_far), ends


def another_process(folder: Path, name: str, said: bytes, how: str) -> int:
    """A child that hands its board over, and ends when it is told to.

    With "lock" it has no pidfd; with "line" it is of another server, and keeps its connection.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(reading)
        return writing
    with contextlib.suppress(BaseException):
        os.close(writing)
        if how == "lock":
            process_ends._open_pidfd = lambda: -1
        made = Board()
        made.token = "00" * 8
        line = connect(folder, name)
        assert line
        made.greet(line) if how == "line" else made.hand_to(line)
        os.read(reading, 1)
        if said:
            line.send(said) if how == "line" else made.say(said)
    os._exit(0)


@pytest.mark.parametrize("how", ["pidfd", "lock"])
@pytest.mark.parametrize(("said", "word"), [(b"", HERE), (LEFT, LEFT), (ENDED, ENDED)])
def test_an_end_is_noticed_with_what_was_said(
    how: str, said: bytes, word: bytes, watcher: Watcher, board: Board, folder: Path
) -> None:
    entrance, (process, ends) = Entrance(folder), other()
    assert stat.S_IMODE((folder / entrance.name).stat().st_mode) == 0o600
    writing = another_process(folder, entrance.name, said, how)
    watcher.do(lambda: watcher.watch(process))
    watcher.do(lambda: watcher.admit(entrance, board))
    until(lambda: process.sign != "")
    assert how in process.sign
    assert not ends
    os.close(writing)
    until(lambda: ends != [])
    assert ends == [(word, how == "pidfd" or word != LEFT)]
    watcher.do(lambda: watcher.shut(entrance))
    until(lambda: not list(folder.iterdir()))
    os.wait()


@pytest.mark.parametrize(
    ("said", "told"),
    [(b"", [(HERE, True)]), (LEFT, [(LEFT, False)]), (ENDED, [(ENDED, True)]), (CLOSED, [])],
)
def test_the_end_of_a_connection_is_that_of_its_process(
    said: bytes, told: list[End], watcher: Watcher, board: Board, folder: Path
) -> None:
    entrance, (process, ends) = Entrance(folder), other(is_far=True)
    writing = another_process(folder, entrance.name, said, "line")
    watcher.do(lambda: watcher.watch(process))
    watcher.do(lambda: watcher.admit(entrance, board))
    until(lambda: process.sign == BY_LINE)
    assert not ends
    os.close(writing)
    until(lambda: process.sign == "")
    assert ends == told
    watcher.do(lambda: watcher.shut(entrance))
    os.wait()


def test_who_watches_nobody_keeps_no_connection(watcher: Watcher, board: Board, folder: Path) -> None:
    entrance, (process, ends) = Entrance(folder), other(board.token, is_far=True)
    line = connect(folder, entrance.name)
    assert line
    board.greet(line)
    watcher.do(lambda: watcher.watch(process, line))
    until(lambda: process.sign == BY_LINE)
    entrance.hand_out(board)
    entrance.close()
    until(lambda: process.sign == "")
    assert (process.word(), ends) == (CLOSED, [])


def test_who_closes_its_entrance_before_it_has_handed_anything_over_is_dead(
    watcher: Watcher, board: Board, folder: Path
) -> None:
    entrance, (process, ends) = Entrance(folder), other()
    line = connect(folder, entrance.name)
    watcher.do(lambda: watcher.watch(process, line))
    entrance.close()
    until(lambda: ends != [])
    assert ends == [(UNREADABLE, True)]


def test_who_leaves_hands_its_board_over_before(watcher: Watcher, folder: Path) -> None:
    leaving, board = Board(), Board()
    entrance, (process, ends) = Entrance(folder), other(leaving.token)
    line = connect(folder, entrance.name)
    assert line
    board.hand_to(line)
    watcher.do(lambda: watcher.watch(process, line))
    leaving.say(LEFT)
    entrance.hand_out(leaving)
    entrance.close()
    until(lambda: process.sign != "")
    assert process.word() == LEFT
    assert ends == []
    leaving.close()
    board.close()


def test_strangers_get_nothing_and_are_not_believed(
    watcher: Watcher, board: Board, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entrance, (process, ends) = Entrance(folder), other()
    watcher.do(lambda: watcher.watch(process))
    watcher.do(lambda: watcher.admit(entrance, board))
    for said in (b"hello", b"moe_triton 1 " + bytes(8)):
        line = connect(folder, entrance.name)
        assert line
        reading, writing = os.pipe()
        line.setblocking(True)
        socket.send_fds(line, [said], [reading, reading])  # a pipe is no board
        line.settimeout(seconds(20))
        # Of whom it knows the token it takes that it is a rank, and takes nothing that is not what it should
        # be.
        data, descriptors, *_ = socket.recv_fds(line, 64, 2)
        assert len(descriptors) == (2 if said != b"hello" else 0), data
        process_ends.close_all([reading, writing, *descriptors])
        line.close()
    assert (process.sign, ends) == ("", [])
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(str(folder / entrance.name))
    line.settimeout(seconds(20))
    with contextlib.suppress(ConnectionError):
        line.sendall(b"moe_triton 1 " + bytes(8))
        assert line.recv(64) == b""
    line.close()
    watcher.do(lambda: watcher.shut(entrance))
    until(lambda: not watcher._entrances)


def test_a_file_that_is_no_pidfd_is_not_watched() -> None:
    handed, (process, _) = Board(), other()
    reading, writing = os.pipe()
    process.take([os.dup(handed._fd), reading])
    assert (process.pidfd, process.sign) == (-1, process_ends.BY_LOCK)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)
    os.close(writing)
    process.close()


@pytest.mark.parametrize(
    "name", ["", "../x.socket", "moe_triton-0-x.socket", f"below/moe_triton-0-{'0' * 24}.socket"]
)
def test_a_name_that_is_no_entrances_is_neither_opened_nor_removed(name: str, folder: Path) -> None:
    (folder / "x.socket").touch()
    (folder / "below").mkdir()
    assert connect(folder / "below", name) is None
    remove_names(folder / "below", [name])
    assert (folder / "x.socket").exists()


def test_what_killed_processes_have_left_is_removed(folder: Path) -> None:
    alive, killed = Entrance(folder), Entrance(folder)
    killed.listener.close()
    remove_stale_entrances(folder)
    assert [path.name for path in folder.iterdir()] == [alive.name]
    alive.close()


def test_a_folder_where_no_socket_can_be(folder: Path) -> None:
    long = folder / ("x" * 120)
    long.mkdir()
    assert Entrance(long).name == Entrance(folder / "nowhere").name == ""


def test_a_process_that_can_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    watcher = Watcher()
    assert not watcher.do(lambda: None)
    assert watcher._wake == watcher._woken == -1


def test_a_thread_that_begins_may_collect_garbage(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    done: list[str] = []
    start = threading.Thread.start

    def collect_first(thread: threading.Thread) -> None:
        if thread.name == "moe_triton deaths":
            collecting = threading.Thread(
                target=watcher.do_if_there, args=(lambda: done.append("dropped"),), daemon=True
            )
            start(collecting)
            collecting.join(seconds(10))
            begun.append(not collecting.is_alive())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", collect_first)
    assert watcher.do(lambda: done.append("asked"))
    until(lambda: len(done) == 2)
    assert begun == [True]
    assert done == ["asked", "dropped"]
