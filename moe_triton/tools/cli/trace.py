"""`moe-triton trace`: a picture of calls in a trace, what communicates above what computes."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_triton.core.errors import ArgumentError
from moe_triton.tools.host_traces import MOST_US, HostTrace, events_of
from moe_triton.tools.plots import COLOURS, draw, legend

STREAMS = ("communication", "compute")
PANEL_WIDTH, LANE_HEIGHT, PANEL_MARGIN = 9.0, 0.34, 1.1  # inches
BAR_HEIGHT = 0.8  # of a lane
US_PER_MS = 1e3


@dataclass(frozen=True)
class Span:
    """A block of a launch.

    Attributes:
        step: its name in the plan.
        stream: "communication" or "compute".
        begin_us: from the begin of the operator.
        us: how long it took.
    """

    step: str
    stream: str
    begin_us: float
    us: float


@dataclass(frozen=True)
class Call:
    """One operator on one rank.

    Attributes:
        us: how long it took.
        spans: its launches, by begin.
    """

    us: float
    spans: tuple[Span, ...]


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    """An event with the fields that are used.

    Raises:
        ValueError: one has another type, or a time is none.
        KeyError: one is missing.
    """
    times = event["ts"], event["dur"]
    is_text = isinstance(event["name"], str) and isinstance(event["cat"], str)
    is_time = all(type(time) in (int, float) and 0 <= time <= MOST_US for time in times)
    if not (is_text and is_time and isinstance(event["args"], dict)):
        raise ValueError(f"an event is {reprlib.repr(event)}")
    return event


def _spans_in(trace: Path, events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What took time, of a trace.

    Raises:
        ArgumentError: it is no trace.
    """
    try:
        return [_checked(event) for event in events if event["ph"] == "X"]
    except (ValueError, KeyError, TypeError) as error:
        rule, hint = "it must be a trace in Chrome's format", "Pass the file that EPBuffer(trace=...) wrote."
        raise ArgumentError("traces", f"{trace} ({error})", rule, hint) from error


