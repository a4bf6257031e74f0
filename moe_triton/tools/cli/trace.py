"""`moe-triton trace`: a picture of calls in a trace, what communicates above what computes."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_triton.core.errors import ArgumentError
from moe_triton.core.plain_files import read_text
from moe_triton.tools.plots import COLOURS, draw, legend

STREAMS = ("communication", "compute")
PANEL_WIDTH, LANE_HEIGHT, PANEL_MARGIN = 9.0, 0.34, 1.1  # inches
BAR_HEIGHT = 0.8  # of a lane
US_PER_MS = 1e3
MOST_TRACE_BYTES, MOST_US = 1 << 30, 1e18


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


def median_call(trace: Path, operator: str, rank: int, calls: int) -> Call:
    """The one of median duration among the last ``calls`` calls of an operator in a trace.

    Raises:
        ArgumentError: the file is no trace, or has no such call.
    """
    try:
        document = json.loads(read_text(trace, MOST_TRACE_BYTES))
        events = [_checked(event) for event in document["traceEvents"] if event["ph"] == "X"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        rule, hint = "it must be a trace in Chrome's format", "Pass the file that EPBuffer(trace=...) wrote."
        raise ArgumentError("traces", f"{trace} ({error})", rule, hint) from error
    of_rank = [event for event in events if event["pid"] == rank]
    is_wanted = f"{operator} #"
    wholes = [e for e in of_rank if e["cat"] == "operator" and e["name"].startswith(is_wanted)]
    if not wholes:
        rule = f"it must have a {operator} of rank {rank}"
        raise ArgumentError("traces", str(trace), rule, "Pass another --rank or --operator.")
    last = sorted(sorted(wholes, key=lambda e: float(e["ts"]))[-calls:], key=lambda e: float(e["dur"]))
    whole = last[len(last) // 2]
    begin = whole["ts"]
    spans = [
        Span(event["name"], event["cat"], event["ts"] - begin, event["dur"])
        for event in of_rank
        if event["cat"] in STREAMS and event["args"].get("of") == whole["name"]
    ]
    return Call(whole["dur"], tuple(sorted(spans, key=lambda span: span.begin_us)))


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
    median_calls = {
        o: {trace.stem: median_call(trace, o, rank, calls) for trace in traces} for o in operators
    }
    drawn = [call for of in median_calls.values() for call in of.values()]
    steps = list(dict.fromkeys(span.step for call in drawn for span in call.spans))
    colours = {step: COLOURS[number % len(COLOURS)] for number, step in enumerate(steps)}

    def paint(figure: Any) -> None:
        height = len(operators) * (PANEL_MARGIN + LANE_HEIGHT * len(STREAMS) * len(traces))
        figure.set_size_inches(PANEL_WIDTH, height)
        axes = figure.subplots(len(operators), squeeze=False).flatten()
        for axis, operator in zip(axes, operators, strict=True):
            _panel(axis, median_calls[operator], colours)
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
