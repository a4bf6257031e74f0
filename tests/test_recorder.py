"""The flight recorder of one process: what it holds on to, what a fork leaves of it, and damage to it."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_triton import ArgumentError, BufferStateError, EPBuffer
from moe_triton.core import flight_memory
from moe_triton.core.flight_file import Header
from moe_triton.runtime import recorder

SIZES = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 4}
X, IDS = torch.randn(4, 64).bfloat16(), torch.tensor([[0, 1]] * 4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where errors write to."""
    monkeypatch.setenv(recorder.FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def memory_of(buffer: EPBuffer) -> Any:
    return buffer._communicator.recorder.memory  # type: ignore[union-attr]


def num_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_buffer_that_is_dropped_goes_at_once_with_its_file() -> None:
    gc.collect()
    gc.disable()
    try:
        buffer = EPBuffer(**SIZES)
        buffer.dispatch(X, IDS)
        buffer.status()
        path, communicator = memory_of(buffer).path, weakref.ref(buffer._communicator)
        before = num_open()
        del buffer
        gc.collect()
        assert communicator() is None
        assert not path.exists()
        assert num_open() < before
    finally:
        gc.enable()


@contextlib.contextmanager
def child() -> Iterator[int]:
    """A fork; what follows runs in both, and the child ends behind it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            yield 0
            code = 0
        finally:
            os._exit(code)
    yield pid
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_fork_leaves_files_and_locks_to_the_parent() -> None:
    closed, kept = EPBuffer(**SIZES), EPBuffer(**SIZES)
    closed.close()
    read_end, write_end = os.pipe()  # they take numbers that a closed buffer has had
    path = memory_of(kept).path
    with child() as pid:
        if pid == 0:
            os.fstat(read_end)
            os.write(write_end, b"x")
            with pytest.raises(BufferStateError, match="forked"):
                kept.dispatch(X, IDS)
            kept.close()
    assert os.read(read_end, 1) == b"x"
    assert path.exists()
    kept.dispatch(X, IDS)
    assert [run.ended for run in kept.flight().runs] == ["well"]
    kept.close()
    assert not path.exists()
    os.close(read_end)
    os.close(write_end)


def test_what_was_recorded_can_be_read_behind_a_close() -> None:
    buffer = EPBuffer(**SIZES)
    buffer.dispatch(X, IDS)
    buffer.close()
    assert [run.ended for run in buffer.flight().runs] == ["well"]
    assert buffer.flight().state == "closed"
    assert "closed" in buffer.status()


class OddError(Exception):
    """One whose text is no Unicode."""


def test_an_error_is_the_callers_own_whatever_becomes_of_its_record(folder: Path) -> None:
    buffer = EPBuffer(**SIZES)
    buffer._communicator._give_up_for("a call", OddError("caf\udce9.txt"))
    assert "caf" in buffer.flight().why
    assert [path.name for path in folder.iterdir()] == [f"flight-{memory_group(buffer)}-rank0.json"]
    damaged = EPBuffer(**SIZES)
    memory_of(damaged).header.magic = b"nonsense"
    damaged._communicator._give_up_for("a call", OddError("no matter"))
    with pytest.raises(BufferStateError, match="written over by another process"):
        damaged.flight()
    with pytest.raises(BufferStateError, match="broken"):
        damaged.dispatch(X, IDS)
    damaged.close()


def memory_group(buffer: EPBuffer) -> str:
    group: str = buffer._communicator.recorder.group  # type: ignore[union-attr]
    return group


def test_a_folder_keeps_what_is_not_ours_and_the_newest_of_ours(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST_FILES", 2)
    theirs = [folder / f"flight-schedule-{number}.json" for number in range(4)]
    for path in theirs:
        path.write_text("{}")
    for number in range(3):
        old = folder / f"flight-0000000{number}-rank0.json"
        old.write_text("{}")
        os.utime(old, (number, number))
    buffer = EPBuffer(**SIZES)
    buffer._communicator._give_up_for("a call", OddError("broken"))
    left = {path.name for path in folder.iterdir()}
    assert {path.name for path in theirs} < left
    ours = left - {path.name for path in theirs}
    assert ours == {f"flight-{memory_group(buffer)}-rank0.json", "flight-00000002-rank0.json"}


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = folder / "file"
    blocked.write_text("")
    monkeypatch.setenv(recorder.FOLDER_VARIABLE, str(blocked))
    buffer = EPBuffer(**SIZES)
    buffer._communicator._give_up_for("a call", OddError("broken"))
    assert "is not written down" in caplog.text


@pytest.mark.parametrize("options", [{"quantize": "nonsense"}, {"active_mask": torch.zeros(3).bool()}])
def test_a_refused_call_is_noted(options: dict[str, Any]) -> None:
    with EPBuffer(**SIZES) as buffer:
        with pytest.raises(ArgumentError) as caught:
            buffer.dispatch(X, IDS, **options)
        refused = buffer.flight().refused
        assert refused is not None
        assert (refused.operator, refused.number, refused.error) == ("dispatch", 0, str(caught.value))
        assert f"dispatch number 0 was refused: {caught.value}"[:60] in buffer.status()


def test_rows_and_tokens_of_halves_and_of_calls_in_rounds_count_once() -> None:
    with EPBuffer(**SIZES) as buffer:
        received = buffer.dispatch(X, IDS, wait=False).wait()
        buffer.combine(received.tokens, received.handle, wait=False).wait()
        metrics = buffer.metrics()
        assert metrics.rounds == {"dispatch": 1, "combine": 1, "barrier": 0}
        assert metrics.tokens["dispatch"] == metrics.tokens["combine"] == 4
        assert metrics.rows["dispatch"] == metrics.rows["combine"] == 8
        assert metrics.received_bytes == metrics.sent_bytes == [8 * 64 * 2]
        long = buffer.dispatch(X.repeat(3, 1), IDS.repeat(3, 1), num_max_tokens_per_rank=12)
        buffer.combine(long.tokens, long.handle)
        metrics = buffer.metrics()
        assert metrics.tokens["dispatch"] == metrics.tokens["combine"] == 16
        assert metrics.received_bytes == metrics.sent_bytes == [32 * 64 * 2]


def test_files_of_killed_processes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_memory, "MOST_LEFT", 0)
    with EPBuffer(**SIZES) as buffer:
        path = memory_of(buffer).path
        left = path.with_name(path.name[:-1] + ("0" if path.name[-1] != "0" else "1"))
        left.write_bytes(b"\0" * Header.num_runs.offset)
        with EPBuffer(**SIZES):
            assert path.exists(), "its owner lives"
            assert not left.exists()