def _median(
    trace: Path, spans: Sequence[dict[str, Any]], operator: str, rank: int, calls: int
) -> dict[str, Any]:
    """The span of the call of median duration among the last ``calls`` of a rank.

    Raises:
        ArgumentError: there is no such call.
    """
    is_wanted = f"{operator} #"
    of_rank = [span for span in spans if span["pid"] == rank]
    wholes = [e for e in of_rank if e["cat"] == "operator" and e["name"].startswith(is_wanted)]
    if not wholes:
        rule = f"it must have a {operator} of rank {rank}"
        raise ArgumentError("traces", str(trace), rule, "Pass another --rank or --operator.")
    last = sorted(sorted(wholes, key=lambda e: float(e["ts"]))[-calls:], key=lambda e: float(e["dur"]))
    return last[len(last) // 2]


def _call_of(spans: Sequence[dict[str, Any]], whole: dict[str, Any], begin: float) -> Call:
    """A rank's call, and what it took, from a time on."""
    until = whole["ts"] + whole["dur"]
    own = [
        Span(span["name"], span["cat"], span["ts"] - begin, span["dur"])
        for span in spans
        if span["pid"] == whole["pid"]
        and span["cat"] in STREAMS
        and span["args"].get("of") == whole["name"]
        and whole["ts"] <= span["ts"] <= until
    ]
    return Call(until - begin, tuple(sorted(own, key=lambda span: span.begin_us)))


def median_call(trace: Path, operator: str, rank: int, calls: int) -> Call:
    """The one of median duration among the last ``calls`` calls of an operator in a trace.

    Raises:
        ArgumentError: the file is no trace, or has no such call.
    """
    spans = _spans_in(trace, events_of(trace))
    whole = _median(trace, spans, operator, rank, calls)
    return _call_of(spans, whole, whole["ts"])


def call_of_each(traces: Sequence[HostTrace], operator: str, rank: int, calls: int) -> dict[str, Call]:
    """The call of `median_call` on all ranks of several hosts, from when the first of them began.

    Raises:
        ArgumentError: there is no such call of that rank.
    """
    spans = [span for trace in traces for span in _spans_in(trace.path, trace.events)]
    whole = _median(traces[0].path, spans, operator, rank, calls)
    same: dict[int, dict[str, Any]] = {}
    for span in spans:
        if span["cat"] == "operator" and span["name"] == whole["name"]:  # a later buffer counts anew
            other = same.setdefault(span["pid"], span)
            if abs(span["ts"] - whole["ts"]) < abs(other["ts"] - whole["ts"]):
                same[span["pid"]] = span
    begin = min(span["ts"] for span in same.values())
    return {f"rank {rank}": _call_of(spans, same[rank], begin) for rank in sorted(same)}


def draw_calls(
    picture: Path, traces: Sequence[Path], operators: Sequence[str], rank: int, calls: int
) -> Path:
    """Draws calls of each operator on one time axis, one trace below the other.

    Args:
        picture: the SVG to write.
        traces: files, whose names without suffix are shown.
        operators: "dispatch", "combine".
        rank: whose calls.
        calls: of the last so many calls, the one of median duration is shown.

    Raises:
        ArgumentError: a file is no trace, or has no such call.
        ToolchainError: matplotlib is missing.
    """
    of_operators = {
        o: {trace.stem: median_call(trace, o, rank, calls) for trace in traces} for o in operators
    }
    return _draw(picture, of_operators)


def draw_hosts(
    picture: Path, traces: Sequence[HostTrace], operators: Sequence[str], rank: int, calls: int
) -> Path:
    """Draws the same call of each operator on every rank of several hosts, on one time axis.

    Args:
        picture: the SVG to write.
        traces: of the hosts, on one clock.
        operators: as in `draw_calls`.
        rank: that says which call it is.
        calls: as in `draw_calls`.

    Raises:
        ArgumentError: there is no such call.
        ToolchainError: matplotlib is missing.
    """
    return _draw(picture, {o: call_of_each(traces, o, rank, calls) for o in operators})


def _draw(picture: Path, of_operators: dict[str, dict[str, Call]]) -> Path:
    drawn = [call for of in of_operators.values() for call in of.values()]
    steps = list(dict.fromkeys(span.step for call in drawn for span in call.spans))
    colours = {step: COLOURS[number % len(COLOURS)] for number, step in enumerate(steps)}

    def paint(figure: Any) -> None:
        lanes = len(STREAMS) * max(map(len, of_operators.values()))
        figure.set_size_inches(PANEL_WIDTH, len(of_operators) * (PANEL_MARGIN + LANE_HEIGHT * lanes))
        axes = figure.subplots(len(of_operators), squeeze=False).flatten()
        for axis, (operator, calls) in zip(axes, of_operators.items(), strict=True):
            _panel(axis, calls, colours)
            axis.set_title(operator, loc="left")
        legend(figure, len(steps))

    return draw(picture, paint)


def _panel(axis: Any, calls: dict[str, Call], colours: dict[str, str]) -> None:
    """A lane for each stream of each call, the first on top."""
    lanes = [(name, stream) for name in calls for stream in STREAMS]
    for lane, (name, stream) in enumerate(lanes):
        for span in calls[name].spans:
            if span.stream == stream:
                at = [(span.begin_us / US_PER_MS, span.us / US_PER_MS)]
                bar = (lane - BAR_HEIGHT / 2, BAR_HEIGHT)
                axis.broken_barh(at, bar, facecolors=colours[span.step], label=span.step)
    for number, call in enumerate(calls.values()):
        at_ms = call.us / US_PER_MS
        reach = len(STREAMS) * number
        axis.plot([at_ms, at_ms], [reach - 0.5, reach + len(STREAMS) - 0.5], color="black", linewidth=0.8)
        axis.annotate(f" {at_ms:.1f} ms", (at_ms, reach + 0.5), va="center", fontsize="small")
    axis.set_yticks(range(len(lanes)), [f"{name}: {stream}" for name, stream in lanes])
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    axis.set_xlim(0, 1.1 * max(call.us for call in calls.values()) / US_PER_MS)
    axis.set_xlabel("ms from the begin of the call")
