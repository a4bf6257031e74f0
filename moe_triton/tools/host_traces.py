"""Traces of several hosts on one clock: files that the ranks of each host wrote, in one run."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from moe_triton.core.errors import ArgumentError
from moe_triton.core.plain_files import read_text
from moe_triton.runtime.clocks import HostClock
from moe_triton.runtime.traces import CLOCK, TraceFile

Json = dict[str, Any]
MOST_TRACE_BYTES = 1 << 30
MOST_NS, MOST_US = 1 << 62, 1e18
_HINT = "Pass the files of one run that EPBuffer(trace=...) wrote, one of each host."


@dataclass(frozen=True)
class HostTrace:
    """What the ranks of one host wrote.

    Attributes:
        path: of the file.
        events: with times of the clock of the first host.
        clock: of this host, with the offset that has been added.
        ranks: whose events these are.
    """

    path: Path
    events: tuple[Json, ...]
    clock: HostClock
    ranks: tuple[int, ...]

    def in_words(self) -> str:
        """Which clock the host has, in a line."""
        ahead, error = -self.clock.offset_ns / 1e3, self.clock.error_ns / 1e3
        where = f"{'behind' if ahead < 0 else 'ahead of'} the first one's"
        said = f"{abs(ahead):.1f} us {where}, give or take {error:.1f} us"
        if self.clock.clock == self.clock.reference:
            said = "the one that times are of"
        return f"host {self.clock.host} ({self.clock.name}), ranks {list(self.ranks)}: its clock is {said}"


def events_of(path: Path) -> list[Json]:
    """The events of a trace, of which nothing is checked but that each is a mapping.

    Raises:
        ArgumentError: the file is no trace.
    """
    try:
        events = json.loads(read_text(path, MOST_TRACE_BYTES))["traceEvents"]
        if not all(isinstance(event, dict) for event in events):
            raise ValueError("an event is no mapping")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refused(path, str(error), "it must be a trace in Chrome's format") from error
    return list(events)


def on_one_clock(paths: Sequence[Path]) -> list[HostTrace]:
    """The traces of several hosts, with all times of the first one's clock.

    Args:
        paths: a file of each host.

    Raises:
        ArgumentError: a file is no trace, does not say how far its clock is from the others', or has a rank
            that another one has.
    """
    read = [(path, events_of(path)) for path in paths]
    clocks = [{clock.reference: clock for clock in _clocks_of(path, events)} for path, events in read]
    common = set.intersection(*map(set, clocks))
    if not common:
        rule = "no clock is one that all of these files say their distance from"
        raise ArgumentError("traces", ", ".join(map(str, paths)), rule, _HINT)
    reference = min(common)
    made = [_shifted(*each, its[reference]) for each, its in zip(read, clocks, strict=True)]
    for number, one in enumerate(made):
        for other in made[:number]:
            if both := sorted(set(one.ranks) & set(other.ranks)):
                raise _refused(one.path, str(both[0]), f"that rank's events are in {other.path}, too")
    return made


def write_merged(path: Path, traces: Sequence[HostTrace]) -> None:
    """Writes one trace of all hosts.

    Args:
        path: of the file, which is replaced.
        traces: of the hosts.

    Raises:
        ArgumentError: it cannot be written.
    """
    file = TraceFile(path)
    file.check_writable()
    file.start(is_first=True)
    file.add(event for trace in traces for event in trace.events)


def _clocks_of(path: Path, events: Sequence[Json]) -> list[HostClock]:
    """The clock of each rank and buffer that wrote to a file, the surest of each reference last."""
    try:
        found = [
            _clock_of(each["args"]) for each in events if each.get("name") == CLOCK and each["ph"] == "M"
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(path, f"{type(error).__name__}: {error}", "it says how far its clock is") from error
    if len({each.clock for each in found}) != 1:
        rule = "a file of several must be of one host, and say how far its clock is from another's"
        raise _refused(path, f"of {len({each.clock for each in found})} clocks", rule)
    return sorted(found, key=lambda clock: -clock.error_ns)


def _clock_of(said: Mapping[str, Any]) -> HostClock:
    clock = HostClock(**{each.name: said[each.name] for each in fields(HostClock)})
    numbers = clock.host, clock.offset_ns, clock.error_ns
    if not all(type(number) is int and abs(number) < MOST_NS for number in numbers):
        raise ValueError(f"numbers are {numbers}")
    texts = clock.name, clock.clock, clock.reference
    if not all(isinstance(text, str) and text.isprintable() for text in texts):
        raise TypeError("names must be texts")
    return clock


def _checked(event: Json) -> Json:
    """An event that has a rank, and a time unless it is metadata.

    Raises:
        ValueError: one is of another type, or out of range.
        KeyError: one is missing.
    """
    time = 0 if event["ph"] == "M" else event["ts"]
    if type(time) not in (int, float) or not 0 <= time <= MOST_US or type(event["pid"]) is not int:
        raise ValueError(f"an event is {reprlib.repr(event)}")
    return event


def _shifted(path: Path, events: Sequence[Json], clock: HostClock) -> HostTrace:
    told = asdict(replace(clock, offset_ns=0, clock=clock.reference))
    shifted: list[Json] = []
    try:
        for event in map(_checked, events):
            if event["ph"] == "M":
                shifted.append({**event, "args": told} if event.get("name") == CLOCK else event)
            else:
                shifted.append({**event, "ts": event["ts"] + clock.offset_ns / 1e3})
        ranks = tuple(sorted({event["pid"] for event in events}))
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(path, f"{type(error).__name__}: {error}", "events have a time and a rank") from error
    return HostTrace(path, tuple(shifted), clock, ranks)


def _refused(path: Path, value: str, rule: str) -> ArgumentError:
    return ArgumentError("traces", f"{path} ({value})", rule, _HINT)
