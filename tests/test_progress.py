"""What a command says while it works."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from moe_triton.tools import progress as progress_module
from moe_triton.tools.progress import progress
from tests.patience import seconds


def quickly(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setattr(progress_module, "EVERY_S", 0.02)
    return io.StringIO()


def until(pattern: str, file: io.StringIO) -> None:
    end = time.monotonic() + seconds(20)
    while not re.search(pattern, file.getvalue()):
        assert time.monotonic() < end, file.getvalue()
        time.sleep(0.01)


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    file = quickly(monkeypatch)
    with progress("cases", 3, Console(file=file)) as work:
        until(r"cases: 0 of 3, \d+ s\n", file)
        work.begin("the first [one]")
        until(r"cases: 0 of 3, the first \[one\], ", file)
        work.advance("the second")
        until("cases: 1 of 3, the second, ", file)
        work.begin("the last", 2)
        until("cases: 1 of 2, the last, ", file)
    said = file.getvalue()
    time.sleep(0.1)
    assert file.getvalue() == said


def test_what_is_soon_done_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    with progress("cases", 3, Console(file=file)) as work:
        work.advance()
    assert file.getvalue() == ""


def test_on_a_terminal_there_is_a_bar() -> None:
    file = io.StringIO()
    with progress("cases", 3, Console(file=file, force_terminal=True, width=100)) as work:
        work.advance("the [second]")
        time.sleep(0.3)
    assert "cases: the [second]" in file.getvalue()
    assert "1/3" in file.getvalue()


@pytest.mark.parametrize("width", [80, 40])
def test_how_far_it_is_has_its_place_beside_a_long_line(width: int) -> None:
    file = io.StringIO()
    doing = "H 7168, K 8, EP 2, BS 16: fullmesh_v1 spins=0: 0.961 (0.94 to 0.99); best 0.93 of 17"
    with progress("groups", 1845, Console(file=file, force_terminal=True, width=width)) as work:
        work.advance(doing)
        time.sleep(0.3)
    assert "1/1845" in file.getvalue()
    assert "…" not in file.getvalue()


def test_a_bar_does_not_take_what_goes_to_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """rich would send it to the terminal of the bar."""
    bar = io.StringIO()
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with progress("cases", 3, Console(file=bar, force_terminal=True)):
            print("a result")
    assert (tmp_path / "out").read_text() == "a result\n"
    assert "a result" not in bar.getvalue()


def test_an_error_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    file = quickly(monkeypatch)

    def fails() -> None:
        with progress("cases", None, Console(file=file)):
            until("cases: 0 s", file)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    said = file.getvalue()
    time.sleep(0.1)
    assert file.getvalue() == said
