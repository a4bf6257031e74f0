"""Traces of ranks on several hosts, each with a clock of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.hosts import namespaces
from moe_triton.tools.cli.app import app
from moe_triton.tools.host_traces import events_of, on_one_clock
from tests.hosts import rounds
from tests.patience import seconds

pytestmark = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "there are hosts")
HOSTS, AHEAD_S = (2, 1), (0, 7200)
Event = dict[str, Any]


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/ns/time").exists(), reason="the kernel has no namespaces of time")
def test_clocks_that_are_hours_apart_become_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    given = "fullmesh_v1", str(path)
    done = namespaces.run(rounds.traced, HOSTS, *given, timeout_s=seconds(60), clocks=AHEAD_S)
    assert done == [True] * sum(HOSTS)
    files = [tmp_path / f"trace.host{number}.json" for number in range(len(HOSTS))]
    assert sorted(tmp_path.iterdir()) == files
    first, second = on_one_clock(files)
    assert (first.ranks, second.ranks) == ((0, 1), (2,))
    assert (first.clock.offset_ns, first.clock.error_ns) == (0, 0)
    assert abs(second.clock.offset_ns + AHEAD_S[1] * 10**9) <= second.clock.error_ns
    check_order([*first.events, *second.events], second.clock.error_ns / 1e3)
    apart = [event for file in files for event in events_of(file)]
    with pytest.raises(AssertionError):
        check_order(apart, second.clock.error_ns / 1e3)

    merged = tmp_path / "merged.json"
    said = CliRunner().invoke(
        app, ["trace", str(merged), *map(str, files), "--hosts"], catch_exceptions=False
    )
    assert said.exit_code == 0, said.output
    assert second.in_words() in said.output
    assert "ahead of the first one's, give or take" in second.in_words()
    check_order(events_of(merged), second.clock.error_ns / 1e3)


def check_order(events: list[Event], error_us: float) -> None:
    """Nobody has left a barrier before all had come, and no wait has ended before who was waited for sent."""
    calls = {(e["name"], e["pid"]): e for e in events if e.get("cat") == "operator"}
    ranks = range(sum(HOSTS))
    for number in range(3):
        barriers = [calls[f"barrier #{number}", rank] for rank in ranks]
        assert max(e["ts"] for e in barriers) <= min(e["ts"] + e["dur"] for e in barriers) + error_us
    waits = [
        event for event in events if event.get("cat") == "wait" and not event["args"]["of"].startswith("b")
    ]
    for wait in waits:
        sent = calls[wait["args"]["of"], wait["args"]["rank"]]
        assert sent["ts"] <= wait["ts"] + wait["dur"] + error_us
