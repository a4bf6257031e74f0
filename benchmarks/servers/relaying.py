"""How much of a hierarchy's relaying lies beside the link, from a trace.

A rank's relaying is, in dispatch, that it passes tokens on to ranks of its server: the steps of its relay in
which it neither polls nor sleeps. Beside the link is what of it lies in spans in which links carry that
call's tokens *to* this rank. In combine it is the sums of its server's results, and beside the link is what
lies in spans in which its own link carries its partial rows *away*: those are what its sums are for.
So phases in series hide nothing: they pass on when the last token has come, and send behind the last sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.spans import Event, Span, calls_of, merged, overlap_us, span_of, spans_named, steps_in

RELAY, SERVER_SUM = "relay", "server sum"
PASSING_ON = ("write", "flag")


@dataclass(frozen=True)
class Relayed:
    """What one call relayed, in microseconds of each rank's cores.

    Attributes:
        us: by rank.
        beside_us: of that, what lay beside the link.
    """

    us: tuple[float, ...]
    beside_us: tuple[float, ...]

    @property
    def hidden(self) -> float:
        """The share that lay beside the link, of all ranks' time; 0 where nothing was relayed."""
        total = sum(self.us)
        return sum(self.beside_us) / total if total else 0.0


def relayed(trace: Path, operator: str, last: int) -> list[Relayed]:
    """The last so many calls of an operator, in order."""
    return [_relayed(ranks, operator) for ranks in calls_of(trace, operator, last).values()]


def _relayed(ranks: Mapping[int, Sequence[Event]], operator: str) -> Relayed:
    us, beside_us = [], []
    for rank, events in sorted(ranks.items()):
        link, work = merged(link_of(ranks, operator, rank)), relaying(events, operator)
        us.append(sum(end - begin for begin, end in work))
        beside_us.append(sum(overlap_us(span, link) for span in work))
    return Relayed(tuple(us), tuple(beside_us))


def relaying(events: Sequence[Event], operator: str) -> list[Span]:
    """A rank's spans of it in one call, on all of its cores."""
    if operator == "combine":
        return spans_named(events, SERVER_SUM)
    return steps_in(events, RELAY, PASSING_ON)


def link_of(ranks: Mapping[int, Sequence[Event]], operator: str, rank: int) -> list[Span]:
    """When links carried what a rank's relaying may lie beside, in one call."""
    if operator == "combine":
        return [span_of(event) for event in ranks[rank] if event["cat"] == "link"]
    return [
        span_of(event)
        for events in ranks.values()
        for event in events
        if event["cat"] == "link" and event["args"]["rank"] == rank
    ]
