"""Recorders and what is written down of them: sound ones are read whole, others say what is wrong."""

from __future__ import annotations

import copy
import ctypes
import json
import os
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.core import flight_file
from moe_triton.core.flight_file import (
    VERSION,
    Flight,
    FlightError,
    Header,
    OtherFileError,
    Places,
    RunStruct,
    of_json,
    read,
    read_file,
    write_text,
)
from moe_triton.core.flight_findings import findings
from moe_triton.core.flight_story import status_lines, verdict
from moe_triton.tools.flight_picture import events_of
from tests.flight.made import MASKED, OPENED_NS, Made, MadeRun, S, calls

SAID = {"group": "", "awaited": "12 of 64 tokens", "num_bytes": 99, "queues": {"3": 2}}
MADE = Made(
    1,
    runs=[
        *calls(3, awaited=(2, 0.001)),
        MadeRun("combine", 3, 2, 3, result=MASKED),
        MadeRun("barrier", 0, 4, None),
    ],
    waits_for=[2, 3],
    said=SAID,
    why="nothing",
)
BYTES, FLIGHT = bytes(MADE.bytes()), MADE.flight()
JSON = FLIGHT.as_json()


def read_bytes(data: bytes) -> Flight:
    return read(lambda: data, "it")


def tell(flight: Flight) -> None:
    """All that is told of a recorder, beside a sound one: nothing of it may fail, whatever it holds."""
    both = [flight, Made(0, runs=calls(3)).flight()]
    status_lines(both, OPENED_NS + 9 * S)
    verdict(both, OPENED_NS + 9 * S)
    for each in findings(both):
        assert each.text.isprintable()
    json.dumps([flight.as_json(), events_of(both)])


def test_a_recorder_is_read_whole() -> None:
    assert (FLIGHT.rank, FLIGHT.num_ranks, FLIGHT.group, FLIGHT.num_runs) == (1, 4, "a1b2c3", 8)
    first, *_, masked, last = FLIGHT.runs
    assert first.name == "dispatch number 0"
    assert first.awaited == (2, 1000)
    assert list(first.steps_us.items()) == [(name, 1000.0) for name in ("pack", "send", "wait", "arrange")]
    assert masked.ended == "well, without ranks that were masked meanwhile"
    assert (last.ended, last.end_ns, list(last.steps_us)) == ("running", None, ["pack", "send"])
    assert FLIGHT.wait is not None
    assert (FLIGHT.wait.ranks, FLIGHT.wait.queues) == ([2, 3], {3: 2})
    assert FLIGHT.totals["combine"]["runs"] == 3


def test_what_comes_behind_a_call_belongs_to_it() -> None:
    """It is recorded when the call has been counted already."""
    whole = MadeRun("dispatch", 0, 0.0, 0.1, phase="fill")
    behind = MadeRun("dispatch", 1, 0.1, 0.2, phase="local_counts")
    assert [run.number for run in Made(0, runs=[whole, behind]).flight().runs] == [0, 0]


def test_what_is_written_down_is_read_the_same() -> None:
    again = of_json(json.dumps(JSON).encode(), FLIGHT.source)
    assert again == FLIGHT
    assert again.runs[0].steps_us == FLIGHT.runs[0].steps_us


def test_a_text_that_changes_while_it_is_copied_is_copied_again() -> None:
    before, between = bytearray(BYTES), bytearray(BYTES)
    header, places = Header.from_buffer(before), Places.of(4)
    header.writing += 1
    with memoryview(between) as memory:
        write_text(memory, Header.from_buffer(between), places, "why", "everything")
    copies = [bytes(before), BYTES, bytes(between), bytes(between), bytes(between)]
    left = iter(copies)
    assert read(lambda: next(left), "it").why == "everything"
    assert list(left) == []


def test_who_was_killed_while_it_wrote_is_read_all_the_same() -> None:
    data = bytearray(BYTES)
    Header.from_buffer(data).writing += 1
    assert read_bytes(bytes(data)).why == "nothing"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(BYTES) - 1))
def test_a_cut_recorder_is_said_to_be_cut(length: int) -> None:
    with pytest.raises(FlightError, match="it is cut"):
        read_bytes(BYTES[:length])


