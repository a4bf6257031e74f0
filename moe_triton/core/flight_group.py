"""What the recorders of several ranks say together: which calls each has begun, and whom it waits for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_triton.core.flight_file import Flight, Run

ProcessState = Literal["running", "stopped", "gone"]
Processes = Mapping[tuple[str, int], ProcessState]
"""By host and pid, of those whose state is known."""


@dataclass(frozen=True)
class Awaited:
    """Whom a rank waits for, and how that is known.

    Attributes:
        ranks: of its group, that have not come.
        is_said: by the rank itself; otherwise they are those that are behind.
        since_ns: when the wait, or the call, began.
    """

    ranks: tuple[int, ...]
    is_said: bool
    since_ns: int


@dataclass(frozen=True)
class FlightGroup:
    """The ranks of one buffer.

    Attributes:
        name: which all of them have alike; "" of one that has not met others yet.
        flights: by rank, of those whose recorders have been read.
        processes: whose state is known.
    """

    name: str
    flights: Mapping[int, Flight]
    processes: Processes

    @property
    def label(self) -> str:
        """Its name as sentences have it."""
        return f"group {self.name}" if self.name else "a group that has not met yet"

    @property
    def num_ranks(self) -> int:
        """As most of them say; recorders may be damaged."""
        said = [flight.num_ranks for flight in self.flights.values()]
        return max(set(said), key=said.count)

    @property
    def unknown(self) -> list[int]:
        """Ranks without a record."""
        return [rank for rank in range(self.num_ranks) if rank not in self.flights]

    def process(self, rank: int) -> ProcessState | None:
        """The state of a rank's process; None if it is not known."""
        flight = self.flights[rank]
        return self.processes.get((flight.host, flight.pid))

    def running(self, rank: int) -> Run | None:
        """The call that a rank is in, if its process goes on."""
        flight = self.flights[rank]
        lives = self.process(rank) not in ("gone", "stopped") and flight.state == "open"
        return flight.running if lives else None

    def awaited(self, rank: int) -> Awaited | None:
        """Whom a rank in a call waits for in this group; None if that is not known.

        Where it has not said so, it waits for those that have not begun its call, or if there are none, for
        those without a record.
        """
        run, wait = self.running(rank), self.flights[rank].wait
        if run is None or (wait is not None and wait.group):
            return None
        if wait is not None:
            said = tuple(each for each in wait.ranks if 0 <= each < self.num_ranks and each != rank)
            return Awaited(said, True, wait.since_ns) if said else None
        suspects = self.behind(run) or self.unknown
        return Awaited(tuple(suspects), False, run.begin_ns) if suspects else None

    def behind(self, run: Run) -> list[int]:
        """Ranks with a record that have not begun the call of a run."""
        begun = {rank: num_begun(flight, run.operator) for rank, flight in self.flights.items()}
        return [rank for rank, number in begun.items() if number <= run.number]


def groups_of(flights: Sequence[Flight], processes: Processes | None = None) -> list[FlightGroup]:
    """The ranks of each buffer, by its name. Of several records of one rank the newest counts."""
    made: dict[tuple[str, str], dict[int, Flight]] = {}
    for flight in sorted(flights, key=lambda each: (each.group, each.rank, *_age(each))):
        alone = "" if flight.group else flight.source
        made.setdefault((flight.group, alone), {})[flight.rank] = flight
    return [FlightGroup(name, its, processes or {}) for (name, _), its in made.items()]


def _age(flight: Flight) -> tuple[int, int, int]:
    return flight.opened_ns, flight.num_runs, flight.read_ns


def num_begun(flight: Flight, operator: str) -> int:
    """How many calls of an operator a rank has begun."""
    ended = flight.totals.get(operator, {}).get("runs", 0)
    return max([ended, *(run.number + 1 for run in flight.runs if run.operator == operator)])


def idle_time(flight: Flight, now_ns: int) -> int:
    """Nanoseconds since a rank's last call ended, or since its buffer was made."""
    return now_ns - max([flight.opened_ns, *(run.end_ns or run.begin_ns for run in flight.runs)])


def calls_of(runs: Iterable[Run]) -> list[tuple[str, int]]:
    """Operator and number of each call in runs, in order of their begins."""
    return list(dict.fromkeys((run.operator, run.number) for run in runs))


def clock_shifts(flights: Sequence[Flight]) -> dict[str, int]:
    """Nanoseconds to add to times of each host, for those of the first one's clock.

    A host's are all shifted alike: its processes have one clock, though each has compared it with the time of
    day at another moment.
    """
    shifts: dict[str, int] = {}
    for flight in flights:
        shifts.setdefault(flight.host, flight.unix_minus_monotonic_ns - flights[0].unix_minus_monotonic_ns)
    return shifts
