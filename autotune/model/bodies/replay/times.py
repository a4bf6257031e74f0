"""Times of a replay. One is an integer: cycles since the begin, and below them what they were spent on.

Fields of 64 bits, one for each of `PARTS` and the sum of all of them on top, in 2^-20 of a cycle: adding a
span to a time adds it to its part too, and the later of two times is the larger number. Where two are as
late, the parts decide, always in the same way. Sums are exact, so turns of a loop that take the same time
are found to (`autotune.model.bodies.replay.pipes.Core`).
"""

from __future__ import annotations

SCALAR, GLOBAL, BYTES, VECTOR, FLAGS = "scalar", "scalar loads", "memory bandwidth", "vector", "flags"
PARTS = (SCALAR, GLOBAL, "MTE2", BYTES, VECTOR, "MTE3", FLAGS)
"""What time on the critical path goes to: instructions of S and their issue; scalar accesses to global
memory; latency of loads; bytes of copies; vector instructions; latency of stores; flags between pipes."""

TICKS_PER_CYCLE = 1 << 20
_BITS = 64
SUM = len(PARTS) * _BITS
"""Where the sum begins: ``time >> SUM`` are ticks."""
_ONE_OF = {part: (1 << SUM) + (1 << (index * _BITS)) for index, part in enumerate(PARTS)}


def ticks_of(cycles: float) -> int:
    """The nearest number of ticks."""
    return round(cycles * TICKS_PER_CYCLE)


def span(part: str, cycles: float) -> int:
    """What a time is later by, when cycles are spent on a part."""
    return ticks_of(cycles) * _ONE_OF[part]


def cycles_of(ticks: int) -> float:
    """Ticks in cycles."""
    return ticks / TICKS_PER_CYCLE


def parts_of(time: int) -> dict[str, float]:
    """Cycles by what they went to; their sum is the time."""
    mask = (1 << _BITS) - 1
    return {part: cycles_of(time >> (index * _BITS) & mask) for index, part in enumerate(PARTS)}
