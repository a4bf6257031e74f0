"""Finds the turns of loops that issue the same instructions, so that the clock need not run them all."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_TURNS = 4
"""That a period has: buffers take turns by twos, and loops are unrolled by as many as four."""
LEAST_COUNT = 8
"""Fewer repetitions are as soon run as looked at."""


@dataclass(frozen=True)
class Repeat:
    """A loop's turns that issue the same instructions.

    Attributes:
        body: of one turn, or of a few that follow each other in turn.
        count: how often.
    """

    body: Sequence[Piece]
    count: int


Piece = Sequence[int] | Repeat
"""Part of a stream: codes, or codes that repeat."""


def folded(codes: array[int], loops: Sequence[int]) -> list[Piece]:
    """Codes, with turns that repeat in a `Repeat`.

    Args:
        codes: of instructions.
        loops: codes that begin a turn of each loop, those of outer loops first.
    """
    if not loops:
        return [codes] if codes else []
    outer, inner = loops[0], loops[1:]
    ends = np.append(np.flatnonzero(_numbers(codes) == outer), len(codes))
    pieces: list[Piece] = []
    done = 0
    for turn, turns, count in _periods(_kinds(codes, ends)):
        begin, end = int(ends[turn]), int(ends[turn + turns])
        pieces += folded(codes[done:begin], inner)
        pieces.append(Repeat(folded(codes[begin:end], inner), count))
        done = begin + (end - begin) * count
    return [*pieces, *folded(codes[done:], inner)]


def _numbers(codes: array[int]) -> np.ndarray:
    return np.frombuffer(codes, f"u{codes.itemsize}") if codes else np.zeros(0, np.uint64)


def _kinds(codes: array[int], ends: np.ndarray) -> np.ndarray:
    """A number for each turn, the same for turns of the same codes."""
    known: dict[bytes, int] = {}
    turns = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    return np.array([known.setdefault(codes[a:b].tobytes(), len(known)) for a, b in turns], np.int64)


def _periods(kinds: np.ndarray) -> list[tuple[int, int, int]]:
    """First turn, turns of a period, and how many periods follow each other."""
    equal = {turns: _run_lengths(kinds, turns) for turns in range(1, MOST_TURNS + 1)}
    found = []
    turn = 0
    while turn < len(kinds):
        counts = {turns: 1 + int(lengths[turn]) // turns for turns, lengths in equal.items()}
        turns = max(counts, key=lambda turns: (counts[turns] * turns, -turns))
        if counts[turns] >= LEAST_COUNT:
            found.append((turn, turns, counts[turns]))
            turn += turns * counts[turns]
        else:
            turn += 1
    return found


def _run_lengths(kinds: np.ndarray, turns: int) -> np.ndarray:
    """For each turn, how many from it on are as the one so many turns later."""
    differs = np.ones(len(kinds), bool)
    differs[: max(0, len(kinds) - turns)] = kinds[turns:] != kinds[:-turns]
    places = np.flatnonzero(differs)
    each = np.arange(len(kinds))
    return places[np.searchsorted(places, each)] - each if len(kinds) else each
