"""What recorders say of what happened before: who missed a call, who made another one, who was slow.

Ranks may be of several machines, so that times are compared on one clock.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, get_args

from moe_triton.core.flight_file import OPERATORS, Flight, Run
from moe_triton.core.flight_group import (
    FlightGroup,
    Processes,
    calls_of,
    clock_shifts,
    groups_of,
    num_begun,
)
from moe_triton.core.flight_words import (
    first_sentence,
    last_in_words,
    listed,
    printable,
    ranks_in_words,
    run_in_words,
    time_in_words,
)

Kind = Literal[
    "ended in a call",
    "stopped",
    "different calls",
    "missed a call",
    "refused",
    "broken",
    "not ended",
    "left",
    "slow",
    "late",
    "no record",
]
"""Of findings, the most important first."""
KINDS: tuple[Kind, ...] = get_args(Kind)
MIN_ROUNDS = 8
SLOW_ROUNDS, SLOW_TIME = 0.8, 0.2
"""Of so many rounds, and of so much of their time, a rank is awaited longest that is called slow."""
LATE_US, LATE_TIMES = 100_000, 10
"""A rank is called late that was awaited so long once, and so many times as long as ranks usually are."""
_LONG_NS = 1_000_000_000  # a call that still runs is told of after a second


@dataclass(frozen=True)
class Finding:
    """Something that is worth knowing.

    Attributes:
        kind: one of `KINDS`.
        group: of the ranks.
        ranks: that it is about.
        text: a sentence without a full stop.
    """

    kind: Kind
    group: str
    ranks: tuple[int, ...]
    text: str


def findings(flights: Sequence[Flight], processes: Processes | None = None) -> list[Finding]:
    """What is to be seen in ranks' records, the most important first.

    Args:
        flights: of ranks of any groups and machines.
        processes: whose state is known.

    Returns:
        Nothing where every call ended well, everybody is here, and nobody was slow.
    """
    groups = groups_of(flights, processes)
    shifts = clock_shifts(flights)
    found = []
    for group in groups:
        about = f"{group.label}: " if len(groups) > 1 else ""
        for kind, ranks, text in _of_group(group, shifts):
            found.append(Finding(kind, group.name, tuple(ranks), printable(about + text)))
    return sorted(found, key=lambda finding: KINDS.index(finding.kind))


_Said = tuple[Kind, Sequence[int], str]


def _of_group(group: FlightGroup, shifts: Mapping[str, int]) -> Iterator[_Said]:
    missed = [*_missed(group)]
    yield from _of_processes(group)
    yield from missed
    yield from _different(group)
    yield from _refused(group)
    yield from _broken(group)
    yield from _not_ended(group, shifts)
    yield from _closed(group, {rank for _, ranks, _ in missed for rank in ranks})
    rounds = _rounds(group)
    slow = [*_slow(rounds)]
    yield from slow
    yield from _late(rounds, {rank for _, ranks, _ in slow for rank in ranks})
    if unknown := group.unknown:
        yield "no record", unknown, f"of {ranks_in_words(unknown)} there is no record"


def _of_processes(group: FlightGroup) -> Iterator[_Said]:
    """Processes that do not run, without having closed their buffers."""
    said: dict[tuple[Kind, str], list[int]] = {}
    for rank, flight in group.flights.items():
        process, run = group.process(rank), flight.running
        if flight.state != "open" or process not in ("gone", "stopped"):
            continue
        within = f"in {run_in_words(run)}{f', in step {run.step}' if run.step else ''}" if run else ""
        if process == "stopped":
            said.setdefault(("stopped", f"stopped{f' {within}' if run else ''}"), []).append(rank)
        elif run:
            said.setdefault(("ended in a call", f"gone: it ended {within}"), []).append(rank)
        else:
            left = f"gone, and the buffer was not closed; {last_in_words(flight, 'last call')}"
            said.setdefault(("left", left), []).append(rank)
    for (kind, text), ranks in said.items():
        processes, are = ("process", "is") if len(ranks) == 1 else ("processes", "are")
        yield kind, ranks, f"the {processes} of {ranks_in_words(ranks)} {are} {text}"


def _unresolved(group: FlightGroup) -> dict[tuple[str, int], dict[int, Run]]:
    """The calls that have not ended well on some ranks, with their last runs there."""
    calls: dict[tuple[str, int], dict[int, Run]] = {}
    for rank, flight in group.flights.items():
        last = {(run.operator, run.number): run for run in flight.runs}
        for call, run in last.items():
            has_just_begun = group.process(rank) == "running" and flight.read_ns - run.begin_ns < _LONG_NS
            is_over = run.end_ns is not None or (run is flight.running and not has_just_begun)
            if is_over and not run.ended.startswith("well"):
                calls.setdefault(call, {})[rank] = run
    return calls


def _waited_ns(flight: Flight, run: Run, ranks: Collection[int]) -> int:
    """How long a rank waited for others in a run, as far as it has said."""
    if run.awaited is not None and run.awaited[0] in ranks:
        return run.awaited[1] * 1000
    if run is flight.running and flight.wait is not None:
        return max(flight.read_ns, flight.wait.said_ns) - flight.wait.since_ns
    return (run.end_ns or flight.read_ns) - run.begin_ns


def _missed(group: FlightGroup) -> Iterator[_Said]:
    """Calls that ranks waited in which others never began."""
    for runs in _unresolved(group).values():
        call = next(iter(runs.values()))
        absent = group.behind(call)
        if not absent:
            continue
        still = [rank for rank in runs if group.running(rank) is not None]
        gave_up = [rank for rank in runs if rank not in still]
        may_come = len(still) == len(runs) and all(_goes_on(group, rank) for rank in absent)
        verb = "never began"
        if may_come:
            verb = "has not begun" if len(absent) == 1 else "have not begun"
        parts = [f"{ranks_in_words(absent)} {verb} {call.name}"]
        parts += [_waits(group, runs, waiters, absent) for waiters in (gave_up, still) if waiters]
        by_reason: dict[str, list[int]] = {}
        for rank in absent:
            by_reason.setdefault(_whereabouts(group, rank), []).append(rank)
        for reason, ranks in by_reason.items():
            parts.append(f"{ranks_in_words(ranks)}: {reason}")
        yield "missed a call", absent, "; ".join(parts)


def _goes_on(group: FlightGroup, rank: int) -> bool:
    return group.flights[rank].state == "open" and group.process(rank) != "gone"


def _waits(
    group: FlightGroup, runs: Mapping[int, Run], waiters: Sequence[int], absent: Collection[int]
) -> str:
    """How long ranks waited for others, or have until now."""
    waited_ns = max(_waited_ns(group.flights[rank], runs[rank], absent) for rank in waiters)
    time = f" {time_in_words(waited_ns)}" if waited_ns > 0 else ""
    verb, ending = "waited", " and gave up"
    if any(runs[rank].end_ns is None for rank in waiters):
        verb, ending = ("has waited" if len(waiters) == 1 else "have waited"), ""
    return f"{ranks_in_words(waiters)} {verb}{time} for {'it' if len(absent) == 1 else 'them'}{ending}"


def _whereabouts(group: FlightGroup, rank: int) -> str:
    """What there is to say of a rank that has not begun a call."""
    flight, process = group.flights[rank], group.process(rank)
    said = [f"process {process}"] if process in ("gone", "stopped") else []
    if flight.state != "open":
        said.append(f"buffer {flight.state}")
    return ", ".join([*said, last_in_words(flight, "last call")])


def _different(group: FlightGroup) -> Iterator[_Said]:
    """The first calls in which ranks differ, of those that they have on record together."""
    calls = {
        rank: calls_of(flight.runs)
        for rank, flight in group.flights.items()
        if flight.runs and all(run.operator in OPERATORS for run in flight.runs)
    }
    if all(group.flights[rank].runs[0].index == 1 for rank in calls):
        before, behind = "at first", calls
    else:
        common = [its[0] for its in calls.values() if all(its[0] in others for others in calls.values())]
        if not common:
            return
        before, behind = "", {rank: its[its.index(common[0]) :] for rank, its in calls.items()}
    for nexts in itertools.zip_longest(*behind.values()):
        made: dict[tuple[str, int], list[int]] = {}
        for rank, call in zip(behind, nexts, strict=True):
            if call is not None:
                made.setdefault(call, []).append(rank)
        if len(made) > 1:
            parts = [f"{ranks_in_words(ranks)} made {_name(call)}" for call, ranks in made.items()]
            usual = max(made.values(), key=len)
            odd = [rank for ranks in made.values() if ranks is not usual for rank in ranks]
            yield "different calls", odd, f"{before}, {listed(parts)}: calls must be the same on every rank"
            return
        before = f"after {_name(next(iter(made)))}"


def _name(call: tuple[str, int]) -> str:
    operator, number = call
    return f"{operator} number {number}"


def _broken(group: FlightGroup) -> Iterator[_Said]:
    """Buffers that are broken, and by what."""
    by_why: dict[tuple[str, str], list[int]] = {}
    for rank, flight in group.flights.items():
        if flight.state not in ("open", "closed"):
            by_why.setdefault((flight.state, first_sentence(flight.why)), []).append(rank)
    for (state, why), ranks in by_why.items():
        buffers, are = ("buffer", "is") if len(ranks) == 1 else ("buffers", "are")
        said = f"the {buffers} of {ranks_in_words(ranks)} {are} {state}"
        yield "broken", ranks, f"{said}: {why}" if why else said


def _not_ended(group: FlightGroup, shifts: Mapping[str, int]) -> Iterator[_Said]:
    """Calls that every rank with a record began, and that did not end well on some."""
    for call, all_runs in _unresolved(group).items():
        runs = {
            rank: run
            for rank, run in all_runs.items()
            if group.process(rank) not in ("gone", "stopped")
            and (run.end_ns is not None or group.flights[rank].read_ns - run.begin_ns >= _LONG_NS)
        }
        if not runs or group.behind(next(iter(runs.values()))):
            continue
        said = (
            f"{_name(call)} has not ended well on {ranks_in_words(runs)}, and no rank with a record missed it"
        )
        awaited = [run.awaited for run in runs.values() if run.awaited]
        if not awaited:
            yield "not ended", list(runs), said
            continue
        rank, us = max(awaited, key=itemgetter(1))
        late_ns = _late_ns(group, call, rank, shifts)
        late = f"; it began {time_in_words(late_ns)} after the first" if late_ns * 2 > us * 1000 else ""
        longest = f"rank {rank} was awaited longest, {time_in_words(us * 1000)}{late}"
        yield "not ended", [rank], f"{said}; {longest}"


def _late_ns(group: FlightGroup, call: tuple[str, int], rank: int, shifts: Mapping[str, int]) -> int:
    """How long after the first rank one began a call; 0 where that is not known."""
    begins = {
        each: run.begin_ns + shifts[flight.host]
        for each, flight in group.flights.items()
        for run in reversed(flight.runs)
        if (run.operator, run.number) == call
    }
    return begins[rank] - min(begins.values()) if rank in begins else 0


def _closed(group: FlightGroup, told: Collection[int]) -> Iterator[_Said]:
    """Ranks that have closed their buffers before others had made their last calls.

    Args:
        group: of the ranks.
        told: ranks of which it is told that others wait for them.
    """
    for rank, flight in group.flights.items():
        if flight.state != "closed" or rank in told:
            continue
        on = {
            other: its.runs[-1].name
            for other, its in group.flights.items()
            if its.runs and its.runs[-1].number >= num_begun(flight, its.runs[-1].operator)
        }
        if on:
            last = listed(list(dict.fromkeys(on.values())))
            text = f"rank {rank} closed its buffer, and {ranks_in_words(list(on))} went on to {last}"
            yield "left", [rank], f"{text}; {last_in_words(flight)}"


def _refused(group: FlightGroup) -> Iterator[_Said]:
    """Calls whose arguments were refused: the others waited for them meanwhile."""
    for rank, flight in group.flights.items():
        if (refused := flight.refused) is not None:
            call = f"{refused.operator} number {refused.number}"
            yield "refused", [rank], f"rank {rank}: {call} was refused, and nothing was sent: {refused.error}"


_Rounds = Mapping[tuple[str, int, str], tuple[int, int, int]]
"""By call, of the longest wait of any rank: microseconds, for whom, and nanoseconds that the call took."""


def _rounds(group: FlightGroup) -> _Rounds:
    """Those that have ended well."""
    rounds: dict[tuple[str, int, str], list[tuple[int, int, int]]] = defaultdict(list)
    for flight in group.flights.values():
        for run in flight.runs:
            if run.awaited is not None and run.end_ns is not None and run.ended.startswith("well"):
                rank, us = run.awaited
                rounds[run.operator, run.number, run.phase].append((us, rank, run.end_ns - run.begin_ns))
    return {call: max(waits) for call, waits in rounds.items()}


def _late(rounds: _Rounds, told: Collection[int]) -> Iterator[_Said]:
    """A rank that was awaited for long once."""
    if not rounds:
        return
    (operator, number, _), (us, rank, _) = max(rounds.items(), key=itemgetter(1))
    usual_us = sorted(longest for longest, _, _ in rounds.values())[len(rounds) // 2]
    if us < LATE_US or us < LATE_TIMES * usual_us or rank in told:
        return
    call = f"{operator} number {number}"
    text = f"rank {rank} was late for {call}: it was awaited {time_in_words(us * 1000)}"
    yield "late", [rank], f"{text}, and {time_in_words(usual_us * 1000)} is usual"


def _slow(rounds: _Rounds) -> Iterator[_Said]:
    """A rank that was awaited longest in most rounds, for much of their time."""
    longest = [*rounds.values()]
    count = Counter(rank for _, rank, _ in longest)
    if len(longest) < MIN_ROUNDS:
        return
    (slow, times), *_ = count.most_common(1)
    waited_ns = sum(us * 1000 for us, rank, _ in longest if rank == slow)
    took_ns = sum(ns for _, rank, ns in longest if rank == slow)
    if times >= SLOW_ROUNDS * len(longest) and waited_ns >= SLOW_TIME * took_ns:
        yield (
            "slow",
            [slow],
            f"rank {slow} was awaited longest in {times} of the last {len(longest)} rounds, "
            f"{time_in_words(waited_ns / times)} on average",
        )
