"""What cores did in a dispatch and a combine, from traces: each moment of a core is charged to one state.

From the first rank in to the last rank out, every rank is always in one state:

========  ============================================================================================
rows      in a launch that routes, packs, sends, arranges, copies or sums
flags     in one that raises flags or counts, adds counts up or reads stamps, or in that part of a send
call      in Python, in native code around the launches, or between two of them
waking    in a wait whose last flag is up already: it is woken, gets a core, looks, reads and clears
waiting   in a wait for a flag that is not up, not yet in, or out already
========  ============================================================================================

A core is charged to a rank at work, in one of the first three states. Where fewer are at work than there are
cores, cores that are left are charged to ranks that wake up, and then to those that wait. Where more are at
work, some are interrupted: they share the cores evenly. So charges add up to the time that passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moe_triton.backends.base import TracedCall, TraceEvent
from moe_triton.core.ascendc import TRACE_BLOCK, TRACE_FLAG

State = Literal["rows", "flags", "call", "waking", "waiting"]
STATES: tuple[State, ...] = ("rows", "flags", "call", "waking", "waiting")
AT_WORK: tuple[State, ...] = ("rows", "flags", "call")
FLAG_STEPS = ("send counts", "flag", "offsets", "stamps")
WAIT_STEPS = ("wait for counts", "wait", "rows")
Span = tuple[int, int]
Piece = tuple[int, int, State]
Raised = tuple[str, str]


@dataclass(frozen=True)
class Pair:
    """A dispatch and a combine on one rank. Times are ns of the clock that all ranks share.

    Attributes:
        begin_ns, end_ns: when the rank began, and when it was done.
        launches: those that are no waits, with the state of their rank, in order; flags that a send posts
            stand by themselves.
        waits: begin, end, and what has to be up, of each.
        raised_ns: when this rank had raised what others wait for, by operator and name.
    """

    begin_ns: int
    end_ns: int
    launches: list[Piece] = field(default_factory=list)
    waits: list[tuple[int, int, Raised]] = field(default_factory=list)
    raised_ns: dict[Raised, int] = field(default_factory=dict)

    @staticmethod
    def of(begin_ns: int, end_ns: int, calls: Sequence[TracedCall], events: Sequence[TraceEvent]) -> Pair:
        """From what a trace's log has of the two calls."""
        pair = Pair(begin_ns, end_ns)
        for call in calls:
            pair._add(call, [event for event in events if event.call == call.number])
        return pair

    def _add(self, call: TracedCall, events: Sequence[TraceEvent]) -> None:
        steps = [launch.step for launch in call.plan.launches]
        operator, has_flag_launch = call.plan.operator, "flag" in steps
        for number, step in enumerate(steps):
            of_launch = [event for event in events if event.launch == number]
            begin, end = _around([event for event in of_launch if event.kind == TRACE_BLOCK])
            posted = [event for event in of_launch if event.kind == TRACE_FLAG]
            if step in WAIT_STEPS:
                self.waits.append((begin, end, (operator, step)))
                continue
            state: State = "flags" if step in FLAG_STEPS else "rows"
            if step == "send" and posted:
                first, last = _around(posted)
                self.launches.extend([(begin, first, state), (first, last, "flags"), (last, end, state)])
                self.raised_ns[operator, "wait"] = last
                self.raised_ns[operator, "rows"] = end
            else:
                self.launches.append((begin, end, state))
                if step == "send counts":
                    self.raised_ns[operator, "wait for counts"] = end
                elif step == ("flag" if has_flag_launch else "send"):
                    self.raised_ns[operator, "wait"] = end

    def pieces(self, peers: Sequence[Pair]) -> list[Piece]:
        """This rank's states from its begin to its end, given what the others raised."""
        pieces = list(self.launches)
        for begin, end, awaited in self.waits:
            up = min(end, max(begin, *(peer.raised_ns[awaited] for peer in peers)))
            pieces += [(begin, up, "waiting"), (up, end, "waking")]
        pieces.sort()
        states, at = [], self.begin_ns
        for begin, end, state in [*pieces, (self.end_ns, self.end_ns, "call")]:
            states += [(at, begin, "call"), (begin, end, state)]
            at = end
        return [piece for piece in states if piece[0] < piece[1]]


def _around(events: Sequence[TraceEvent]) -> Span:
    """From the first one's begin to the last one's end."""
    return min(event.begin_ns for event in events), max(event.end_ns for event in events)


def charges_us(ranks: Sequence[Pair], cores: int) -> dict[State, float]:
    """Microseconds of each core by what they are charged to; together they are what passed from the first
    rank in to the last rank out.
    """
    first, last = min(pair.begin_ns for pair in ranks), max(pair.end_ns for pair in ranks)
    changes: list[tuple[int, int, State]] = []  # when, a rank more or less, in which state
    for rank, pair in enumerate(ranks):
        pieces = pair.pieces([*ranks[:rank], *ranks[rank + 1 :]])
        pieces += [(first, pair.begin_ns, "waiting"), (pair.end_ns, last, "waiting")]
        for begin, end, state in pieces:
            changes += [(begin, 1, state), (end, -1, state)]
    number: dict[State, int] = dict.fromkeys(STATES, 0)
    total: dict[State, float] = dict.fromkeys(STATES, 0.0)
    cores, at = min(cores, len(ranks)), first
    for when, change, state in sorted(changes, key=lambda each: each[0]):
        for each, share in _shares(number, cores).items():
            total[each] += share * (when - at) / cores / 1e3
        number[state] += change
        at = when
    return total


def _shares(number: Mapping[State, int], cores: int) -> dict[State, float]:
    """Cores by state, while so many ranks are in each."""
    working = sum(number[state] for state in AT_WORK)
    scale = min(1.0, cores / working) if working else 0.0
    shares = {state: number[state] * scale for state in AT_WORK}
    left = max(0.0, float(cores - working))
    shares["waking"] = min(left, number["waking"])
    shares["waiting"] = min(left - shares["waking"], number["waiting"])
    return shares
