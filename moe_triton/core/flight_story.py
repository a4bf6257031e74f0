"""What recorders say of a moment: what each rank does, and who holds up the others.

Times are of the ranks' monotonic clock, so ranks are those of one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from moe_triton.core.flight_file import Flight, Wait
from moe_triton.core.flight_group import (
    Awaited,
    FlightGroup,
    Processes,
    ProcessState,
    groups_of,
    idle_time,
    num_begun,
)
from moe_triton.core.flight_words import (
    bytes_in_words,
    first_sentence,
    last_in_words,
    listed,
    printable,
    ranks_in_words,
    time_in_words,
)

_STALE_NS = 1_000_000_000  # what was said of a wait before is told with its age


def status_lines(flights: Sequence[Flight], now_ns: int, processes: Processes | None = None) -> list[str]:
    """What each rank does, in a line.

    Args:
        flights: of ranks of any groups.
        now_ns: of the monotonic clock.
        processes: whose state is known.

    Returns:
        A line for each rank, by group and rank.
    """
    groups = groups_of(flights, processes)
    several = len(groups) > 1
    return [
        printable(
            f"rank {rank}{f' of {group.label}' if several else ''} (process {flight.pid}): "
            f"{'; '.join(_doings(flight, now_ns, group.process(rank)))}"
        )
        for group in groups
        for rank, flight in group.flights.items()
    ]


def _doings(flight: Flight, now_ns: int, process: ProcessState | None) -> Iterator[str]:
    if process in ("gone", "stopped"):
        yield f"its process is {process}"
    if flight.state != "open":
        yield f"its buffer is {flight.state}{f': {first_sentence(flight.why)}' if flight.why else ''}"
    run = flight.running
    if run is None:
        yield _idle(flight, now_ns)
        return
    details = [run.phase, f"zone {run.zone}", f"step {run.step}" if run.step else ""]
    named = f"{run.name} ({', '.join(filter(None, details))})"
    if process == "gone":
        yield f"it ended in {named}"
        return
    yield f"in {named} for {time_in_words(now_ns - run.begin_ns)}"
    if flight.wait is None:
        yield "it has not said whom it waits for"
    else:
        yield from _waiting(flight.wait, now_ns)


def _idle(flight: Flight, now_ns: int) -> str:
    """How long a rank has been in no call, and what was before."""
    return f"in no call for {time_in_words(idle_time(flight, now_ns))}; {last_in_words(flight)}"


def _waiting(wait: Wait, now_ns: int) -> Iterator[str]:
    if wait.group or wait.ranks:
        whom = f"its {wait.group}-parallel peer" if wait.group else ranks_in_words(wait.ranks)
        what = f", {wait.awaited}" if wait.awaited else ""
        most = f", {bytes_in_words(wait.num_bytes)} at most" if wait.num_bytes else ""
        yield f"it has waited {time_in_words(now_ns - wait.since_ns)} for {whom}{what}{most}"
    else:
        yield "it waits for no rank"
    queues = {rank: number for rank, number in sorted(wait.queues.items()) if number}
    if queues:
        held = [f"{number} for rank {rank}" for rank, number in queues.items()]
        yield f"posts that its queues still hold: {listed(held)}"
    if now_ns - wait.said_ns > _STALE_NS:
        yield f"it said so {time_in_words(now_ns - wait.said_ns)} ago"


def _for_peer(flight: Flight) -> str:
    """That a rank waits in its other group, whose ranks are not seen."""
    return f", for its {flight.wait.group}-parallel peer" if flight.wait and flight.wait.group else ""


def verdict(flights: Sequence[Flight], now_ns: int, processes: Processes | None = None) -> list[str]:
    """Who holds up whom: circles of ranks in several groups, and for each group its culprits.

    Processes are told apart by host and pid, so that one that is awaited in a group is found in another.

    Args:
        flights: of all ranks that are known, of any groups.
        now_ns: of the monotonic clock.
        processes: whose state is known.

    Returns:
        A line for each circle, and one for each group whose ranks are not all in one.
    """
    scene = _Scene(groups_of(flights, processes), now_ns)
    circles = list(scene.circles())
    in_circles = {at for circle in circles for at in circle}
    lines = [scene.circle_in_words(circle) for circle in circles]
    for index, group in enumerate(scene.groups):
        about = f"{group.label}: " if len(scene.groups) > 1 else ""
        lines += [about + said for said in scene.culprits(index, in_circles)]
    return [printable(line) for line in lines]


class _At(NamedTuple):
    """A rank of a group, by the group's index among those of a scene."""

    group: int
    rank: int


# How a clause about one rank begins, and about several.
_IS, _HAS = ("which is", "which are"), ("which has", "which have")
_PROCESS, _BUFFER = ("whose process is", "whose processes are"), ("whose buffer is", "whose buffers are")
_OF = ("of which", "of which")
_Clause = tuple[tuple[str, str], str]


