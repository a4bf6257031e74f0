"""``moe-triton flight``: what several ranks' recorders, or what was written down of them, say together."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import typer
from rich.console import Console

from moe_triton.core import shared_memory
from moe_triton.core.errors import WindowError
from moe_triton.core.flight_file import PREFIX, Flight, FlightError, OtherFileError, read_file
from moe_triton.core.flight_findings import findings
from moe_triton.core.flight_group import FlightGroup, ProcessState, groups_of
from moe_triton.core.flight_words import listed, printable, ranks_in_words
from moe_triton.tools.cli.errors import FAILED
from moe_triton.tools.flight_picture import write_picture
from moe_triton.tools.recorders import Seen, Unread, state_of, unread_of
from moe_triton.tools.text_table import say

JSON = ".json"


def show_flights(paths: Sequence[Path], *, as_json: bool, picture: Path | None, console: Console) -> int:
    """Prints what is found in recorders.

    Args:
        paths: of files, or of folders of them.
        as_json: whether to print one JSON object.
        picture: a trace to write.
        console: to print to; what cannot be read goes to stderr.

    Returns:
        0, or 1 where nothing can be read.

    Raises:
        ArgumentError: the trace cannot be written.
    """
    seen, errors = read_all(paths), Console(stderr=True)
    for unread in seen.unread:
        say(f"{unread.path} cannot be read: {unread.why}", errors)
    found = findings(seen.flights, seen.processes)
    if picture is not None and seen.flights:
        write_picture(picture, seen.flights)
    if as_json:
        flights = [{"file": flight.source, **flight.as_json()} for flight in seen.flights]
        unread_files = [{"file": str(each.path), "why": each.why} for each in seen.unread]
        made = {"flights": flights, "findings": [asdict(each) for each in found], "unread": unread_files}
        typer.echo(json.dumps(made, indent=1))
    elif seen.flights:
        for group in groups_of(seen.flights):
            say(_in_words(group), console)
        for each in found:
            say(each.text, console)
        if not found:
            say("nothing is amiss in these records", console)
    return 0 if seen.flights else FAILED


def read_all(paths: Sequence[Path]) -> Seen:
    """Reads recorders, and what was written down of them.

    Args:
        paths: of files, or of folders of them, whose other files are left alone.
    """
    flights, unread = list[Flight](), list[Unread]()
    states: dict[tuple[str, int], ProcessState] = {}
    memory = _memory()
    for path, is_named in _files(paths):
        try:
            flight = read_file(path)
        except (FlightError, OSError) as error:
            if is_named or not isinstance(error, OtherFileError):
                unread.append(unread_of(path, error))
            continue
        # Of a copy it is not known what has become of the process since.
        state = state_of(path, flight) if path.parent.resolve() == memory else None
        if state is not None:
            states[flight.host, flight.pid] = state
        if state == "running":
            flight = replace(flight, read_ns=time.monotonic_ns())
        flights.append(flight)
    unread += [
        Unread(path, f"there is no file in it whose name begins with {PREFIX} or ends in {JSON}")
        for path in paths
        if path.is_dir() and not list(_files([path]))
    ]
    return Seen(flights, states, unread)


def _memory() -> Path | None:
    """Where recorders of this machine are while their processes live."""
    try:
        return shared_memory.folder().resolve()
    except WindowError:
        return None  # what files say can be told without


def _files(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Files, and whether each was named."""
    for path in paths:
        if not path.is_dir():
            yield path, True
            continue
        for each in sorted(path.iterdir()):
            is_recorder = each.name.startswith(PREFIX) and each.suffix != shared_memory.UNLOCKED
            if (is_recorder or each.suffix == JSON) and not each.is_dir():
                yield each, False


def _in_words(group: FlightGroup) -> str:
    """Which ranks there are records of, and the newest call in these."""
    said = f"{group.label}: records of {ranks_in_words(group.flights)} of {group.num_ranks}"
    hosts = list(dict.fromkeys(flight.host for flight in group.flights.values()))
    runs = [
        (run.begin_ns + flight.unix_minus_monotonic_ns, run.name)
        for flight in group.flights.values()
        for run in flight.runs
    ]
    newest = f"; their newest call is {max(runs)[1]}" if runs else ""
    return printable(f"{said}, on {listed(hosts)}{newest}")
