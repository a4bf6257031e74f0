"""On which stream each launch of a plan goes, and which events keep the two in order.

A launch waits for all that stand before it in the plan, but for its neighbour where it runs `alongside`. On
one stream that holds by itself; between two it takes an event, recorded after the last launch that has to be
over, and waited for before the one that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_triton.core.plan import Launch, Stream

BEGIN = -1  # of the call: what the user's stream held before


@dataclass(frozen=True)
class Place:
    """Where a launch goes.

    Attributes:
        stream: on which stream.
        waits_for: number of the other stream's launch that has to be over first, `BEGIN`, or None.
        is_awaited: whether somebody waits for this one, so that an event follows it.
    """

    stream: Stream
    waits_for: int | None
    is_awaited: bool


@dataclass(frozen=True)
class Schedule:
    """A plan on streams.

    Attributes:
        places: one per launch.
        begin_is_awaited: whether an event has to be recorded before the first launch.
        end: the communication stream's last launch, which the user's stream has to wait for; None where
            nothing runs there.
    """

    places: tuple[Place, ...]
    begin_is_awaited: bool
    end: int | None


def schedule(launches: Sequence[Launch], two_streams: bool) -> Schedule:
    """Streams and events of a plan.

    Args:
        launches: in the plan's order.
        two_streams: use both; otherwise all goes on the user's own, in the plan's order.
    """
    if not two_streams:
        return Schedule(tuple(Place("compute", None, False) for _ in launches), False, None)
    last: dict[Stream, int | None] = {"compute": None, "communication": None}
    # What each stream has waited for on the other one already.
    known: dict[Stream, int] = {"compute": BEGIN, "communication": BEGIN - 1}
    waits: list[int | None] = []
    for number, launch in enumerate(launches):
        own: Stream = launch.stream
        other: Stream = "communication" if own == "compute" else "compute"
        needed = _last_before(launches, number, other)
        target = BEGIN if needed is None else needed
        is_new = target > known[own]
        waits.append(target if is_new else None)
        known[own] = max(known[own], target)
        last[own] = number
    end = last["communication"]
    awaited = {wait for wait in waits if wait is not None}
    if end is not None and end > known["compute"]:
        awaited.add(end)
    else:
        end = None
    places = tuple(
        Place(launch.stream, wait, number in awaited)
        for number, (launch, wait) in enumerate(zip(launches, waits, strict=True))
    )
    return Schedule(places, BEGIN in awaited, end)


def _last_before(launches: Sequence[Launch], number: int, stream: Stream) -> int | None:
    """The last launch on a stream that has to be over before this one starts."""
    first = number - 1
    if launches[number].alongside and launches[first].stream == stream:
        first -= 1
    return next((i for i in range(first, -1, -1) if launches[i].stream == stream), None)