class _Scene:
    """All groups at one moment.

    Args:
        groups: whose ranks are known.
        now_ns: of the monotonic clock.
    """

    def __init__(self, groups: Sequence[FlightGroup], now_ns: int) -> None:
        self.groups, self._now_ns = groups, now_ns
        self._places: dict[tuple[str, int], list[_At]] = {}
        self._waits: dict[_At, Awaited] = {}
        for index, group in enumerate(groups):
            for rank, flight in group.flights.items():
                self._places.setdefault((flight.host, flight.pid), []).append(_At(index, rank))
                if (awaited := group.awaited(rank)) is not None:
                    self._waits[_At(index, rank)] = awaited
        self._roots = {at: self._roots_of(at) for at in self._waits}

    def _roots_of(self, at: _At) -> list[_At]:
        """Ranks that one waits for, be it by way of others of its group, and that wait for nobody there."""
        found, left = dict[_At, None](), [at]
        while left:
            if (wait := self._waits.get(left.pop())) is not None:
                new = [other for rank in wait.ranks if (other := _At(at.group, rank)) not in found]
                found |= dict.fromkeys(new)
                left += new
        return [each for each in found if each not in self._waits]

    def _flight(self, at: _At) -> Flight:
        return self.groups[at.group].flights[at.rank]

    def _elsewhere(self, at: _At) -> _At | None:
        """Where the process of a rank, which is in no call of its group, is in one of another group."""
        group = self.groups[at.group]
        if at.rank not in group.flights or group.running(at.rank) or self._flight(at).state != "open":
            return None
        places = self._places[self._flight(at).host, self._flight(at).pid]
        return next((each for each in places if self.groups[each.group].running(each.rank)), None)

    def circles(self) -> Iterator[list[_At]]:
        """Waits that lead from one group to another and back to where they began."""
        after = {
            at: list(dict.fromkeys(filter(None, map(self._elsewhere, roots))))
            for at, roots in self._roots.items()
        }
        while True:
            try:
                TopologicalSorter(after).prepare()
            except CycleError as error:
                circle: list[_At] = error.args[1][:0:-1]  # each waits for the one behind it
                first = circle.index(min(circle))
                yield circle[first:] + circle[:first]
                after = {at: others for at, others in after.items() if at not in circle}
            else:
                return

    def circle_in_words(self, circle: Sequence[_At]) -> str:
        """The waits of a circle, in a sentence."""
        awaited = [
            next(root for root in self._roots[at] if self._elsewhere(root) == behind)
            for at, behind in zip(circle, [*circle[1:], circle[0]], strict=True)
        ]
        numbers: dict[tuple[str, int], set[int]] = {}
        for at in (*circle, *awaited):
            numbers.setdefault((self._flight(at).host, self._flight(at).pid), set()).add(at.rank)
        # A process may be another rank in another group.
        are_alike = all(len(ranks) == 1 for ranks in numbers.values())
        parts = []
        for number, (at, other) in enumerate(zip(circle, awaited, strict=True)):
            first, second = (
                f"rank {each.rank}{'' if are_alike else f' (process {self._flight(each).pid})'}"
                for each in (at, other)
            )
            verb = "for" if number else "waits for"
            parts.append(f"{first} {verb} {second} in {self.groups[at.group].label} ({self._call(at)})")
        return f"{', and '.join(parts)}: a circle"

    def _call(self, at: _At) -> str:
        """The call that a rank is in, in whatever phase."""
        run = self._flight(at).running
        return run.name if run else ""

    def culprits(self, index: int, in_circles: Collection[_At]) -> Iterator[str]:
        """Who holds up a group, or that nobody waits in it; nothing where circles say it all.

        Args:
            index: of the group.
            in_circles: ranks of circles that have been told.
        """
        group = self.groups[index]
        waiting = [at for at in self._waits if at.group == index]
        roots = sorted({root for at in waiting for root in self._roots[at]})
        told = [root for root in roots if self._elsewhere(root) in in_circles]
        said = []
        if left := [root for root in roots if root not in told]:
            held_up = [at for at in waiting if set(self._roots[at]) & set(left)]
            said.append(self._held_up(group, held_up, left))
        if stuck := [at for at in waiting if not self._roots[at]]:
            said.append(self._stuck(group, stuck))
        if not waiting:
            said.append(f"nobody waits for another rank ({self._states(group)})")
        unknown = sorted(set(group.unknown) - {root.rank for root in roots})
        if said and unknown:
            said.append(f"of {ranks_in_words(unknown)} there is no record")
        if said:
            yield "; ".join(said)

    def _held_up(self, group: FlightGroup, waiters: Sequence[_At], roots: Sequence[_At]) -> str:
        """Ranks that wait, and those that they wait for."""
        clauses: dict[_Clause, list[int]] = {}
        idle = [root for root in roots if self._is_idle(root, waiters)]
        # Of several the shortest time is told: they are alike.
        idle_ns = min((idle_time(self._flight(root), self._now_ns) for root in idle), default=0)
        for root in roots:
            clause = _HAS, f"been in no call for {time_in_words(idle_ns)}"
            if root not in idle:
                clause = self._clause(group, root, waiters)
            clauses.setdefault(clause, []).append(root.rank)
        whom = [
            f"{ranks_in_words(ranks)}, {begin[len(ranks) > 1]} {rest}"
            for (begin, rest), ranks in clauses.items()
        ]
        one = len(waiters) == 1
        verb = "waits for" if one else "wait for"
        if not all(self._waits[at].is_said for at in waiters):
            verb = "seems to wait for" if one else "seem to wait for"
        since: dict[str, int] = {}
        for at in waiters:
            since_ns = self._waits[at].since_ns
            since[self._call(at)] = min(since.get(self._call(at), since_ns), since_ns)
        calls = [f"{call}, for {time_in_words(self._now_ns - since_ns)}" for call, since_ns in since.items()]
        ranks = ranks_in_words([at.rank for at in waiters])
        return f"{ranks} {verb} {', and for '.join(whom)} ({'; '.join(calls)})"

    def _is_idle(self, root: _At, waiters: Sequence[_At]) -> bool:
        """Whether nothing is known to keep a rank from the call that others wait in."""
        group = self.groups[root.group]
        return (
            root.rank in group.flights
            and group.process(root.rank) not in ("gone", "stopped")
            and self._flight(root).state == "open"
            and not group.running(root.rank)
            and not self._elsewhere(root)
            and not self._is_ahead(root, waiters)
        )

    def _is_ahead(self, root: _At, waiters: Sequence[_At]) -> bool:
        """Whether a rank is through with the calls in which others wait for it: what it sent is under way."""
        group, flight = self.groups[root.group], self._flight(root)
        waited = [run for at in waiters if at.group == root.group and (run := group.running(at.rank))]
        now = group.running(root.rank)
        return bool(waited) and all(
            num_begun(flight, run.operator) > run.number
            and (now is None or (now.operator, now.number) != (run.operator, run.number))
            for run in waited
        )

    def _clause(self, group: FlightGroup, root: _At, waiters: Sequence[_At]) -> _Clause:
        """What keeps a rank that is not idle from those that wait for it."""
        if root.rank not in group.flights:
            return _OF, "there is no record"
        flight, process = self._flight(root), group.process(root.rank)
        if process == "gone":
            return _PROCESS, f"gone since {self._call(root)}" if flight.running else "gone"
        if process == "stopped":
            return _IS, "stopped"
        if flight.state != "open":
            why = first_sentence(flight.why)
            return _BUFFER, f"{flight.state}: {why}" if why else flight.state
        if (other := self._elsewhere(root)) is not None:
            return _IS, f"in {self._call(other)} of {self.groups[other.group].label}"
        theirs = list(dict.fromkeys(map(self._call, waiters)))
        if self._is_ahead(root, waiters):
            return _IS, f"through with {listed(theirs)} itself: what it sent is still under way"
        if self._call(root) in theirs:
            return _IS, "in the same call, and not known to wait"
        return _IS, f"in another call: {self._call(root)} while others are in {listed(theirs)}"

    def _stuck(self, group: FlightGroup, waiters: Sequence[_At]) -> str:
        """Ranks that wait for each other."""
        calls = Counter(map(self._call, waiters))
        usual, _ = calls.most_common(1)[0]
        in_usual = [at for at in waiters if self._call(at) == usual]
        if len(calls) > 1:
            return self._held_up(group, in_usual, [at for at in waiters if at not in in_usual])
        since_ns = min(self._waits[at].since_ns for at in waiters)
        ranks, time = ranks_in_words([at.rank for at in waiters]), time_in_words(self._now_ns - since_ns)
        return f"{ranks} wait for each other in {usual}, for {time}: what they posted there has not all come"

    def _states(self, group: FlightGroup) -> str:
        states: dict[str, list[int]] = {}
        for rank, flight in group.flights.items():
            process, run = group.process(rank), group.running(rank)
            state = f"process {process}" if process in ("gone", "stopped") else f"buffer {flight.state}"
            if process not in ("gone", "stopped") and flight.state == "open":
                state = f"in {run.name}{_for_peer(flight)}" if run else "in no call"
            states.setdefault(state, []).append(rank)
        return "; ".join(f"{ranks_in_words(ranks)}: {state}" for state, ranks in states.items())