PLACES = Places.of(4)
WORTH = [
    (0, ctypes.sizeof(Header)),
    (PLACES.runs, 10 * ctypes.sizeof(RunStruct)),
    *((at, 400) for at in PLACES.texts.values()),
]
"""Where something stands: offsets and bytes."""


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(WORTH).flatmap(
            lambda part: st.tuples(
                st.integers(part[0], part[0] + part[1] - 9), st.binary(min_size=1, max_size=8)
            )
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_damaged_recorder_is_read_or_said_to_be_damaged(changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(BYTES)
    for at, new in changes:
        data[at : at + len(new)] = new
    try:
        flight = read_bytes(bytes(data))
    except FlightError:
        return
    tell(flight)


@given(st.binary(max_size=2000))
def test_what_is_no_recorder_is_said_to_be_none(data: bytes) -> None:
    for reader in (read_bytes, lambda data: of_json(data, "it")):
        with pytest.raises(FlightError):
            reader(data)


def paths_in(document: Any) -> list[tuple[Any, ...]]:
    """Ways to the values of a document."""
    keys = (
        list(document)
        if isinstance(document, dict)
        else range(len(document))
        if isinstance(document, list)
        else []
    )
    return [path for key in keys for path in ((key,), *((key, *rest) for rest in paths_in(document[key])))]


SOUND = json.loads(json.dumps({**JSON, "runs": JSON["runs"][-3:]}))
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, 2**64, -(2**70), 10**400]),
    st.floats(),
    st.text(max_size=5),
    st.just("\ud800"),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(paths_in(SOUND)), VALUES)
def test_a_value_in_json_that_is_another_is_taken_or_refused(path: tuple[Any, ...], value: Any) -> None:
    changed = copy.deepcopy(SOUND)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    try:
        flight = of_json(json.dumps(changed).encode(), "it")
    except FlightError as error:
        str(error).encode()
        return
    tell(flight)


def without(name: str) -> bytes:
    return json.dumps({key: value for key, value in SOUND.items() if key != name}).encode()


@pytest.mark.parametrize("name", [each.name for each in fields(Flight)[1:] if each.default is MISSING])
def test_a_field_that_is_missing_is_said(name: str) -> None:
    with pytest.raises(FlightError, match=f"it is damaged: .*'{name}'"):
        of_json(without(name), "it")


def test_a_field_that_may_be_missing_has_its_usual_value() -> None:
    made = json.loads(json.dumps(JSON))
    del made["wait"]["queues"]
    wait = of_json(json.dumps(made).encode(), "it").wait
    assert wait is not None
    assert wait.queues == {}


def changed(**fields: Any) -> bytes:
    data = bytearray(BYTES)
    for name, value in fields.items():
        setattr(Header.from_buffer(data), name, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (BYTES[:100], "it is cut: 100 bytes of a header of"),
        (BYTES[:-1], f"it is cut: {len(BYTES) - 1} of {len(BYTES)} bytes"),
        (changed(version=VERSION + 1), f"it is of version {VERSION + 1}, and this is {VERSION}"),
        (changed(num_ranks=0), "it is damaged: its header has other sizes"),
        (changed(header_bytes=8), "it is damaged: its header has other sizes"),
        (changed(num_ranks=500), "it is damaged: its header has another size of it"),
        (changed(rank=4), "it is damaged: rank 4 of 4"),
        (changed(magic=b"moe-none"), "it is neither a recorder nor JSON"),
        (json.dumps({**JSON, "moe_triton_flight": 7}).encode(), "it is of version 7, and this is"),
        (json.dumps({**JSON, "rank": 4}).encode(), "it is damaged: rank 4 of 4"),
        (json.dumps({**JSON, "runs": 3}).encode(), "it is damaged: .*3 is no list"),
        (json.dumps(JSON).encode()[:-9], "it is neither a recorder nor JSON"),
        (b"[]", "it is no flight recorder"),
        (b"[" * 100_000, "it is neither a recorder nor JSON"),
        (b"\xff\xfe\x00", "it is neither a recorder nor JSON"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(data: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "recorder"
    path.write_bytes(data)
    with pytest.raises(FlightError, match=why):
        read_file(path)


def test_json_of_something_else_is_told_apart() -> None:
    with pytest.raises(OtherFileError):
        of_json(b'{"traceEvents": []}', "it")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused_at_once(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "it")
    with pytest.raises(FlightError, match="it is no file"):
        read_file(tmp_path / "it")


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = MADE.write(tmp_path)
    if os.geteuid() == 0:
        os.chown(path, 4321, -1)
    owner = path.stat().st_uid
    monkeypatch.setattr(flight_file.os, "geteuid", lambda: 1234)
    with pytest.raises(FlightError, match=f"it belongs to user {owner}, not to you"):
        read_file(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "it"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(FlightError, match="it has more than 64 MB"):
        read_file(path)


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(MADE.write(tmp_path))
    with pytest.raises(OSError, match="symbolic links"):
        read_file(tmp_path / "link")
