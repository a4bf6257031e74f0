"""Which stream each launch of a plan goes to, and which events keep two streams in order.

A launch waits for all launches before it in the plan, except its neighbour if it runs `alongside`. One stream
keeps that order by itself; across two it takes an event, recorded after the last launch that must have ended
and waited for before the launch that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_triton.core.plan import Launch, Stream

BEGIN = -1  # of the call: what the user's stream held before


@dataclass(frozen=True)
class ScheduledLaunch:
    """The stream of a launch, and its events.

    Attributes:
        stream: that it runs on.
        waits_for: index of the other stream's launch that must have ended first, `BEGIN`, or None.
        is_awaited: whether another launch waits for this one, so that an event is recorded after it.
    """

    stream: Stream
    waits_for: int | None
    is_awaited: bool


@dataclass(frozen=True)
class Schedule:
    """A plan on streams.

    Attributes:
        launches: in the plan's order.
        begin_is_awaited: whether an event must be recorded before the first launch.
        end: index of the communication stream's last launch, which the user's stream must wait for; None if
            nothing runs there.
    """

    launches: tuple[ScheduledLaunch, ...]
    begin_is_awaited: bool
    end: int | None


def schedule(launches: Sequence[Launch], two_streams: bool) -> Schedule:
    """Streams and events of a plan.

    Args:
        launches: in the plan's order.
        two_streams: use both; otherwise all goes on the user's own, in the plan's order.
    """
    if not two_streams:
        return Schedule(tuple(ScheduledLaunch("compute", None, False) for _ in launches), False, None)
    # What each stream has already waited for on the other one.
    known: dict[Stream, int] = {"compute": BEGIN, "communication": BEGIN - 1}
    waits: list[int | None] = []
    for number, launch in enumerate(launches):
        own: Stream = launch.stream
        other: Stream = "communication" if own == "compute" else "compute"
        needed = _last_before(launches, number - launch.alongside, other)
        waits.append(needed if needed > known[own] else None)
        known[own] = max(known[own], needed)
    last = _last_before(launches, len(launches), "communication")
    end = last if last > known["compute"] else None
    awaited = {number for number in (*waits, end) if number is not None}
    scheduled = tuple(
        ScheduledLaunch(launch.stream, wait, number in awaited)
        for number, (launch, wait) in enumerate(zip(launches, waits, strict=True))
    )
    return Schedule(scheduled, BEGIN in awaited, end)


def _last_before(launches: Sequence[Launch], number: int, stream: Stream) -> int:
    """The last launch on a stream of those before this number; `BEGIN` if there is none."""
    return next((i for i in range(number - 1, -1, -1) if launches[i].stream == stream), BEGIN)
