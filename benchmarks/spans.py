"""Spans of traces: which calls they belong to, and what of one lies beside others. Times in microseconds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

Span = tuple[float, float]
Event = dict[str, Any]


def calls_of(trace: Path, operator: str, last: int) -> dict[int, dict[int, list[Event]]]:
    """What ranks did in the last so many calls of an operator: events by the call's number and by rank."""
    calls: dict[int, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in json.loads(trace.read_text())["traceEvents"]:
        name, _, number = str(event.get("args", {}).get("of", "")).partition(" #")
        if event["ph"] == "X" and name == operator:
            calls[int(number)][event["pid"]].append(event)
    return {number: calls[number] for number in sorted(calls)[-last:]}


def span_of(event: Event) -> Span:
    """When it began and when it ended."""
    return event["ts"], event["ts"] + event["dur"]


def spans_named(events: Iterable[Event], *names: str) -> list[Span]:
    """Those of events with one of these names."""
    return [span_of(event) for event in events if event["name"] in names]


def _lies_in(step: Event, launch: Event) -> bool:
    """On the same core."""
    (begin, end), (first, last) = span_of(step), span_of(launch)
    return bool(step["tid"] == launch["tid"] and first <= begin and end <= last)


def steps_in(events: Sequence[Event], launch: str, names: Collection[str]) -> list[Span]:
    """Spans of the steps of some names within a rank's launches of one name, on all of its cores."""
    launches = [event for event in events if event["name"] == launch]
    return [
        span_of(step)
        for step in events
        if step["name"] in names and any(_lies_in(step, each) for each in launches)
    ]


def overlap_us(span: Span, others: Iterable[Span]) -> float:
    """Microseconds of a span that the union of others covers."""
    covered, at = 0.0, span[0]
    for begin, end in sorted(others):
        begin, end = max(begin, at), min(end, span[1])
        if end > begin:
            covered, at = covered + end - begin, end
    return covered


def merged(spans: Iterable[Span]) -> list[Span]:
    """Their union, by begin: blocks of a launch run beside each other."""
    union: list[Span] = []
    for begin, end in sorted(spans):
        if union and begin < union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((begin, end))
    return union
