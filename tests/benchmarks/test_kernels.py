"""What the kernels' benchmark says of its own table, and what it refuses."""

from __future__ import annotations

import pytest

from benchmarks.kernels import __main__ as kernels


def _run(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr("sys.argv", ["kernels", *options])
    kernels.main()


def test_fewer_tokens_than_there_are_kinds_of_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _run(monkeypatch, "--tokens", "1", "--only", "add_rows")
    assert "1: at least 8" in capsys.readouterr().err


def test_parentheses_around_ratios_to_a_model_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = "--iterations", "1", "--cold-iterations", "1"
    _run(monkeypatch, "--tokens", "8", "--hidden", "64", "--only", "stamps/h64-int8-weights", *rounds)
    said = capsys.readouterr().out
    assert "Of torch / ours in parentheses: torch is the kernel's model" in said
    assert "Of ours / memcpy in parentheses: cores were shared" in said
