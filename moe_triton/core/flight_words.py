"""How what recorders hold is said in sentences: ranks, times, bytes, calls, and texts that others wrote."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from moe_triton.core.flight_file import Flight, Run

# Nanoseconds of a unit, up to how many of it are said, and its name.
_TIMES = (
    (1e3, 999.5, "us"),
    (1e6, 999.5, "ms"),
    (1e9, 119.5, "s"),
    (60e9, 119.5, "min"),
    (3600e9, 47.5, "h"),
)
_DAY_NS = 86_400e9
_SIZES = "B", "kB", "MB", "GB", "TB"


def ranks_in_words(ranks: Collection[int]) -> str:
    """Like "rank 3", "ranks 0 and 1", or "ranks 0 to 2 and 5"."""
    ordered = sorted(set(ranks))
    parts: list[str] = []
    for _, each in itertools.groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        first, *others = [rank for _, rank in each]
        parts += [f"{first} to {others[-1]}"] if len(others) > 1 else map(str, [first, *others])
    return f"rank{'s' if len(ordered) != 1 else ''} {listed(parts)}"


def listed(parts: Sequence[str]) -> str:
    """Like "a, b and c"."""
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def time_in_words(ns: float) -> str:
    """A time with three digits, in the unit that suits it; one that is negative is none."""
    ns = max(ns, 0)
    for unit, most, name in _TIMES:
        if ns / unit < most:
            return f"{ns / unit:.3g} {name}"
    return f"{ns / _DAY_NS:.0f} days"


def bytes_in_words(num_bytes: float) -> str:
    """Bytes with three digits, in the unit that suits them."""
    for name in _SIZES[:-1]:
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {name}"
        num_bytes /= 1e3
    return f"{num_bytes:.0f} {_SIZES[-1]}"


def printable(text: str) -> str:
    """A text in one line that a terminal shows and does not obey: what others wrote may hold anything."""
    words = " ".join(text.split())
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in words
    )


def first_sentence(text: str) -> str:
    """That of an error, without its full stop: what follows may differ between ranks that mean the same."""
    return printable(text).partition(". ")[0].removesuffix(".")


def run_in_words(run: Run) -> str:
    """Its call, with the phase where it is one of several."""
    return f"{run.name} ({run.phase})" if run.phase else run.name


_ENDINGS = {
    "running": "has not ended",
    "failed": "ended with a failure",
    "stopped or reported": "ended in an error, or was stopped",
}


def last_in_words(flight: Flight, whose: str = "its last,") -> str:
    """What a rank's last call was, and how that ended.

    Args:
        flight: of the rank.
        whose: what stands before the call.
    """
    if flight.runs:
        last = flight.runs[-1]
        said = f"{whose} {run_in_words(last)}, {_ENDINGS.get(last.ended, f'ended {last.ended}')}"
    else:
        said = "no record of a call can be read" if flight.num_runs else "no call until now"
    refused = refused_in_words(flight)
    return f"{said}; {refused}" if refused else said


def refused_in_words(flight: Flight) -> str:
    """What a rank called last, if that was refused for its arguments; "" if it has made a call since."""
    refused = flight.refused
    if refused is None or (flight.runs and flight.runs[-1].begin_ns > refused.at_ns):
        return ""
    return f"{refused.operator} number {refused.number} was refused: {refused.error}"
