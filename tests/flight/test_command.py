"""``moe-triton flight``: several ranks' records together, in words, as JSON and as a picture."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from moe_triton.core import flight_findings, shared_memory
from moe_triton.core.flight_file import of_json
from moe_triton.tools.cli.app import app
from moe_triton.tools.cli.trace import median_call
from moe_triton.tools.flight_picture import events_of
from moe_triton.tools.host_traces import events_of as events_in
from tests.flight.made import OPENED_NS, REPORTED, Made, MadeRun, S, calls
from tests.patience import seconds

BEFORE = calls(117)
GAVE_UP = MadeRun("dispatch", 117, 10, 15, awaited=(3, 4.98), result=REPORTED)
WHY = "dispatch number 117 timed out waiting for rank(s) [3]"
RANKS = [
    *(Made(rank, runs=[*BEFORE, GAVE_UP], state="broken", why=WHY, host="first") for rank in range(3)),
    Made(3, runs=BEFORE, host="second"),
]
STORY = [
    "group a1b2c3: records of ranks 0 to 3 of 4, on first and second; their newest call is dispatch number "
    "117",
    "rank 3 never began dispatch number 117; ranks 0 to 2 waited 4.98 s for it and gave up; rank 3: last "
    "call combine number 116, ended well",
    f"the buffers of ranks 0 to 2 are broken: {WHY}",
]


def flight(*words: object, code: int = 0) -> Result:
    asked = ["flight", *map(str, words)]
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, asked, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("way", ["recorders", "json", "folder", "both"])
def test_records_of_several_ranks_are_told_together(way: str, tmp_path: Path) -> None:
    files = [each.write_json(tmp_path) if way == "json" else each.write(tmp_path) for each in RANKS]
    if way == "both":
        files += [each.write_json(tmp_path) for each in RANKS[:2]]
    result = flight(*([tmp_path] if way == "folder" else files))
    assert result.stdout.splitlines() == STORY
    assert result.stderr == ""


def test_where_all_is_well_it_says_so(tmp_path: Path) -> None:
    result = flight(*(Made(rank, 2, BEFORE).write(tmp_path) for rank in range(2)))
    assert result.stdout.splitlines()[1:] == ["nothing is amiss in these records"]


def test_what_cannot_be_read_is_named_and_the_rest_is_told(tmp_path: Path) -> None:
    files = [each.write(tmp_path) for each in RANKS]
    files[1].write_bytes(files[1].read_bytes()[:5000])
    gone = tmp_path / "none.json"
    result = flight(*files, gone)
    assert "of rank 1 there is no record" in result.stdout
    assert result.stderr.splitlines() == [
        f"{files[1]} cannot be read: it is cut: 5000 of {files[0].stat().st_size} bytes",
        f"{gone} cannot be read: No such file or directory",
    ]


def test_where_nothing_can_be_read_it_fails(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    (tmp_path / "cut.json").write_text('{"moe_triton_flight": ')
    result = flight(tmp_path / "empty", tmp_path, tmp_path / "trace.json", code=1)
    assert result.stdout == ""
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == [
        f"{tmp_path / 'cut.json'} cannot be read",
        f"{tmp_path / 'trace.json'} cannot be read",
        f"{tmp_path / 'empty'} cannot be read",
    ]
    assert json.loads(flight(tmp_path / "empty", "--json", code=1).stdout)["flights"] == []


def test_other_files_of_a_folder_are_left_alone(tmp_path: Path) -> None:
    Made(0, 1, BEFORE).write(tmp_path)
    (tmp_path / "moe_triton-window").write_bytes(b"window")
    (tmp_path / "moe_triton-flight-0-1.new").write_bytes(b"")
    (tmp_path / "moe_triton-flight-0").mkdir()
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    assert flight(tmp_path).stderr == ""


def test_json_has_records_that_can_be_read_again(tmp_path: Path) -> None:
    (tmp_path / "moe_triton-flight-other").write_bytes(b"\0" * 4096)
    for each in RANKS:
        each.write(tmp_path)
    said = json.loads(flight(tmp_path, "--json").stdout)
    assert [each["kind"] for each in said["findings"]] == ["missed a call", "broken"]
    assert said["findings"][0]["text"] == STORY[1]
    assert said["findings"][0]["ranks"] == [3]
    assert [each["why"] for each in said["unread"]] == ["it is neither a recorder nor JSON: " + WHY_NOT]
    again = [replace(of_json(json.dumps(each).encode(), ""), source="") for each in said["flights"]]
    assert again == [replace(each.flight(), source="") for each in RANKS]


WHY_NOT = "Expecting value: line 1 column 1 (char 0)"


def test_a_terminal_is_told_nothing_by_what_files_hold(tmp_path: Path) -> None:
    named = replace(RANKS[0], group="\x1b[2Ja\ud800", why="\x1b]0;title\x07")
    path = tmp_path / "it.json"
    path.write_text(json.dumps(named.flight().as_json()))
    said = flight(path).stdout
    assert "\x1b" not in said
    assert r"\x1b[2Ja\ud800" in said


def test_a_process_that_was_killed_in_a_call_is_known_where_its_recorder_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = subprocess.Popen(["sleep", "600"])
    killed = MadeRun("dispatch", 117, 10, None, step=1)
    made = Made(0, 2, [*BEFORE, killed], pid=running.pid, opened_ns=time.monotonic_ns() + S)
    running.kill()
    running.wait(seconds(20))
    path = made.write(tmp_path)
    assert "is gone" not in flight(path).stdout  # of a copy nobody knows
    monkeypatch.setattr(shared_memory, "USUAL", tmp_path)
    said = flight(path).stdout.splitlines()
    assert said[1] == "the process of rank 0 is gone: it ended in dispatch number 117, in step send"


def test_who_still_waits_has_done_so_until_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "USUAL", tmp_path)
    now = {"pid": os.getpid(), "opened_ns": time.monotonic_ns()}
    waits = Made(0, 2, [MadeRun("dispatch", 0, 0.0, None)], waits_for=[1], said={"since_ns": 1}, **now)
    files = waits.write(tmp_path), Made(1, 2, **now).write(tmp_path)
    monkeypatch.setattr(flight_findings, "_LONG_NS", 10**18)
    assert "nothing is amiss" in flight(*files).stdout  # it has only just begun
    monkeypatch.setattr(flight_findings, "_LONG_NS", 0)
    assert "rank 1 has not begun dispatch number 0; rank 0 has waited " in flight(*files).stdout


def test_a_folder_of_windows_that_is_refused_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(shared_memory.VARIABLE, "nowhere")
    assert STORY[1] in flight(*(each.write(tmp_path) for each in RANKS)).stdout


def spans_of(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == category]


def test_a_picture_is_a_trace_as_buffers_write_it(tmp_path: Path) -> None:
    picture = tmp_path / "picture.json"
    flight(*(each.write(tmp_path) for each in RANKS), "--picture", picture)
    events = events_in(picture)
    assert median_call(picture, "dispatch", 0, 50).us == pytest.approx(5000)
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1", "rank 2", "rank 3"]
    last = [event for event in spans_of(events, "operator") if event["name"] == "dispatch #117"]
    assert [event["pid"] for event in last] == [0, 1, 2]
    assert last[0]["args"] == {
        "zone": 0,
        "ended": "stopped or reported",
        "tokens": 16,
        "rows": 128,
        "rank awaited longest": 3,
        "us that it was awaited": 4_980_000,
    }
    for event in spans_of(events, "step"):
        whole = next(
            each
            for each in spans_of(events, "operator")
            if (each["pid"], each["name"]) == (event["pid"], event["args"]["of"])
        )
        assert whole["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= whole["ts"] + whole["dur"] + 1e-3


def test_steps_that_took_longer_than_their_run_end_with_it() -> None:
    made = Made(0, 1, [MadeRun("barrier", 0, 0.0, 0.0025)])
    steps = spans_of(events_of([made.flight()]), "step")
    assert [round(step["dur"]) for step in steps] == [1000, 1000, 500, 0]


def test_a_picture_has_what_a_running_call_waits_for_and_ranks_of_groups_apart() -> None:
    running = Made(1, runs=[MadeRun("combine", 0, 1, None, phase="setup")], waits_for=[0])
    events = events_of([running.flight(), replace(running, group="f00").flight()])
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "rank 1 of group a1b2c3",
        "rank 1 of group f00",
    ]
    one, other = spans_of(events, "operator")
    assert (one["name"], one["pid"], other["pid"]) == ("combine #0 setup", 0, 1)
    assert one["args"]["waits for ranks"] == [0]


def test_a_picture_has_hosts_on_one_clock() -> None:
    """Of a host whose processes have compared it with the time of day differently, all are shifted alike."""
    first, other = (Made(rank, 3, calls(1), host="first") for rank in (0, 1))
    far = replace(first, rank=2, host="second", opened_ns=OPENED_NS - 7 * S)
    far = replace(far, unix_minus_monotonic_ns=far.unix_minus_monotonic_ns + 7 * S)
    other = replace(other, unix_minus_monotonic_ns=other.unix_minus_monotonic_ns + 5)
    begins = [
        event["ts"]
        for event in spans_of(events_of([each.flight() for each in (first, other, far)]), "operator")
    ]
    assert len(begins) == 6
    assert set(begins) == {OPENED_NS / 1e3, OPENED_NS / 1e3 + 10_000}


def test_a_picture_that_cannot_be_written_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "picture.json")
    for where in (tmp_path / "none" / "picture.json", tmp_path / "link"):
        result = flight(RANKS[0].write(tmp_path), "--picture", where, code=1)
        assert f"--picture is '{where}', but " in result.stderr
