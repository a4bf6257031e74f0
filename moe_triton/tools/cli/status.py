"""``moe-triton status``: what ranks of this machine do, whom they wait for, and who holds all others up."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence

import typer
from rich.console import Console

from moe_triton.core import shared_memory
from moe_triton.core.errors import ArgumentError
from moe_triton.core.flight_file import Flight
from moe_triton.core.flight_story import status_lines, verdict
from moe_triton.tools.cli.errors import FAILED
from moe_triton.tools.recorders import PROC, ask_all
from moe_triton.tools.text_table import say

NUMBERS = "PID"
_REMEDY = (
    "Name a process that has made an EPBuffer, as its user and with its "
    f"{shared_memory.VARIABLE}; without one, all of your ranks are told of."
)


def pids_of(texts: Sequence[str]) -> list[int]:
    """Numbers of processes, each once.

    Raises:
        ArgumentError: one is none.
    """
    for text in texts:
        if not (text.isascii() and text.isdigit() and 0 < int(text[:20]) < 1 << 31):
            rule, remedy = (
                "it must be the number of a process",
                "See `ps`; without one, all ranks are told of.",
            )
            raise ArgumentError(NUMBERS, repr(text), rule, remedy)
    return list(dict.fromkeys(map(int, texts)))


def with_groups(flights: Sequence[Flight], pids: Collection[int]) -> list[Flight]:
    """All ranks that processes may be held up by.

    Args:
        flights: of all ranks.
        pids: of the processes.

    Returns:
        The ranks of their groups, and of other groups that these ranks' processes are in, and so on.
    """
    known, number = set(pids), -1
    while number != len(known):
        number = len(known)
        groups = {flight.group for flight in flights if flight.pid in known and flight.group}
        known |= {flight.pid for flight in flights if flight.group in groups}
    return [flight for flight in flights if flight.pid in known]


def show_status(texts: Sequence[str], *, is_of_groups: bool, as_json: bool, console: Console) -> int:
    """Prints what ranks do.

    Args:
        texts: numbers of processes; all of this user's where there are none.
        is_of_groups: whether to take all ranks of their groups, and to say first who holds them up.
        as_json: whether to print one JSON object.
        console: to print to; what cannot be read, or is none of ours, goes to stderr.

    Returns:
        0, or 1 where a process has no buffer here.

    Raises:
        ArgumentError: a number is none of a process.
        WindowError: the folder of windows cannot be used.
    """
    pids, folder, errors = pids_of(texts), shared_memory.folder(), Console(stderr=True)
    seen = ask_all(folder)
    for unread in seen.unread:
        say(f"{unread.path} is no recorder that can be read: {unread.why}", errors)
    missing = [pid for pid in pids if all(flight.pid != pid for flight in seen.flights)]
    for pid in missing:
        exists = "" if (PROC / str(pid)).is_dir() else ", and there is no such process"
        why = f"{folder} has no recorder of it{exists}"
        say(f"process {pid} has no buffer of moe_triton's here: {why}. {_REMEDY}", errors)
    if not pids and not seen.flights:
        why = f"{folder} has no recorder"
        say(f"no process of yours has a buffer of moe_triton's here: {why}. {_REMEDY}", errors)
    chosen: Sequence[Flight] = seen.flights
    if pids and is_of_groups:
        chosen = with_groups(seen.flights, pids)
    elif pids:
        chosen = [flight for flight in seen.flights if flight.pid in pids]
    now_ns = time.monotonic_ns()
    held_up = verdict(chosen, now_ns, seen.processes) if is_of_groups else []
    lines = status_lines(chosen, now_ns, seen.processes)
    if as_json:
        ranks = [
            {
                "file": flight.source,
                "process": seen.processes.get((flight.host, flight.pid)),
                **flight.as_json(),
            }
            for flight in chosen
        ]
        unread_files = [{"file": str(each.path), "why": each.why} for each in seen.unread]
        made = {"now_ns": now_ns, "verdict": held_up, "lines": lines, "ranks": ranks}
        typer.echo(json.dumps({**made, "unread": unread_files, "missing": missing}, indent=1))
    else:
        for line in (*held_up, *lines):
            say(line, console)
    return FAILED if missing or not chosen else 0
