"""`moe-triton trace`: a picture of calls, from a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_triton.core.errors import ArgumentError
from moe_triton.tools.cli.app import app
from moe_triton.tools.cli.trace import Span, median_call
from tests.drawing import needs_matplotlib


def event(
    name: str, category: str, begin: float, us: float, of: str = "", rank: int = 0
) -> dict[str, object]:
    args = {"of": of} if of else {}
    return {"name": name, "cat": category, "ph": "X", "ts": begin, "dur": us, "pid": rank, "args": args}


def write_trace(path: Path, durations: list[float]) -> Path:
    """Calls of dispatch of these durations on rank 0: a third computes before the rest sends."""
    events: list[dict[str, object]] = [{"name": "process_name", "ph": "M", "pid": 0, "tid": 0}]
    for number, us in enumerate(durations):
        call, begin = f"dispatch #{number}", 1000.0 * number
        events += [
            event(call, "operator", begin, us),
            event("send", "communication", begin + us / 3, us * 2 / 3, call),
            event("write", "step", begin + us / 3, us / 3, call),
            event("route", "compute", begin, us / 3, call),
            event("route", "compute", begin, us, call, rank=1),
        ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_the_call_is_the_median_of_the_last_ones(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.json", [1.0, 900.0, 300.0, 600.0])
    assert median_call(trace, "dispatch", 0, 1).us == 600
    call = median_call(trace, "dispatch", 0, 3)
    assert call.us == 600
    assert call.spans == (Span("route", "compute", 0, 200), Span("send", "communication", 200, 400))
    assert median_call(trace, "dispatch", 0, 4).us == 600
    assert median_call(write_trace(trace, [5.0, 9.0, 7.0]), "dispatch", 0, 9).us == 7


@needs_matplotlib
def test_it_draws_every_step_of_every_trace(tmp_path: Path) -> None:
    series = write_trace(tmp_path / "series.json", [3000.0])
    overlapped = write_trace(tmp_path / "overlapped.json", [2000.0])
    picture = tmp_path / "folder" / "picture.svg"
    arguments = ["trace", str(picture), str(series), str(overlapped), "--operator", "dispatch"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    drawn = picture.read_bytes()
    for text in ("series: communication", "overlapped: compute", "3.0 ms", "2.0 ms", "send", "route"):
        assert f"<!-- {text} -->".encode() in drawn or f"<!--  {text} -->".encode() in drawn, text
    assert b"<!-- write -->" not in drawn
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert picture.read_bytes() == drawn


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": []}', '{"traceEvents": [{}]}'])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ArgumentError):
        median_call(path, "dispatch", 0, 1)
    picture = tmp_path / "picture.svg"
    result = CliRunner().invoke(app, ["trace", str(picture), str(path)], catch_exceptions=False)
    assert result.exit_code == 1
    assert "trace.json" in result.output
    assert not picture.exists()
