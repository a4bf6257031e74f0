"""Clocks of hosts from when ranks passed barriers, and traces of several hosts on one clock."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moe_triton.core.errors import ArgumentError
from moe_triton.runtime.clocks import HostClock, Passage, bounds
from moe_triton.tools.cli.app import app
from moe_triton.tools.cli.trace import call_of_each
from moe_triton.tools.host_traces import events_of, on_one_clock, write_merged
from tests.cli.test_trace import event
from tests.drawing import needs_matplotlib

AHEAD_NS = 3_600_000_000_123


def passages(generator: random.Random, ranks_ahead: list[int]) -> list[list[Passage]]:
    """When ranks pass barriers, by clocks that are ahead by so much: messages take any time."""
    of_ranks: list[list[Passage]] = [[] for _ in ranks_ahead]
    now = 10**12
    for _ in range(20):
        came = [now + generator.randrange(1000) for _ in ranks_ahead]
        left = [max(came) + generator.randrange(1, 500) for _ in ranks_ahead]
        for its, ahead, begin, end in zip(of_ranks, ranks_ahead, came, left, strict=True):
            its.append((begin + ahead, end + ahead))
        now = max(left) + 100
    return of_ranks


@pytest.mark.parametrize("seed", range(20))
def test_what_lies_between_clocks_is_within_the_bounds(seed: int) -> None:
    generator = random.Random(seed)
    of_ranks = passages(generator, [0, 0, AHEAD_NS, AHEAD_NS])
    lowest, highest = bounds(of_ranks[:2], of_ranks[2:])
    assert lowest <= -AHEAD_NS <= highest
    fewer = bounds(of_ranks[:1], of_ranks[2:3])
    assert fewer[0] <= lowest <= highest <= fewer[1]
    assert highest - lowest < 1000


def test_a_host_of_its_own_clock_is_not_apart() -> None:
    of_ranks = passages(random.Random(1), [0, 0])
    lowest, highest = bounds(of_ranks, of_ranks)
    assert lowest <= 0 <= highest


def clock(host: int, offset_us: float = 0.0, error_us: float = 5.0, **fields: Any) -> HostClock:
    ns = round(offset_us * 1e3), round(error_us * 1e3)
    return HostClock(**{**asdict(HostClock(host, f"host{host}", f"clock {host}", "clock 0", *ns)), **fields})


def write(path: Path, rank: int, begin_us: float, *clocks: HostClock) -> Path:
    """A call of a rank, by its host's clock."""
    events: list[dict[str, Any]] = [
        {"name": "clock", "ph": "M", "pid": rank, "tid": 0, "args": asdict(each)} for each in clocks
    ]
    call = "dispatch #0"
    events += [event(call, "operator", begin_us, 50.0, rank=rank)]
    events += [event("send", "communication", begin_us + 10, 20.0, call, rank=rank)]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def both(folder: Path) -> list[Path]:
    first = write(folder / "trace.host0.json", 0, 1000.0, clock(0, error_us=0.0))
    rough, fine = clock(1, -7000.0, 90.0), clock(1, -7010.0, 5.0)  # of two buffers
    return [first, write(folder / "trace.host1.json", 1, 8025.0, rough, fine)]


def test_times_become_those_of_the_first_host_by_the_surest_offset(tmp_path: Path) -> None:
    first, second = on_one_clock(both(tmp_path))
    assert (first.ranks, second.ranks) == ((0,), (1,))
    assert [e["ts"] for e in (*first.events, *second.events) if e["ph"] == "X"] == [1000, 1010, 1015, 1025]
    assert first.in_words() == "host 0 (host0), ranks [0]: its clock is the one that times are of"
    ahead = "7010.0 us ahead of the first one's, give or take 5.0 us"
    assert second.in_words() == f"host 1 (host1), ranks [1]: its clock is {ahead}"
    write_merged(tmp_path / "merged.json", [first, second])
    merged = events_of(tmp_path / "merged.json")
    assert merged == [*first.events, *second.events]
    told = [e["args"] for e in merged if e["name"] == "clock"]
    assert [(e["host"], e["offset_ns"], e["error_ns"]) for e in told][::2] == [(0, 0, 0), (1, 0, 5000)]


def test_the_same_call_of_all_ranks_begins_with_the_first(tmp_path: Path) -> None:
    calls = call_of_each(on_one_clock(both(tmp_path)), "dispatch", 1, 1)
    begins = {name: [span.begin_us for span in call.spans] for name, call in calls.items()}
    assert begins == {"rank 0": [10], "rank 1": [25]}
    assert [call.us for call in calls.values()] == [50, 65]


@needs_matplotlib
def test_hosts_are_drawn_together(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    arguments = ["trace", str(picture), *map(str, both(tmp_path)), "--hosts", "--operator", "dispatch"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "give or take 5.0 us" in result.output
    for text in ("rank 0: communication", "rank 1: compute", "send"):
        assert text in picture.read_text(), text


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda paths: [paths[0], paths[0]], "that rank's events are in"),
        (lambda paths: [paths[0], write(paths[1], 1, 0.0)], "say how far its clock is from another's"),
        (lambda paths: [paths[0], write(paths[1], 1, 0.0, clock(1), clock(2))], "of 2 clocks"),
        (
            lambda paths: [paths[0], write(paths[1], 1, 0.0, clock(1, reference="clock 7"))],
            "no clock is one that all of these files",
        ),
        (
            lambda paths: [paths[0], write(paths[1], 1, 0.0, clock(1, offset_ns="late"))],
            "it says how far its clock is",
        ),
    ],
)
def test_what_cannot_be_put_on_one_clock_is_refused(
    tmp_path: Path, spoil: Callable[[list[Path]], list[Path]], text: str
) -> None:
    paths = spoil(both(tmp_path))
    with pytest.raises(ArgumentError, match=text):
        on_one_clock(paths)
    result = CliRunner().invoke(app, ["trace", str(tmp_path / "merged.json"), *map(str, paths), "--hosts"])
    assert result.exit_code == 1
    assert not (tmp_path / "merged.json").exists()
