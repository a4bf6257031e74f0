"""A picture of ranks' recorders: a trace for Perfetto, as buffers write it (`moe_triton.runtime.traces`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_triton.core.errors import ArgumentError
from moe_triton.core.flight_file import Flight, Run
from moe_triton.core.flight_group import clock_shifts, groups_of
from moe_triton.core.flight_words import printable
from moe_triton.runtime.traces import TraceFile

Json = dict[str, Any]
OPTION = "--picture"


def write_picture(path: Path, flights: Sequence[Flight]) -> None:
    """Writes a trace with a process for each rank.

    Args:
        path: of the file, which is replaced.
        flights: of the ranks.

    Raises:
        ArgumentError: it cannot be written.
    """
    try:
        file = TraceFile(path)
        file.check_writable()
        file.start(is_first=True)
        file.add(events_of(flights))
    except ArgumentError as error:
        raise error.renamed({"trace": OPTION}) from None


def events_of(flights: Sequence[Flight]) -> list[Json]:
    """Names of processes, and spans of runs with their steps inside, on the clock of the first one's host.

    Where the ranks are of one group, processes have their numbers.
    """
    groups, shifts = groups_of(flights), clock_shifts(flights)
    events, spans = list[Json](), list[Json]()
    for group in groups:
        for rank, flight in group.flights.items():
            number = rank if len(groups) == 1 else len(events) // 3
            name = f"rank {rank}" if len(groups) == 1 else f"rank {rank} of {group.label}"
            events += [
                _named(number, "process_name", name=printable(name)),
                _named(number, "process_sort_index", sort_index=number),
                _named(number, "thread_name", name="calls"),
            ]
            for run in flight.runs:
                spans += _spans(number, flight, run, shifts[flight.host])
    # A span comes before those nested in it.
    return events + sorted(spans, key=lambda span: (span["ts"], -span["dur"]))


def _spans(number: int, flight: Flight, run: Run, shift_ns: int) -> Iterator[Json]:
    """A run, and its steps one behind the other: recorders keep how long each took, and not when."""
    begin_us = (run.begin_ns + shift_ns) / 1e3
    end_ns = flight.read_ns if run.end_ns is None else run.end_ns
    us = max(0, end_ns - run.begin_ns) / 1e3
    call = printable(f"{run.operator} #{run.number}{f' {run.phase}' if run.phase else ''}")
    yield _span(number, call, "operator", begin_us, us, _arguments(flight, run))
    at_us = 0.0
    for step, step_us in run.steps_us.items():
        length_us = max(0.0, min(step_us, us - at_us))
        yield _span(number, printable(step), "step", begin_us + at_us, length_us, {"of": call})
        at_us += length_us


def _arguments(flight: Flight, run: Run) -> Json:
    arguments: Json = {"zone": run.zone, "ended": run.ended}
    arguments |= {name: value for name in ("tokens", "rows") if (value := getattr(run, name)) is not None}
    if run.awaited is not None:
        rank, us = run.awaited
        arguments |= {"rank awaited longest": rank, "us that it was awaited": us}
    if run is flight.running and flight.wait is not None:
        arguments |= {"step": flight.wait.step, "waits for ranks": list(flight.wait.ranks)}
    return arguments


def _span(number: int, name: str, category: str, begin_us: float, us: float, arguments: Json) -> Json:
    where = {"pid": number, "tid": 0, "args": arguments}
    return {"name": name, "cat": category, "ph": "X", "ts": begin_us, "dur": us, **where}


def _named(number: int, kind: str, **arguments: object) -> Json:
    return {"name": kind, "ph": "M", "pid": number, "tid": 0, "args": arguments}
