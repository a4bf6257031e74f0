"""The file of a trace: valid at every moment, one run's, refused before anything is sent."""

from __future__ import annotations

import json
import multiprocessing
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from moe_triton import ArgumentError
from moe_triton.processes import PRELOAD
from moe_triton.runtime.traces import MAX_PATH, TraceFile


def events_of(path: Path) -> list[dict[str, Any]]:
    text = json.loads(path.read_text(encoding="utf-8"))
    assert text.keys() == {"displayTimeUnit", "traceEvents"}
    return list(text["traceEvents"])


def add_some(path: Path, writer: int, times: int) -> None:
    file = TraceFile(path)
    for number in range(times):
        file.add({"writer": writer, "number": number, "event": n} for n in range(3))


def test_a_new_file_has_no_events_and_is_the_user_s_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("an earlier run's", encoding="utf-8")
    path.chmod(0o644)
    TraceFile(path).start(is_first=True)
    assert events_of(path) == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_only_the_first_rank_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    TraceFile(path).add([{"name": "a"}])
    TraceFile(path).start(is_first=False)
    assert events_of(path) == [{"name": "a"}]


def test_a_second_buffer_of_the_same_run_adds_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for name in ("a", "b"):
        file = TraceFile(path)
        file.start(is_first=True)
        file.add([{"name": name}])
    assert events_of(path) == [{"name": "a"}, {"name": "b"}]


@pytest.mark.parametrize("there", [None, "", "{", '{"traceEvents":[{}]}', "no JSON at all\n]}\n"])
def test_what_is_no_trace_is_replaced(tmp_path: Path, there: str | None) -> None:
    path = tmp_path / "trace.json"
    if there is not None:
        path.write_text(there, encoding="utf-8")
    TraceFile(path).add([])
    assert events_of(path) == []
    TraceFile(path).add([{"name": "a"}])
    TraceFile(path).add([])
    TraceFile(path).add([{"name": "b"}])
    assert events_of(path) == [{"name": "a"}, {"name": "b"}]


def test_processes_add_at_the_same_time_and_readers_see_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    TraceFile(path).start(is_first=True)
    writers, times = 4, 8
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)  # else each process imports torch by itself
    processes = [context.Process(target=add_some, args=(path, w, times)) for w in range(writers)]
    ended = threading.Event()
    seen = []

    def read() -> None:
        while not ended.is_set():
            seen.append(len(events_of(path)))

    reader = threading.Thread(target=read)
    reader.start()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    ended.set()
    reader.join()
    assert [process.exitcode for process in processes] == [0] * writers
    assert seen == sorted(seen)
    wanted = {(w, number, n) for w in range(writers) for number in range(times) for n in range(3)}
    have = [(e["writer"], e["number"], e["event"]) for e in events_of(path)]
    assert set(have) == wanted
    assert len(have) == len(wanted)
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize("path", ["", 3, b"bytes.json", "x" * (MAX_PATH + 1), "a\0b"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ArgumentError, match=r"trace is .* path of a file") as caught:
        TraceFile(path)
    assert caught.value.argument == "trace"


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cases = {
        tmp_path: "no regular file",
        tmp_path / "absent" / "trace.json": "No such file",
        tmp_path / "file" / "trace.json": "Not a directory",
        Path("/proc/trace.json"): "no file can be made",
    }
    for path, rule in cases.items():
        with pytest.raises(ArgumentError, match=rule) as caught:
            TraceFile(path).check_writable()
        assert caught.value.argument == "trace"
        assert str(path) in caught.value.value
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_a_path_is_where_the_process_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = TraceFile("trace.json")
    monkeypatch.chdir("/")
    file.add([])
    assert events_of(tmp_path / "trace.json") == []


def test_a_link_is_refused_and_one_to_its_folder_is_not(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "target").write_text("somebody's")
    for target in ("target", "nowhere"):
        link = tmp_path / f"to {target}"
        link.symlink_to(tmp_path / target)
        with pytest.raises(ArgumentError, match="it is a symbolic link"):
            TraceFile(link)
    (tmp_path / "to folder").symlink_to("folder")
    TraceFile(tmp_path / "to folder" / "trace.json").add([{"name": "a"}])
    assert events_of(tmp_path / "folder" / "trace.json") == [{"name": "a"}]


def test_a_link_that_comes_later_is_not_followed(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "trace.json"
    target.write_text("somebody's")
    file = TraceFile(path)
    file.start(is_first=True)
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        file.add([{"name": "a"}])
    assert target.read_text() == "somebody's"


@pytest.mark.parametrize("name", ["", "\0", "a\0b", "x" * 5000, ".", "..", "/", "/dev/null/trace.json"])
def test_what_is_no_place_for_a_file_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        TraceFile(name).check_writable()
    assert caught.value.argument == "trace"
    assert len(str(caught.value)) < 500
